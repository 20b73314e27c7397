"""The policy gradient without a clip (Williams 1992, https://doi.org/10.1007/BF00992696).

    loss = -A logp

Samples of another policy are corrected by the weights of `correction.py`, which carry no gradient. GPG has
the same loss (Chu et al. 2025, https://arxiv.org/abs/2504.02546); it differs in its advantages (`gpg.py`).
"""

from __future__ import annotations

from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def reinforce(tokens: TokenInputs) -> TokenTerms:
    """No statistics.

    >>> import torch
    >>> half = torch.tensor([[0.5]]).log()
    >>> reinforce(TokenInputs(half, half, torch.tensor([[2.0]]), torch.ones(1, 1))).loss  # 2 log 2
    tensor([[1.3863]])
    """
    return TokenTerms(-tokens.advantages * tokens.log_probs)
