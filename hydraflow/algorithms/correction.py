"""Corrects for samples whose probabilities differ between the generation engine and the trainer: truncated
importance sampling (TIS).

In: log-probabilities of the sampled tokens from both, (B, R), 0 where the mask is 0. Out: a weight for each
token's policy loss. It looks along a row, never across rows. Left out on purpose: rejecting tokens or whole
responses, and ratios to the engine's own log-probabilities (bypass).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Truncation:
    """Truncated importance weights (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561: rho of V-trace;
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").

        token:     w_t = min(exp(old_t - rollout_t), threshold)
        sequence:  w_t = min(exp(sum over the row's tokens of (old - rollout)), threshold)
    """

    level: str
    """A name of ROLLOUT_IS_LEVELS."""
    threshold: float
    """Upper limit of a weight."""

    def weights(self, old_logp: Tensor, rollout_logp: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and whether each was truncated, both (B, R) of the log-probabilities' type; without
        gradients."""
        log_ratio = (old_logp - rollout_logp).detach()
        if self.level == "sequence":
            log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
        ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        return ratio.clamp(max=self.threshold), (ratio > self.threshold).to(ratio.dtype)
