"""sPPO (Vaswani et al. 2021, https://arxiv.org/abs/2108.05828): PPO for policies that are softmaxes, with the
logarithm of the clipped ratio as the surrogate.

    loss = -A log clip(ratio, 1 / (1 + sppo_epsilon), 1 + sppo_epsilon)

The gradient is that of -A logp within the bounds and 0 outside, even where the step would lead back: a token
that has moved beyond a bound stays there until other tokens move it. The bounds are symmetric in
log-probability.
"""

from __future__ import annotations

import math

from hydraflow.algorithms.policy_loss import bounded_log_ratio
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def sppo(tokens: TokenInputs, *, sppo_epsilon: float) -> TokenTerms:
    """Statistics: `actor/pg_clipfrac` tokens whose ratio was clipped.

    >>> import torch
    >>> ratio, zero = torch.tensor([[1.2, 3.0]]), torch.zeros(1, 2)
    >>> tokens = TokenInputs(ratio.log(), zero, advantages=zero + 1, mask=zero + 1)
    >>> sppo(tokens, sppo_epsilon=0.3).loss  # -log 1.2 and -log 1.3
    tensor([[-0.1823, -0.2624]])
    """
    log_ratio, bound = bounded_log_ratio(tokens), math.log1p(sppo_epsilon)
    clipped = log_ratio.clamp(-bound, bound)
    stats = {"actor/pg_clipfrac": (clipped != log_ratio).to(log_ratio.dtype)}
    return TokenTerms(-tokens.advantages * clipped, stats)
