"""A model of the Megatron engine, divided in some way, against transformers and the FSDP engine, both in
float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import megatron_jobs as jobs
from engine.megatron_models import plain_numbers
from engine.pool import Ranks

from hydraflow.metrics import merge, values

TOLERANCE = 1e-5
DOUBLE = {"model_dtype": "fp64", "dtype": "fp64"}


class Oracle:
    """What transformers says of a model below `folder` and, below `fsdp`, what the FSDP engine does; by
    family, head and kind of rows."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._known: dict[tuple[str, str, str], dict[str, Any]] = {}

    def __call__(self, *key: str) -> dict[str, Any]:
        if key not in self._known:
            family, head, kind = key
            path = str(self.folder / family)
            fsdp = jobs.numbers(path, {"fsdp": DOUBLE, "head": head}, kind, 1)
            self._known[key] = {**plain_numbers(path, head, kind), "fsdp": fsdp}
        return self._known[key]


def check(
    ranks: Ranks,
    oracle: Oracle,
    family: str,
    settings: Mapping[str, Any],
    *,
    head: str = "policy",
    kind: str = "usual",
    micro_batches: int = 2,
    model: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """All that the ranks said, counted, added up and became is right; returns it."""
    options = {"megatron": settings, "head": head, "model": dict(model or {})}
    path = str(oracle.folder / family)
    found = ranks.run(jobs.numbers, path, options, kind, micro_batches)
    wanted, fsdp = oracle(family, head, kind), oracle(family, head, kind)["fsdp"]
    collected = [rank for rank in found if rank["place"][2]]
    for name, said in wanted["said"].items():
        got = torch.cat([rank["said"][name] for rank in collected]).double()
        near = TOLERANCE * max(1.0, float(said.abs().max()))
        torch.testing.assert_close(got, said, rtol=0, atol=near)
        torch.testing.assert_close(got, fsdp["said"][name].double(), rtol=0, atol=near)
    reported = values(merge(rank["reported"] for rank in collected))
    assert reported == pytest.approx(values(fsdp["reported"]), rel=TOLERANCE)
    assert reported["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE)
    assert_near(jobs.assembled([rank["gradient"] for rank in found]), wanted["gradient"])
    rows, data = len(jobs.make_rows(kind)), found[0]["place"][1]
    for rank in found:
        assert rank["steps"] == [pytest.approx(step, rel=TOLERANCE) for step in fsdp["steps"]]
        assert_near(rank["weights"], fsdp["weights"])
        assert rank["counted"] == [rows, rows / data]
    return found


def assert_near(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Up to TOLERANCE of each tensor's largest number, or of 0.01 where that is smaller."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = max(float(value.abs().max()), 0.01)
        error = float((got[name].double() - value.double()).abs().max()) / scale
        assert error < TOLERANCE, f"{name}: {error:.1e}"
