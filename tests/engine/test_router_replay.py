"""Routing replay: experts are recorded and taken again on either engine, however a model is divided, against
transformers' own layers in float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import replay_jobs as jobs
from engine.megatron_jobs import assembled
from engine.megatron_models import GROUPED, of_mixtures
from engine.megatron_ways import TOLERANCE, assert_near
from engine.pool import Ranks
from engine.ulysses_jobs import make_rows
from transformers import Qwen3MoeConfig

from hydraflow.metrics import merge, values
from hydraflow.protocol.batch import DataProto

EXPERTS, CHOSEN, LAYERS = 6, 2, 3
MODEL: dict[str, Any] = GROUPED | dict(
    head_dim=16, moe_intermediate_size=16, num_hidden_layers=4, mlp_only_layers=[1]
)
MODEL |= dict(num_experts=EXPERTS, num_experts_per_tok=CHOSEN)
FAMILIES = {
    "normalised": Qwen3MoeConfig(**MODEL, norm_topk_prob=True),
    "not normalised": Qwen3MoeConfig(**MODEL, norm_topk_prob=False),
}


sizes = partial(of_mixtures, slices=1)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, sizes()),
    "data 2, ep 2": (2, sizes(experts=2)),
    "tp 2, ep 2": (2, sizes(2, experts=2)),
    "pp 2": (2, sizes(1, 2)),
    "pp 2, interleaved": (2, sizes(1, 2, virtual_pipeline_model_parallel_size=2)),
    "context 2, tp 2": (4, sizes(2, context_parallel_size=2, experts=2)),
    "context 2, pp 2": (4, sizes(1, 2, context_parallel_size=2)),
    "pp 2, data 2, ep 2": (4, sizes(1, 2, experts=2)),
}
"""Ranks and settings."""


@pytest.fixture(scope="module")
def given() -> DataProto:
    """Rows, some with the same prompt but hardly ever with the same experts."""
    return jobs.routed(make_rows("samples"), LAYERS, EXPERTS, CHOSEN)


@pytest.fixture(scope="module")
def oracles(models: Path, given: DataProto) -> dict[str, dict[str, Any]]:
    return {name: jobs.oracle(models / name, given) for name in FAMILIES}


def check(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    collected = [rank for rank in found if rank["collect"]]
    for name, said in wanted["said"].items():
        got = torch.cat([rank["said"][name] for rank in collected]).double()
        torch.testing.assert_close(got, said, rtol=0, atol=TOLERANCE)
    reported = values(merge(rank["reported"] for rank in collected))
    assert reported["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE)
    assert reported["actor/router_replay_changed"] == pytest.approx(wanted["changed"])
    gradient = found[0]["gradient"]
    if isinstance(gradient, dict):
        gradient = {name.removeprefix("lm."): value for name, value in gradient.items()}
    else:
        gradient = assembled([rank["gradient"] for rank in found])
    assert_near(gradient, wanted["gradient"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_experts_in_every_layout(
    pools: dict[int, Ranks], models: Path, given: DataProto, oracles: dict[str, Any], layout: str
) -> None:
    ranks, settings = LAYOUTS[layout]
    path = str(models / "normalised")
    check(pools[ranks].run(jobs.replayed, path, {"megatron": settings}, given, 2), oracles["normalised"])


FSDP: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "data 2": (2, {}),
    "padded": (2, {"model": {"use_remove_padding": False}}),
    "sequence 2": (2, {"fsdp": {"ulysses_sequence_parallel_size": 2}}),
    "sequence 2, data 2": (4, {"fsdp": {"ulysses_sequence_parallel_size": 2}}),
    "no checkpointing": (1, {"model": {"enable_gradient_checkpointing": False}}),
}


@pytest.mark.parametrize("layout", FSDP)
def test_given_experts_on_fsdp(
    pools: dict[int, Ranks], models: Path, given: DataProto, oracles: dict[str, Any], layout: str
) -> None:
    ranks, options = FSDP[layout]
    family = "normalised" if ranks == 2 else "not normalised"
    check(pools[ranks].run(jobs.replayed, str(models / family), options, given, 2), oracles[family])


@pytest.mark.parametrize("layout", ["data 2", "sequence 2"])
def test_after_memory_ran_out(
    pools: dict[int, Ranks], models: Path, given: DataProto, oracles: dict[str, Any], layout: str
) -> None:
    ranks, options = FSDP[layout]
    found = pools[ranks].run(jobs.replayed, str(models / "normalised"), options, given, 1, True)
    check(found, oracles["normalised"])


def test_an_error_ends_the_replay(models: Path, given: DataProto) -> None:
    before, *after = jobs.free_after_an_error(str(models / "normalised"), given)
    assert all(torch.equal(one, before) for one in after)


@pytest.mark.parametrize("layout", FSDP)
def test_what_fsdp_records(pools: dict[int, Ranks], models: Path, layout: str) -> None:
    ranks, options = FSDP[layout]
    path, rows = models / "normalised", make_rows("samples")
    found = pools[ranks].run(jobs.recorded, str(path), options, rows, 2)
    assert torch.equal(jobs.of_all(found).long(), jobs.own_choices(path, rows))


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize(("size", "order"), [(8, 1), (3, -1)])
def test_nothing_depends_on_micro_batches_or_recomputation(
    pools: dict[int, Ranks],
    models: Path,
    given: DataProto,
    oracles: dict[str, Any],
    again: bool,
    size: int,
    order: int,
) -> None:
    options = {"megatron": sizes(experts=2), "model": {"enable_gradient_checkpointing": again}}
    found = pools[1 if order < 0 else 2].run(
        jobs.replayed,
        str(models / "not normalised"),
        options if order > 0 else options | {"megatron": sizes()},
        given.select_idxs(list(range(len(given)))[::order]),
        size,
    )
    wanted = oracles["not normalised"]
    if order < 0:
        wanted = wanted | {"said": {}}
    check(found, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_recorded_is_what_routers_choose(pools: dict[int, Ranks], models: Path, layout: str) -> None:
    ranks, settings = LAYOUTS[layout]
    path, rows = models / "normalised", make_rows("samples")
    found = pools[ranks].run(jobs.recorded, str(path), {"megatron": settings}, rows, 2)
    assert torch.equal(jobs.of_all(found).long(), jobs.own_choices(path, rows))


@pytest.mark.parametrize("layout", ["alone", "tp 2, ep 2", "pp 2, interleaved", "context 2, pp 2"])
def test_with_unchanged_weights_every_bit_is_the_same(
    pools: dict[int, Ranks], models: Path, layout: str
) -> None:
    ranks, settings = LAYOUTS[layout]
    path = str(models / "not normalised")
    for free, replayed in pools[ranks].run(jobs.with_and_without, path, {"megatron": settings}, "samples", 2):
        for name, said in free["said"].items():
            assert torch.equal(replayed["said"][name], said)
        for (_, value), (_, other) in zip(free["gradient"], replayed["gradient"], strict=True):
            assert torch.equal(value, other)
        reported = values(replayed["reported"])
        assert reported.pop("actor/router_replay_changed") == 0
        assert reported == values(free["reported"])


def test_the_oracle_is_not_trivial(oracles: dict[str, Any], models: Path) -> None:
    """Most tokens take other experts than they would, and routers learn from it."""
    for found in oracles.values():
        assert found["changed"] > 0.5
        routers = [g for name, g in found["gradient"].items() if "mlp.gate." in name]
        assert len(routers) == LAYERS and min(float(g.abs().max()) for g in routers) > 1e-3
