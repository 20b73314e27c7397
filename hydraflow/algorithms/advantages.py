"""The advantage estimators by name, as `algorithm.adv_estimator` chooses them.

In: `AdvantageInputs`, what any estimator may need, for all rows of a step at once (whitening spans the batch
and groups must be whole). Out: advantages and returns, (B, R) each, 0 where the mask is 0. Left out on
purpose: the mathematics, one file each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hydraflow.algorithms.gae import gae
from hydraflow.algorithms.grpo import grpo
from hydraflow.algorithms.reinforce_plus_plus import reinforce_plus_plus
from hydraflow.algorithms.rloo import rloo


@dataclass(frozen=True)
class AdvantageInputs:
    """One step's rows, right padded."""

    rewards: Tensor
    """(B, R) reward per token, after any KL penalty; 0 beyond the response."""
    mask: Tensor
    """(B, R) 1 = trained token."""
    gamma: float = 1.0
    """Discount per trained token."""
    lam: float = 1.0
    """Lambda of generalised advantage estimation."""
    norm_by_std: bool = True
    """Divide by the group's standard deviation (GRPO)."""
    values: Tensor | None = None
    """(B, R) the critic's values; for estimators with `needs_values`."""
    group_ids: Tensor | None = None
    """(B,) integer, equal for the trajectories of one prompt; for estimators with `needs_groups`."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """A way from rewards to advantages, and what it asks for."""

    estimate: Callable[[AdvantageInputs], tuple[Tensor, Tensor]]
    """Gives (advantages, returns)."""
    needs_values: bool = False
    """A critic must be trained."""
    needs_groups: bool = False
    """Compares the trajectories of one prompt: of use with rollout.n of 2 or more."""


def _gae(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    assert x.values is not None, "gae needs values"
    return gae(x.rewards, x.values, x.mask, gamma=x.gamma, lam=x.lam)


def _grpo(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    assert x.group_ids is not None, "grpo needs group ids"
    return grpo(x.rewards, x.mask, x.group_ids, norm_by_std=x.norm_by_std)


def _rloo(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    assert x.group_ids is not None, "rloo needs group ids"
    return rloo(x.rewards, x.mask, x.group_ids)


def _reinforce_plus_plus(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    return reinforce_plus_plus(x.rewards, x.mask, gamma=x.gamma)


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "gae": AdvantageEstimator(_gae, needs_values=True),
    "grpo": AdvantageEstimator(_grpo, needs_groups=True),
    "rloo": AdvantageEstimator(_rloo, needs_groups=True),
    "reinforce_plus_plus": AdvantageEstimator(_reinforce_plus_plus),
}
