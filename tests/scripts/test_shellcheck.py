"""Every shell script is clean in the eyes of shellcheck."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    [
        *ROOT.glob("scripts/**/*.sh"),
        *ROOT.glob("examples/**/*.sbatch"),
        *ROOT.glob("tests/**/*.sh"),
        ROOT / ".ci" / "run",
    ]
)


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="needs the program shellcheck (apt-get install shellcheck)"
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_shellcheck(script: Path) -> None:
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_scripts_stop_at_the_first_fault() -> None:
    assert {"job.sh", "node.sh", "train.sh", "ppo.sbatch"} <= {script.name for script in SCRIPTS}
    for script in SCRIPTS:
        text = script.read_text()
        assert "set -euo pipefail" in text or "Sourced by them" in text, script
