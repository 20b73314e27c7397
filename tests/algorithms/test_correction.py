"""Truncated importance weights: by hand, and what they do to a loss."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hydraflow.algorithms.actor_loss import ActorLoss
from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.config import POLICY_LOSSES
from hydraflow.algorithms.correction import Truncation
from hydraflow.workers.config import ActorConfig

OLD = torch.tensor([[0.5, 0.4, 0.0], [0.9, 0.0, 0.0]]).double()
SAMPLED = torch.tensor([[0.1, 0.8, 0.0], [0.6, 0.0, 0.0]]).double()
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def log(probabilities: torch.Tensor) -> torch.Tensor:
    return torch.where(MASK.bool(), probabilities.log(), 0.0)


@pytest.mark.parametrize(
    ("level", "weights", "truncated"),
    [
        ("token", [[2.0, 0.5, 1.0], [1.5, 1.0, 1.0]], [[1, 0, 0], [0, 0, 0]]),
        ("sequence", [[2.0, 2.0, 2.0], [1.5, 1.5, 1.5]], [[1, 1, 1], [0, 0, 0]]),
    ],
)
def test_by_hand(level: str, weights: list[list[float]], truncated: list[list[int]]) -> None:
    """Ratios 5, 1/2 and 3/2; the first row's product is 5/2."""
    found, high = Truncation(level, 2.0).weights(log(OLD).requires_grad_(), log(SAMPLED))
    assert torch.allclose(found, torch.tensor(weights).double()) and not found.requires_grad
    assert high.tolist() == truncated


def test_ratios_that_overflow_are_bounded() -> None:
    far = torch.tensor([[1e4]])
    assert float(Truncation("token", math.inf).weights(far, -far)[0]) == pytest.approx(math.exp(20))
    assert float(Truncation("token", 2.0).weights(-far, far)[0]) == pytest.approx(math.exp(-20))


@pytest.mark.parametrize("old_is_this_pass", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_tokens_gradient_is_multiplied_by_its_weight(level: str, old_is_this_pass: bool) -> None:
    truncation = Truncation(level, 2.0)

    def gradient(correction: Truncation | None) -> tuple[torch.Tensor, dict]:
        logp = log(OLD).requires_grad_()
        loss = ActorLoss(
            policy_loss=POLICY_LOSSES["vanilla"].bound(ActorConfig()),
            denominators=Denominators.count(MASK),
            scale_factor=1.0,
            old_is_this_pass=old_is_this_pass,
            correction=correction,
        )
        columns = {
            "response_mask": MASK,
            "advantages": torch.ones(2, 3).double(),
            "rollout_log_probs": log(SAMPLED),
        }
        if not old_is_this_pass:
            columns["old_log_probs"] = log(OLD)
        value, metrics = loss(SimpleNamespace(log_probs=logp, entropy=None), columns)
        value.backward()
        assert logp.grad is not None
        return logp.grad, metrics

    plain, _ = gradient(None)
    weighted, metrics = gradient(truncation)
    weights, _ = truncation.weights(log(OLD), log(SAMPLED))
    assert torch.allclose(weighted, plain * weights) and not torch.allclose(weighted, plain)
    expected = float(weights[MASK.bool()].mean())
    assert metrics["rollout_corr/rollout_is_mean"].value == pytest.approx(expected)
