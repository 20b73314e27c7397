"""Per-token policy losses: what they share, and PPO's. `actor.policy_loss.loss_mode` picks one from
`POLICY_LOSSES` in `config.py`.

In: `TokenInputs`. Out: the loss per token, which `aggregate.py` weighs. A loss may look along a row (a ratio
of whole sequences) but never across rows: that is what keeps its gradient the same however the rows are
split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms

# exp(20) is 5e8: far beyond any clip range, far below where exp overflows float32
LOG_RATIO_BOUND = 20.0


PolicyLoss = Callable[..., TokenTerms]
"""Takes `TokenInputs`, and by name the columns that it asks for; arguments named like keys are bound."""


def bounded_log_ratio(tokens: TokenInputs) -> Tensor:
    """`log_probs - old_log_probs` (B, R), `bounded`."""
    return bounded(tokens.log_probs - tokens.old_log_probs)


def row_means(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Means (B, 1) over the trained tokens of each row of `log_ratios` (B, R), which are 0 where `mask` is
    0."""
    return log_ratios.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1.0)


def bounded(log_ratio: Tensor) -> Tensor:
    """From -20 to 20, without a gradient where a bound holds."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def vanilla(
    tokens: TokenInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float
) -> TokenTerms:
    """Clipped PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7) with a dual clip
    (Ye et al. 2020, https://arxiv.org/abs/1912.09729, equation 5).

        ratio = exp(clamp(log_probs - old_log_probs, -20, 20))
        loss  = max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high))
                at most -A clip_ratio_c where A < 0

    Statistics: `actor/pg_clipfrac` tokens whose ratio was clipped, `actor/pg_clipfrac_lower` tokens at the
    dual clip.
    """
    advantages = tokens.advantages
    ratio = bounded_log_ratio(tokens).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    worst = torch.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    negative = advantages < 0
    stats = {
        "actor/pg_clipfrac": (clipped > plain).to(ratio.dtype),
        "actor/pg_clipfrac_lower": ((worst > bound) & negative).to(ratio.dtype),
    }
    return TokenTerms(torch.where(negative, torch.minimum(worst, bound), worst), stats)
