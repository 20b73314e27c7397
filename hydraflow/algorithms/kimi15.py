"""The policy optimization of Kimi k1.5 (Kimi Team 2025, https://arxiv.org/abs/2501.12599, equation 3): online
mirror descent, with the advantage in place of reward less mean.

    D    = sum over the row's trained tokens of (logp - old_logp)
    loss = (kimi15_tau / 2) D (logp - old_logp) - A logp

Summed over the row, the first term is (kimi15_tau / 2) D^2: the paper's squared log-ratio of the whole
response, which keeps the policy near the old one in place of a clip. `dro` squares the log-ratio of each
token on its own, which is what ROLL does under this paper's name.
"""

from __future__ import annotations

from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms, keep


def kimi15(tokens: TokenInputs, *, kimi15_tau: float) -> TokenTerms:
    """No statistics.

    >>> import torch
    >>> logp, one = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2)
    >>> kimi15(TokenInputs(logp, logp + 1, advantages=one, mask=one), kimi15_tau=0.5).loss  # D is -2
    tensor([[1.5000, 2.5000]])
    """
    gap = keep(tokens.log_probs - tokens.old_log_probs, tokens.mask)
    of_row = gap.sum(dim=1, keepdim=True)  # (B, 1)
    return TokenTerms(0.5 * kimi15_tau * of_row * gap - tokens.advantages * tokens.log_probs)
