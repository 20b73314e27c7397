"""What machines and devices have: given by the configuration, or read from this machine."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

from hydraflow.device import resolve_dtype
from hydraflow.engine.config import FSDPConfig
from hydraflow.memory import limits
from hydraflow.memory.limits import GIB, BytesPerNumber, host_memory, limits_of
from hydraflow.schema import PPOConfig


def described(**cluster: object) -> PPOConfig:
    config = PPOConfig()
    for name, value in cluster.items():
        setattr(config.cluster, name, value)
    return config


def test_machines_that_are_described() -> None:
    found = limits_of(
        described(device="H100", devices_per_node=8, device_memory_gib=79.5, host_memory_gib=2048)
    )
    assert (found.device_type, found.devices_per_node) == ("gpu", 8)
    assert (found.device_bytes, found.host_bytes) == (int(79.5 * GIB), 2048 * GIB)
    assert found.half and not found.notes


def test_a_described_gpu_says_nothing_of_its_machine() -> None:
    found = limits_of(described(device="H100"))
    assert found.device_bytes is None
    assert len(found.notes) == (1 if found.host_bytes is not None else 2)


def test_this_machine() -> None:
    config = PPOConfig()
    config.trainer.device = "cpu"
    found = limits_of(config)
    assert found.device_bytes is None
    assert 0 < host_memory().total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.host_bytes == host_memory().total
    for name in ("auto", "fp32", "bf16", "fp16", "fp64"):
        assert found.bytes_of(name) == torch.finfo(resolve_dtype(name, "cpu")).bits // 8


def test_weights_that_are_copied_for_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processor: oneDNN copies what it multiplies, MKL what has the same bits when transposed."""
    config = PPOConfig()
    config.trainer.device = "cpu"

    def copied(slow: bool, fast: bool, bf16: bool) -> dict[int, str]:
        values = {"mkl_is_slow": slow, "mkl_has_avx512": fast, "cpu_has_bf16": bf16}
        for name, value in values.items():
            monkeypatch.setattr(limits, name, partial(bool, value))
        return dict(limits_of(config).copies)

    assert copied(slow=True, fast=False, bf16=True) == {4: "oneDNN's", 2: "all"}
    assert copied(slow=False, fast=True, bf16=False) == {4: "MKL's"}
    assert copied(slow=False, fast=False, bf16=False) == {}
    assert limits_of(described(device="H100")).copies == {}


def test_types_are_resolved_as_the_engine_does() -> None:
    found = limits_of(described(device="H100"))
    assert BytesPerNumber.of(FSDPConfig(), found) == BytesPerNumber(4, 2, 4)
    assert BytesPerNumber.of(FSDPConfig(model_dtype="bf16", reduce_dtype="bf16"), found) == BytesPerNumber(
        2, 2, 2
    )
    assert BytesPerNumber.of(FSDPConfig(model_dtype="fp64"), found) == BytesPerNumber(8, 8, 8)
