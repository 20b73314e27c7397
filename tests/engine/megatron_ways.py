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
from engine.ulysses_jobs import LENGTHS

from hydraflow.metrics import merge, values

TOLERANCE = 1e-5
DOUBLE = {"model_dtype": "fp64", "dtype": "fp64"}


class Oracle:
    """What transformers says of a model below `folder` and, below `fsdp`, what the FSDP engine does, with
    these settings; by family, head and kind of rows."""

    def __init__(self, folder: Path, fsdp: Mapping[str, Any] = DOUBLE):
        self.folder, self._fsdp = folder, fsdp
        self._known: dict[tuple[str, str, str], dict[str, Any]] = {}

    def __call__(self, family: str, head: str = "policy", kind: str = "usual") -> dict[str, Any]:
        key = family, head, kind
        if key not in self._known:
            path = str(self.folder / family)
            fsdp = jobs.numbers(path, {"fsdp": self._fsdp, "head": head}, kind, 1)
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
    near: float = TOLERANCE,
) -> None:
    """All that the ranks said, counted, added up and became is right. near: how far off what they said may
    be."""
    options = {"megatron": settings, "head": head, "model": dict(model or {})}
    found = ranks.run(jobs.numbers, str(oracle.folder / family), options, kind, micro_batches)
    wanted = oracle(family, head, kind)
    fsdp = wanted["fsdp"]
    assert [rank["place"] for rank in found] == places_of(settings, len(found))
    collected = [rank for rank in found if rank["place"][2]]
    for name, said in wanted["said"].items():
        got = torch.cat([rank["said"][name] for rank in collected]).double()
        torch.testing.assert_close(got, said, rtol=0, atol=near)
        torch.testing.assert_close(got, fsdp["said"][name].double(), rtol=0, atol=near)
    for rank in found:
        [whole] = [one for one in collected if one["place"][0] == rank["place"][0]]
        assert torch.equal(rank["on_all_stages"], whole["said"]["values" if head == "value" else "log_probs"])
    reported = values(merge(rank["reported"] for rank in collected))
    of_rows = {name: value for name, value in reported.items() if not name.endswith("_expert_share")}
    assert of_rows == pytest.approx(values(fsdp["reported"]), rel=TOLERANCE)
    assert reported["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE)
    gradient = jobs.assembled([rank["gradient"] for rank in found])
    assert_near(gradient, wanted["gradient"])
    others = {name.removeprefix("lm."): value for name, value in fsdp["gradient"].items()}
    assert_near(gradient, {name: others[name] for name in gradient})
    norm = float(torch.cat([g.flatten() for g in wanted["gradient"].values()]).norm())
    rows, data = len(LENGTHS[kind]), found[0]["place"][1]
    for rank in found:
        assert rank["steps"][0]["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
        assert rank["steps"] == [pytest.approx(step, rel=TOLERANCE) for step in fsdp["steps"]]
        assert_near(rank["weights"], fsdp["weights"])
        assert rank["counted"] == [rows, rows / data]


def places_of(settings: Mapping[str, Any], ranks: int) -> list[tuple[int, int, bool]]:
    """Each rank's share of the rows, the number of shares, and whether its answers are collected. Ranks of a
    share are neighbours, and so are those of a stage."""
    sharers = settings["tensor_model_parallel_size"] * settings.get("context_parallel_size", 1)
    data = ranks // sharers // settings["pipeline_model_parallel_size"]
    return [
        (rank // sharers % data, data, rank % sharers == 0 and rank >= ranks - sharers * data)
        for rank in range(ranks)
    ]


def assert_near(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Up to TOLERANCE of each tensor's largest number, or of 0.01 where that is smaller."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = max(float(value.abs().max()), 0.01)
        error = float((got[name].double() - value.double()).abs().max()) / scale
        assert error < TOLERANCE, f"{name}: {error:.1e}"
