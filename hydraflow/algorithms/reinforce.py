"""The policy gradient without a clip (Williams 1992, https://doi.org/10.1007/BF00992696).

    loss = -A logp

Samples of another policy are corrected by the weights of `correction.py`, which carry no gradient.
"""

from __future__ import annotations

from hydraflow.algorithms.policy_loss import LOG_RATIO_BOUND
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def reinforce(tokens: TokenInputs) -> TokenTerms:
    """Statistics: `actor/ppo_kl` as in `vanilla`.

    >>> import torch
    >>> half = torch.tensor([[0.5]]).log()
    >>> reinforce(TokenInputs(half, half, torch.tensor([[2.0]]), torch.ones(1, 1))).loss  # 2 log 2
    tensor([[1.3863]])
    """
    kl = (tokens.old_log_probs - tokens.log_probs).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return TokenTerms(-tokens.advantages * tokens.log_probs, {"actor/ppo_kl": kl})
