"""Corrects for samples whose probabilities differ between the generation engine and the trainer: importance
weights of the policy loss, and rejection of tokens or whole sequences.

In: log-probabilities of the sampled tokens from both, (B, R), and the mask. Out: weights, and a smaller mask.
Everything works along a row, never across rows, except the mean that normalized weights are divided by: its
parts add up, and `workers/correcting.py` sums them over the mini-batch. Left out on purpose: metrics
(`correction_metrics.py`), and the loss (`actor_loss.py`).

r is the ratio of a token's probability in the trainer to that in the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hydraflow.algorithms.policy_loss import bounded
from hydraflow.algorithms.token_terms import keep


@dataclass(frozen=True)
class Weighting:
    """Importance weights (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561: rho of V-trace; Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training").

        token:     ratio_t = r_t
        sequence:  ratio_t = product of the row's r

        w_t = min(ratio_t, upper)                               without a lower bound
        w_t = ratio_t if lower <= ratio_t <= upper, else 0      with one (IcePop)
    """

    level: str
    """A name of ROLLOUT_IS_LEVELS."""
    upper: float
    lower: float | None = None
    normalized: bool = False
    """Divided by the mini-batch's mean weight."""

    def ratios(self, log_ratio: Tensor) -> Tensor:
        """(B, R) from log r, which is 0 where nothing is trained."""
        if self.level == "sequence":
            log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
        return bounded(log_ratio).exp()

    def weights(self, ratios: Tensor) -> Tensor:
        """(B, R), not normalized."""
        if self.lower is None:
            return ratios.clamp(max=self.upper)
        return torch.where((ratios >= self.lower) & (ratios <= self.upper), ratios, 0.0)

    def total(self, weights: Tensor, mask: Tensor) -> tuple[float, float]:
        """Sum and count of the weights that normalization divides by their mean: those of trained tokens, or
        at sequence level one per row that has any. Sums and counts of parts add up."""
        if self.level == "token":
            return float(keep(weights, mask).sum()), float(mask.sum())
        has_any = mask.any(dim=1)
        return float(keep(weights[:, 0], has_any).sum()) if weights.numel() else 0.0, float(has_any.sum())


_DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}
"""KL estimates of one token, from log r (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""
_OVER_ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask: values,
    "seq_sum": lambda values, mask: values.sum(dim=1, keepdim=True),
    "seq_mean": lambda values, mask: values.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1),
    "seq_max": lambda values, mask: values.amax(dim=1, keepdim=True),
}
"""From values (B, R) that are 0 where nothing is trained: the number to compare, for each token or row."""


@dataclass(frozen=True)
class Rejection:
    """A rule that drops tokens, or whole sequences, that are too far from the trainer's policy.

    `token_k2` looks at each token, `seq_sum_k2`, `seq_mean_k2` and `seq_max_k2` at the row's sum, mean and
    maximum. k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r.

        k1:      kept if lower <= exp(-k1) <= upper: the token's ratio, the row's product or geometric mean
        others:  kept if at most upper
    """

    rule: str
    """A name of REJECTION_RULES."""
    upper: float
    lower: float = 0.0
    """Lower bound; only k1 has one."""

    def measure(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """The compared value, (B, R); the same for all tokens of a row if the rule is about rows."""
        over, _, form = self.rule.rpartition("_")
        values = keep(_DIVERGENCES[form](bounded(log_ratio)), mask)
        return _OVER_ROWS[over](values, mask).expand_as(values)

    def keeps(self, measure: Tensor) -> Tensor:
        """Which tokens (B, R) are kept."""
        if not self.rule.endswith("_k1"):
            return measure <= self.upper
        ratio = (-measure).exp()
        return (ratio >= self.lower) & (ratio <= self.upper)


@dataclass(frozen=True)
class Correction:
    """The importance weights and rejection rules of a run."""

    weighting: Weighting | None = None
    rejections: tuple[Rejection, ...] = ()
    of_current_policy: bool = False
    """Whether r compares the policy as of each pass, instead of that before the step, with the engine."""

    @property
    def needs_mini_batch(self) -> bool:
        """Whether a token's treatment depends on more than its row's forward pass: on counts of the mask that
        rejection leaves, or on the mean weight."""
        return bool(self.rejections) or (self.weighting is not None and self.weighting.normalized)

    def kept(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """The mask (B, R) without what any rule rejects."""
        kept = mask
        for rejection in self.rejections:
            kept = kept & rejection.keeps(rejection.measure(log_ratio, mask))
        return kept
