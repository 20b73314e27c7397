"""Group sequence policy optimization (Zheng et al. 2025, https://arxiv.org/abs/2507.18071), equations 5, 14.

    s    = exp(mean over the row's trained tokens of (logp - old_logp))
    s_t  = stop_gradient(s) * exp(logp_t - stop_gradient(logp_t))
    loss = max(-A s_t, -A clip(s_t, 1 - clip_ratio_low, 1 + clip_ratio_high))

The ratio is that of the whole sequence, so a row is clipped as one. This is the paper's GSPO-token: with one
advantage for all of a row's tokens it has GSPO's values and gradients, and advantages may also differ from
token to token. The paper averages over each sequence first, as `actor.loss_agg_mode=seq-mean-token-mean`
does, and clips at about 3e-4 instead of 0.2.
"""

from __future__ import annotations

import torch

from hydraflow.algorithms.policy_loss import bounded, row_means
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms, keep


def gspo(tokens: TokenInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> TokenTerms:
    """Statistics: `actor/pg_clipfrac` tokens of clipped rows.

    >>> logp = torch.tensor([[0.0, 0.2]])
    >>> tokens = TokenInputs(logp, torch.zeros(1, 2), advantages=torch.ones(1, 2), mask=torch.ones(1, 2))
    >>> terms = gspo(tokens, clip_ratio_low=0.2, clip_ratio_high=0.2)
    >>> terms.loss  # both tokens have the ratio exp(0.1)
    tensor([[-1.1052, -1.1052]])
    """
    logp, advantages = tokens.log_probs, tokens.advantages
    of_row = row_means(keep(logp - tokens.old_log_probs, tokens.mask), tokens.mask)  # (B, 1)
    ratio = bounded(of_row.detach() + logp - logp.detach()).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return TokenTerms(torch.maximum(plain, clipped), {"actor/pg_clipfrac": (clipped > plain).to(logp.dtype)})
