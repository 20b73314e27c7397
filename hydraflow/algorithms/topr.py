"""Tapered off-policy REINFORCE, TOPR (Le Roux et al. 2025, https://arxiv.org/abs/2503.14286), with its
canonical limits: positive examples count in full, negative ones by their ratio, at most 1.

    s    = product of the ratios of the row's trained tokens
    w    = topr_positive_weight where A > 0, else topr_negative_weight min(s, 1)
    loss = -A stop_gradient(w) logp

A bad response that has become improbable gets almost no gradient; a good one always gets all of it. The
paper's weights are 1; ROLL uses the two weights to balance good against bad examples.
"""

from __future__ import annotations

import torch

from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms, keep


def topr(tokens: TokenInputs, *, topr_positive_weight: float, topr_negative_weight: float) -> TokenTerms:
    """Statistics: `actor/pg_clipfrac` tokens with a negative advantage in rows whose ratio was above 1.

    >>> logp = torch.tensor([[-1.0, -1.0]])
    >>> tokens = TokenInputs(logp, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), mask=torch.ones(1, 2))
    >>> topr(tokens, topr_positive_weight=2.0, topr_negative_weight=1.0).loss  # 2, and exp(-2) for the second
    tensor([[ 2.0000, -0.1353]])
    """
    gap = keep(tokens.log_probs - tokens.old_log_probs, tokens.mask).detach()
    of_row = gap.sum(dim=1, keepdim=True)  # (B, 1)
    negative = tokens.advantages <= 0
    weight = torch.where(negative, topr_negative_weight * of_row.clamp(max=0.0).exp(), topr_positive_weight)
    stats = {"actor/pg_clipfrac": ((tokens.advantages < 0) & (of_row > 0)).to(gap.dtype)}
    return TokenTerms(-tokens.advantages * weight * tokens.log_probs, stats)
