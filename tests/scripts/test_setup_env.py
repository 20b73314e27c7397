"""Where torch comes from on a machine without a GPU, with a pip that only notes what it is asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts" / "setup_env.sh"
PUBLIC = "https://download.pytorch.org/whl/cpu"
PIP = """#!/usr/bin/env bash
# python of the environment: no torch is installed, and pip succeeds where its words match $KNOWN
[[ "$1" == -c ]] && exit 1
echo "${*:3}" >>"$NOTES"
[[ "${*:3}" =~ $KNOWN ]]
"""


def install(folder: Path, *, known: str, index: str = "") -> tuple[int, list[str], str]:
    """Exit code, what pip was asked for, and what was said; pip knows what matches `known`."""
    python = folder / "python"
    python.write_text(PIP)
    python.chmod(0o755)
    no_gpu = folder / "nvidia-smi"
    no_gpu.write_text("#!/usr/bin/env bash\nexit 1\n")
    no_gpu.chmod(0o755)
    environment = {**os.environ, "NOTES": str(folder / "notes"), "KNOWN": known, "PYTHON": str(python)}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    environment.pop("HYDRAFLOW_TORCH_INDEX", None)
    if index:
        environment["HYDRAFLOW_TORCH_INDEX"] = index
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'source "{SETUP}"; install_torch'],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, (folder / "notes").read_text().splitlines(), done.stdout + done.stderr


def test_the_index_that_pip_knows_comes_first(tmp_path: Path) -> None:
    code, asked, said = install(tmp_path, known=r"\+cpu")
    assert (code, len(asked)) == (0, 1) and "--extra-index-url" not in asked[0], said


def test_then_the_public_index_of_cpu_wheels(tmp_path: Path) -> None:
    code, asked, said = install(tmp_path, known=PUBLIC)
    assert (code, len(asked)) == (0, 2), said
    assert f"--extra-index-url {PUBLIC}" in asked[1] and asked[1].endswith("+cpu")
    assert "GB" not in said


def test_an_index_that_was_given_is_asked_in_place_of_the_public_one(tmp_path: Path) -> None:
    code, asked, _ = install(tmp_path, known="mirror", index="https://mirror.example/cpu")
    assert code == 0
    [one] = asked
    assert "--extra-index-url https://mirror.example/cpu" in one and PUBLIC not in one


def test_the_plain_package_is_the_last_resort_and_its_size_is_said(tmp_path: Path) -> None:
    code, asked, said = install(tmp_path, known=r"torch==[0-9.]+$")
    assert code == 0 and asked[-1].startswith("install --quiet torch==") and "+cpu" not in asked[-1]
    assert "no CPU build of torch" in said and "about 3 GB" in said


@pytest.mark.parametrize("index", ["", "https://mirror.example/cpu"])
def test_without_any_torch_it_stops_with_what_to_do(tmp_path: Path, index: str) -> None:
    code, _, said = install(tmp_path, known="nothing", index=index)
    assert code == 2 and "HYDRAFLOW_TORCH_INDEX" in said
