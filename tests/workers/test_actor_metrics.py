"""The actor's loss as configured; and how far trainer and generation engine are apart, measured in the
update's own pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from workers import gradient_jobs as jobs
from workers.gradient_jobs import SCALE

from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.config import OldFrom
from hydraflow.algorithms.diagnostics import rollout_probs_diff
from hydraflow.engine.base import ModelOutput
from hydraflow.metrics import merge, values
from hydraflow.workers.actor import (
    ENTROPY_COEFF,
    OLD_FROM,
    ActorWorker,
    _own_token_first,
    probs_diff_metrics,
)


def test_micro_batches_together_give_the_numbers_of_one_pass() -> None:
    draw = torch.Generator().manual_seed(0)
    ours, theirs = torch.rand(2, 9, generator=draw, dtype=torch.float64)
    whole = rollout_probs_diff(ours.log(), theirs.log(), torch.ones(9))
    gap = (ours - theirs).abs()
    for cut in ([9], [1, 8], [0, 3, 0, 6], [4, 4, 1]):
        found = values(merge(map(probs_diff_metrics, gap.split(cut))))
        assert found == {name: pytest.approx(whole[name]) for name in found} and len(found) == 3


def test_a_replica_has_its_own_numbers() -> None:
    gaps = (torch.tensor([0.5, 0.1]), torch.zeros(2))
    found = values(merge(probs_diff_metrics(gap, 2) for gap in gaps))
    name = "training/rollout_probs_diff"
    assert found == {f"{name}_mean/replica-2": pytest.approx(0.15), f"{name}_max/replica-2": 0.5}


@pytest.fixture(scope="module")
def actor(tiny: str, one_rank: None) -> ActorWorker:
    worker = jobs.make_worker(tiny, jobs.Training("policy", jobs.rows(2)))
    assert isinstance(worker, ActorWorker)
    return worker


def loss_of(actor: ActorWorker, old: OldFrom, first: bool = True, **keys: Any) -> Any:
    """The loss of an optimizer step, with these keys of `actor`."""
    spec = actor.spec
    actor.spec = replace(spec, actor=replace(spec.actor, **keys))
    try:
        return actor._loss(old, 0.25, Denominators(4.0, 2.0), first)
    finally:
        actor.spec = spec


def test_the_loss_is_as_configured(actor: ActorWorker) -> None:
    usual = loss_of(actor, OldFrom.RECOMPUTE)
    assert (usual.agg_mode, usual.scale_factor) == ("seq-mean-token-mean", SCALE), "the longest response"
    assert (usual.entropy_coeff, usual.kl_coef, usual.kl_type) == (0.25, 0.3, "low_var_kl")
    assert usual.denominators == Denominators(4.0, 2.0) and not usual.old_is_this_pass
    other = loss_of(actor, OldFrom.RECOMPUTE, loss_scale_factor=5, use_kl_loss=False, kl_loss_type="mse")
    assert (other.scale_factor, other.kl_coef, other.kl_type) == (5, None, "mse")


def test_a_step_may_have_another_coefficient_and_other_old_log_probabilities(actor: ActorWorker) -> None:
    for facts, coefficient, old_is_this_pass in (
        ({}, 0.02, False),
        ({ENTROPY_COEFF: 0.5, OLD_FROM: OldFrom.FIRST_PASS}, 0.5, True),
        ({ENTROPY_COEFF: 0.0}, 0.0, False),
    ):
        update = actor.update_loss(facts, step=1)
        loss: Any = update.make(Denominators(4.0, 2.0), False)
        assert (loss.entropy_coeff, loss.old_is_this_pass) == (coefficient, old_is_this_pass)
        assert update.ask.entropy and update.ask.entropy_is_trained == (coefficient != 0)


def test_the_first_of_several_targets_is_the_responses_own_token() -> None:
    found: list[Any] = []
    loss = _own_token_first(lambda output, columns: (found.append(output), {}))  # type: ignore[func-returns-value]
    loss(ModelOutput(log_probs=torch.tensor([[[1.0, 2.0, 3.0]]])), {})
    assert found[0].log_probs.tolist() == [[1.0]] and found[0].target_log_probs.tolist() == [[[2.0, 3.0]]]


@pytest.mark.parametrize(
    ("old", "column"),
    [(OldFrom.FIRST_PASS, "rollout_log_probs"), (OldFrom.ROLLOUT, "old_log_probs")],
)
def test_the_first_optimizer_step_compares_its_probabilities_with_those_of_each_replica(
    actor: ActorWorker, old: OldFrom, column: str
) -> None:
    """Trained are both tokens of the first row and the first of the second."""
    ours, theirs = torch.tensor([[0.5, 0.2], [0.5, 0.9]]), torch.tensor([[0.25, 0.7], [0.375, 0.1]])
    columns = {column: theirs.log(), "ref_log_prob": ours.log(), "advantages": torch.ones(2, 2)}
    columns["replica"] = torch.tensor([3, 1])
    columns["response_mask"] = torch.tensor([[1, 1], [1, 0]])
    output = ModelOutput(log_probs=ours.log(), entropy=torch.ones(2, 2))
    _, found = loss_of(actor, old)(output, columns)
    name = "training/rollout_probs_diff"
    assert {key: one.value for key, one in found.items() if key.startswith(name)} == {
        f"{name}_mean": pytest.approx((0.25 + 0.5 + 0.125) / 3),
        f"{name}_max": pytest.approx(0.5),
        f"{name}_std": pytest.approx(float(torch.tensor([0.25, 0.5, 0.125]).std())),
        f"{name}_mean/replica-3": pytest.approx(0.375),
        f"{name}_max/replica-3": pytest.approx(0.5),
        f"{name}_mean/replica-1": pytest.approx(0.125),
        f"{name}_max/replica-1": pytest.approx(0.125),
    }
    moved = -(ours / theirs).log().flatten()[:3].mean().item() if old == OldFrom.ROLLOUT else 0.0
    assert found["actor/ppo_kl"].value == pytest.approx(moved)
    _, later = loss_of(actor, old, first=False)(output, columns)
    assert not [key for key in later if key.startswith(name)]
