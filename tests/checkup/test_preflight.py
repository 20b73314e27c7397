"""The fast part: quiet when all is well, warnings in the log, problems together."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from checkup.given import configured

from hydraflow.checkup import memory
from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import note, ok, problem, warning
from hydraflow.checkup.preflight import require_healthy
from hydraflow.checkup.table import CHECKS, Check, run_checks
from hydraflow.errors import ConfigError


def test_warnings_are_logged_and_problems_raised_together(caplog: pytest.LogCaptureFixture) -> None:
    checks = [
        Check("one", lambda context: [ok("fine"), note("by the way"), warning("low", "more")], fast=True),
        Check("two", lambda context: [problem("broken", "mend it")], fast=True),
        Check("three", lambda context: [problem("gone")], fast=True),
        Check("slow", lambda context: [problem("never looked at")]),
    ]
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError) as caught:
        require_healthy(CheckContext(configured()), checks)
    assert [record.getMessage() for record in caplog.records] == ["one: low\n      -> more"]
    assert [str(each) for each in caught.value.problems] == ["two: broken\n      -> mend it", "three: gone"]


def test_a_small_run_is_healthy(model: Path, data: Path, tmp_path: Path) -> None:
    context = CheckContext(configured(model, data, trainer__default_local_dir=str(tmp_path / "run")))
    require_healthy(context)
    assert not (tmp_path / "run").exists()


def test_a_broken_model_is_found(model: Path, data: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is truncated"):
        require_healthy(CheckContext(configured(model, data)))


def test_it_is_fast(model: Path, data: Path) -> None:
    """In the time of this process alone: the machine may be busy with others."""
    warm = CheckContext(configured(model, data))
    opened = {
        "tokenizer": warm.tokenizer,
        "plan": warm.plan,
        "machine": warm.machine,
        "first_rows": warm.first_rows,
    }
    fast = [check for check in CHECKS if check.fast]
    list(run_checks(CheckContext(warm.config, opened=opened), fast))  # imports
    began = time.process_time()
    list(run_checks(CheckContext(warm.config, opened=opened), fast))
    assert time.process_time() - began < 0.3


def test_too_little_memory_of_the_machine_is_found(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: memory.MachineMemory(total=2**30, available=2**28))
    with pytest.raises(
        ConfigError,
        match=r"host memory: the plan needs about .* of host memory; 256 MiB of 1.00 GiB available",
    ):
        require_healthy(CheckContext(configured(model, data)))
