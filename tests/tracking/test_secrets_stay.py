"""What the trackers' own libraries find out about a process: in nothing that they write is a word of its
command line's secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"wandb": "wandb", "swanlab": "swanlab", "mlflow": "sqlalchemy", "tensorboard": "tensorboard"}
"""Tracker -> a package that it cannot do without."""
SECRETS = {
    "in_a_mapping": "S3CRETMAPPING",
    "in_an_address": "S3CRETADDRESS",
    "of_the_remote": "S3CRETREMOTE",
    "proxy": "S3CRETPROXY",
}
LOGS_A_STEP = """
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tracking.samples import about
from hydraflow.tracking.trackers import TRACKERS, RunInfo
tracker, folder, proxy = sys.argv[1], Path(sys.argv[2]), f"http://user:{sys.argv[3]}@host:1"
run_about = replace(about(folder), wandb_proxy=proxy)
opened = TRACKERS[tracker](RunInfo(folder, "", None, run_id="x", about=run_about))
opened.log({"loss": 0.5}, 1)
opened.close()
"""


def files_with(word: str, folder: Path) -> list[str]:
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and word.encode() in path.read_bytes()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tracker", list(PACKAGES))
def test_no_secret_of_the_process_is_in_what_a_tracker_writes(tmp_path: Path, tracker: str) -> None:
    if find_spec(PACKAGES[tracker]) is None:
        pytest.skip(f"{tracker} is not installed")
    home, run = tmp_path / "home", tmp_path / "home" / "run"
    run.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(home)], check=True)
    remote = f"https://{SECRETS['of_the_remote']}@example.org/me/mine.git"
    subprocess.run(["git", "-C", str(home), "remote", "add", "origin", remote], check=True)
    commit = ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m", "first"]
    subprocess.run(["git", "-C", str(home), *commit], check=True)
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB_", "MLFLOW_", "SWANLAB_"))
    }
    environ |= {
        "HOME": str(home),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
    }
    words = [
        f"+x.env_vars={{HF_TOKEN:{SECRETS['in_a_mapping']}}}",
        f"x.url=http://u:{SECRETS['in_an_address']}@h",
    ]
    command = [sys.executable, "-c", LOGS_A_STEP, tracker, str(run), SECRETS["proxy"], *words]
    done = subprocess.run(
        command, cwd=home, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert files_with("loss", run), "the step is there, as it was logged"
    (home / ".git" / "config").unlink()  # of this test's own making
    assert {what: found for what, word in SECRETS.items() if (found := files_with(word, home))} == {}
