"""Libraries together: real distributions and made-up ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from checkup.given import configured, findings, states

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import State
from hydraflow.checkup.libraries import broken_requirements
from hydraflow.checkup.probe import ProcessResult
from hydraflow.models import attention
from hydraflow.options import Library


def distribution(folder: Path, name: str, version: str, *asks: str) -> None:
    """The metadata of a made-up distribution."""
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {each}" for each in asks),
    ]
    (made / "METADATA").write_text("\n".join(lines) + "\n")


def test_the_libraries_of_this_environment_fit() -> None:
    assert states(findings(CheckContext(configured()), "library versions")) == [State.OK]
    [used] = findings(CheckContext(configured()), "tensordict and torch")
    assert used.state is State.OK and "joined rows" in used.evidence


def test_a_requirement_that_is_not_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = ['gone; extra == "more"', 'gone; sys_platform == "os2"']
    distribution(tmp_path, "made-up", "1.0", "numpy<1", "no-such-thing>=2", "pytest", *elsewhere)
    monkeypatch.syspath_prepend(str(tmp_path))
    first, second = broken_requirements("made-up")
    assert first.startswith("made-up needs numpy<1, but ")
    assert second == "made-up needs no-such-thing>=2, which is not installed"


@pytest.mark.parametrize("asked", ["2.0.0", "2.0.0+cpu"])
def test_a_build_for_cpus_is_its_version_and_itself(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(tmp_path, "made-for-cpus", "2.0.0+cpu")
    distribution(tmp_path, "made-up-too", "1.0", f"made-for-cpus=={asked}", "made-for-cpus==2.0.0+gpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    [found] = broken_requirements("made-up-too")
    assert found.startswith("made-up-too needs made-for-cpus==2.0.0+gpu")


def test_vllm_that_is_asked_for_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    [found] = findings(CheckContext(configured(actor_rollout_ref__rollout__name="vllm")), "vLLM and torch")
    assert found.state is State.PROBLEM and "vllm" in found.remedy
    assert states(findings(CheckContext(configured()), "vLLM and torch")) == [State.SKIPPED]


def test_vllm_for_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text("")
    distribution(tmp_path, "vllm", "9.9", "torch==1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    [found] = findings(CheckContext(configured(actor_rollout_ref__rollout__name="vllm")), "vLLM and torch")
    assert found.state is State.PROBLEM and "vllm needs torch==1.0, but" in found.evidence
    assert found.remedy.startswith("pip install 'torch==1.0'")


@pytest.mark.parametrize(("device", "state"), [("cpu", State.OK), ("tpu", State.PROBLEM)])
def test_vllm_for_another_kind_of_device(
    device: str, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("LLM, SamplingParams, __version__ = object, dict, '9.9'\n")
    (package / "platforms.py").write_text(
        f"class current_platform: device_type = '{device}'\nprint('a warning: device=cuda')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asking = CheckContext(configured(actor_rollout_ref__rollout__name="vllm"))
    [found] = findings(asking, "vLLM and torch")
    assert found.state is state and found.evidence.startswith(f"vLLM 9.9 for {device}, torch ")
    assert found.evidence.endswith("this run is on cpu") == (state is State.PROBLEM)


def test_sglang_that_is_missing_too_old_or_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = CheckContext(configured(actor_rollout_ref__rollout__name="sglang"))
    [found] = findings(asking, "SGLang and torch")
    assert found.state is State.PROBLEM and "docs/sglang.md" in found.remedy
    assert states(findings(CheckContext(configured()), "SGLang and torch")) == [State.SKIPPED]
    server = tmp_path / "sglang" / "srt" / "entrypoints" / "http_server.py"
    server.parent.mkdir(parents=True)
    server.write_text("raise ImportError('no kernels')\n")
    distribution(tmp_path, "sglang", "0.5.9")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [found] = findings(asking, "SGLang and torch")
    assert (
        "SGLang 0.5.9" in found.evidence
        and "cannot be imported" in found.evidence
        and "no kernels" in found.evidence
    )
    server.write_text("")
    [found] = findings(asking, "SGLang and torch")
    assert found.state is State.PROBLEM and "SGLang 0.5.9" in found.evidence
    assert "older than 0.5.23" in found.evidence


@pytest.mark.slow
def test_megatron_that_fits_is_missing_or_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = CheckContext(configured(actor_rollout_ref__actor__strategy="megatron"))
    other = CheckContext(configured())
    assert states(findings(other, "Megatron-Core")) == [State.SKIPPED]
    [found] = findings(asking, "Megatron-Core")
    assert found.state is State.OK and "Megatron-Core 0.16" in found.evidence
    distribution(tmp_path, "megatron-core", "0.15.3")
    monkeypatch.syspath_prepend(str(tmp_path))
    [found] = findings(asking, "library versions")
    assert "but 0.15.3 is installed" in found.evidence
    assert found.remedy.startswith("pip install 'megatron-core")
    assert states(findings(other, "library versions")) == [State.OK]
    monkeypatch.setattr(Library, "version", "")
    [found] = findings(asking, "Megatron-Core")
    assert found.state is State.PROBLEM and "hydraflow-trainer[megatron]" in found.remedy


def broken_flash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flash-attn that was built for another torch, as its import ends."""
    made = folder / "flash_attn"
    made.mkdir()
    (made / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


def test_flash_attn_that_does_not_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_flash(tmp_path, monkeypatch)
    [found] = findings(CheckContext(configured()), "flash-attn")
    assert found.state is State.NOTE  # a CPU does not need it
    assert "undefined symbol" in found.evidence and "SDPA" in found.evidence


def test_attention_falls_back_where_flash_attn_does_not_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_flash(tmp_path, monkeypatch)
    assert attention.flash_kernel.__wrapped__() is None


def test_flash_attn_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_flash(tmp_path, monkeypatch)
    (tmp_path / "flash_attn" / "__init__.py").write_text(
        "__version__ = '2.9'\ndef flash_attn_varlen_func(): return 42\n"
    )
    kernel = attention.flash_kernel.__wrapped__()
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert kernel is not None and kernel() == 42
    [found] = findings(CheckContext(configured()), "flash-attn")
    assert found.state is State.OK and "flash-attn and torch 2.9" in found.evidence


def test_triton_is_tried_where_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(findings(CheckContext(configured()), "Triton")) == [State.SKIPPED]
    on_a_gpu = CheckContext(configured())
    monkeypatch.setattr(CheckContext, "device_type", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    [found] = findings(on_a_gpu, "Triton")
    assert found.state is State.WARNING and "exit code 1" in found.evidence and "C compiler" in found.remedy
    monkeypatch.setattr("hydraflow.checkup.libraries.run_python", lambda *_, seconds: ProcessResult(0, "3.6"))
    [found] = findings(on_a_gpu, "Triton")
    assert found.state is State.OK and "Triton 3.6" in found.evidence
