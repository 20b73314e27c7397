"""Policy losses with keys bound, for tests of all of them."""

from __future__ import annotations

from typing import Any

from hydraflow.algorithms.config import POLICY_LOSSES, PolicyLossConfig
from hydraflow.algorithms.policy_loss import PolicyLoss
from hydraflow.workers.config import ActorConfig


def policy_loss(name: str, **keys: Any) -> PolicyLoss:
    """With these keys of `policy_loss` and the defaults of the others; those that have none are set."""
    actor = ActorConfig(policy_loss=PolicyLossConfig(**{"dro_beta": 0.1, **keys}))
    bound: PolicyLoss = POLICY_LOSSES[name].bound(actor, actor.policy_loss)
    return bound
