"""Soft adaptive policy optimization (Gao et al. 2025, https://arxiv.org/abs/2511.20347), equations 5 and 6.

    loss = -A (4 / tau) sigmoid(tau (ratio - 1)),    tau = tau_pos where A > 0, else tau_neg

A smooth gate in place of a clip: the gradient's weight is 1 at ratio 1 and decays on both sides.
"""

from __future__ import annotations

import torch

from hydraflow.algorithms.policy_loss import bounded_log_ratio
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def sapo(tokens: TokenInputs, *, tau_pos: float, tau_neg: float) -> TokenTerms:
    """No statistics.

    >>> one = torch.ones(1, 1)
    >>> sapo(TokenInputs(one, one, one, one), tau_pos=1.0, tau_neg=1.05).loss  # -4 sigmoid(0)
    tensor([[-2.]])
    """
    ratio = bounded_log_ratio(tokens).exp()
    tau = torch.full_like(ratio, tau_neg).masked_fill(tokens.advantages > 0, tau_pos)
    return TokenTerms(-tokens.advantages * (torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau))
