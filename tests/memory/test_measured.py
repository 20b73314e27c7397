"""The promise: estimates of three small models, on FSDP2 and on Megatron-Core, are within 20 % of what real
worker processes hold at their peaks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "memory.py"


def script() -> Any:
    """The program that measures, as a module."""
    spec = importlib.util.spec_from_file_location("bench_memory", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CASES = ("tied", "untied", "stored", "shared", "matrices")
"""Of the program's; its two others divide the layers and the optimizer's state of a Megatron model."""


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """What the program found for each case; the libraries are imported once for all of them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--cases", ",".join(CASES)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {reported["case"]: reported for reported in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_every_phase_is_estimated_within_20_percent(case: str, measured: dict[str, Any]) -> None:
    reported = measured[case]
    assert set(reported["phases"]) == {"sync", "sample", "log_probs", "update"}
    off = {
        name: one
        for name, one in reported["phases"].items()
        if not 0.8 <= one["estimate"] / one["measured"] <= 1.2
    }
    assert not off, f"{case}: {off}"
    largest = max(one["measured"] for one in reported["phases"].values())
    assert largest > 200 * 2**20, "too little to tell the model from noise"


def test_the_cases_differ_in_what_they_stress() -> None:
    """A model per kind of embedding; gradients accumulated and not; activations kept and made again."""
    cases = script().CASES.values()
    assert {case.sizes["tie_word_embeddings"] for case in cases} == {True, False}
    assert {case.rows == case.micro for case in cases} == {True, False}
    assert {
        case.settings.get("actor_rollout_ref.model.enable_gradient_checkpointing", True) for case in cases
    } == {True, False}
    assert len({case.architecture for case in cases}) == 3
