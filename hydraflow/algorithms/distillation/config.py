"""Configuration of on-policy distillation. Standard library only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from hydraflow.algorithms.config import KL_ESTIMATORS
from hydraflow.options import Implementation, NoEffectCondition, Switch, listed, no_effect_when, option

TOPK = "_topk"
_OVER_VOCABULARY = {
    "forward_kl": Implementation("hydraflow.algorithms.distillation.divergence:forward"),
    "reverse_kl": Implementation("hydraflow.algorithms.distillation.divergence:reverse"),
    "jsd": Implementation("hydraflow.algorithms.distillation.divergence:jensen_shannon", reads=("jsd_beta",)),
}
DIVERGENCES = _OVER_VOCABULARY | {name + TOPK: found for name, found in _OVER_VOCABULARY.items()}
"""Distillation losses over the vocabulary; with the suffix TOPK, over the teacher's top-k tokens. `reads` are
keys of `distillation_loss`."""


def _read_by(modes: Collection[str]) -> NoEffectCondition:
    """No effect with other losses than these."""
    why = f"only {{s}}.loss_mode={listed(modes, 'and')} read it"
    return no_effect_when(lambda section: section.loss_mode not in modes, why)


@dataclass
class DistillationLossConfig:
    """How the policy is compared with its teachers, and how it learns from that."""

    loss_mode: str = option(
        "k3", choices=(*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS), *DIVERGENCES)
    )
    """Estimator of the KL from the policy to the teacher, on the sampled tokens (a trailing + uses k2's
    gradient, which is that of the KL); or the divergence over the whole vocabulary, forward_kl from the
    teacher to the policy, reverse_kl the other way, or jsd between the two; or over the teacher's top-k
    tokens, with the suffix _topk."""
    topk: int = option(32, ge=1, no_effect=_read_by([f"{name}{TOPK}" for name in _OVER_VOCABULARY]))
    """Top-k: number of the teacher's most probable tokens compared at each position; all others count as one
    bucket."""
    jsd_beta: float = option(0.5, gt=0, lt=1, no_effect=_read_by(["jsd", f"jsd{TOPK}"]))
    """jsd: weight of the teacher in the mixture that both are compared with. Near 0 the divergence approaches
    forward_kl times jsd_beta, near 1 reverse_kl times (1 - jsd_beta)."""
    log_prob_min_clamp: float | None = option(None, lt=0, no_effect=_read_by(DIVERGENCES))
    """Lower clamp on both models' log-probabilities in divergences over the vocabulary; null: none."""
    distillation_loss_coef: float = option(1.0, ge=0)
    """Coefficient of the estimate or divergence."""
    loss_max_clamp: float | None = option(None, gt=0)
    """Clamp on the magnitude of a token's estimate or divergence; null: none."""
    use_policy_gradient: bool = False
    """Take the negative estimate as each token's advantage instead of adding its gradient to the loss."""
    use_task_rewards: bool = True
    """Learn from the rewards as well; false: from the teachers only."""

    @property
    def over_vocabulary(self) -> bool:
        """Whether the loss compares more than the sampled tokens."""
        return self.loss_mode in DIVERGENCES

    @property
    def most_tokens(self) -> int | None:
        """Number of teacher tokens that a loss over the vocabulary compares; None: all."""
        return self.topk if self.loss_mode.endswith(TOPK) else None


@dataclass
class DistillationConfig:
    """On-policy distillation: larger models score the policy's own samples token by token."""

    enabled: bool = option(False, switch=Switch(off=False, remedy="{s}.enabled=true"))
    """Score every sample with the teacher of its data source, and learn from that (`distillation_loss`)."""
    teachers: dict[str, Any] = field(default_factory=dict)
    """Directory of the teacher for each data source; default covers all others: {default: path}. Teachers
    must have the policy's vocabulary. They share the actor's devices, and memory estimates do not count
    them."""
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
