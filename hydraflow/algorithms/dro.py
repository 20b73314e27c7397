"""Direct reward optimisation, DRO (Richemond et al. 2024, https://arxiv.org/abs/2405.19107), with the
advantage in place of reward less value, and the old policy as the reference.

    loss = (beta / 2) (logp - old_logp)^2 - A logp

That is (A - beta (logp - old_logp))^2 / (2 beta), up to terms without a gradient. The paper's actions are
whole responses; here, as in verl, they are tokens. There is no ratio, so nothing is clipped.
"""

from __future__ import annotations

from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def dro(tokens: TokenInputs, *, dro_beta: float) -> TokenTerms:
    """No statistics.

    >>> import torch
    >>> half = torch.tensor([[-0.5]])
    >>> tokens = TokenInputs(half, half + 2, advantages=torch.ones(1, 1), mask=torch.ones(1, 1))
    >>> dro(tokens, dro_beta=0.1).loss  # 0.05 * 2^2 + 0.5
    tensor([[0.7000]])
    """
    gap = tokens.log_probs - tokens.old_log_probs
    return TokenTerms(0.5 * dro_beta * gap**2 - tokens.advantages * tokens.log_probs)
