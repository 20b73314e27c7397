"""What machines and devices have: given by the configuration, or read from this machine."""

from __future__ import annotations

import os

import torch

from hydraflow.device import resolve_dtype
from hydraflow.engine.config import FSDPConfig
from hydraflow.memory.limits import GIB, BytesPerNumber, host_memory, limits_of
from hydraflow.schema import PPOConfig


def described(**cluster: object) -> PPOConfig:
    config = PPOConfig()
    for name, value in cluster.items():
        setattr(config.cluster, name, value)
    return config


def test_machines_that_are_described() -> None:
    limits = limits_of(
        described(device="H100", devices_per_node=8, device_memory_gib=79.5, host_memory_gib=2048)
    )
    assert (limits.device_type, limits.devices_per_node) == ("gpu", 8)
    assert (limits.device_bytes, limits.host_bytes) == (int(79.5 * GIB), 2048 * GIB)
    assert limits.half and not limits.notes


def test_a_described_gpu_says_nothing_of_its_machine() -> None:
    limits = limits_of(described(device="H100"))
    assert limits.device_bytes is None
    assert len(limits.notes) == (1 if limits.host_bytes is not None else 2)


def test_this_machine() -> None:
    config = PPOConfig()
    config.trainer.device = "cpu"
    limits = limits_of(config)
    assert limits.device_bytes is None
    assert 0 < host_memory().total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limits.host_bytes == host_memory().total
    for name in ("auto", "fp32", "bf16", "fp16", "fp64"):
        assert limits.bytes_of(name) == torch.finfo(resolve_dtype(name, "cpu")).bits // 8


def test_types_are_resolved_as_the_engine_does() -> None:
    limits = limits_of(described(device="H100"))
    assert BytesPerNumber.of(FSDPConfig(), limits) == BytesPerNumber(4, 2, 4)
    assert BytesPerNumber.of(FSDPConfig(model_dtype="bf16", reduce_dtype="bf16"), limits) == BytesPerNumber(
        2, 2, 2
    )
    assert BytesPerNumber.of(FSDPConfig(model_dtype="fp64"), limits) == BytesPerNumber(8, 8, 8)
