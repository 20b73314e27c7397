"""Choice of tokens by the covariance of their log-probability and advantage (Cui et al. 2025,
https://arxiv.org/abs/2505.22617, equation 10): the tokens whose updates lower the policy's entropy most.

    cov_i = (logp_i - mean of logp) (A_i - mean of A)

In: log-probabilities and advantages of the trained tokens of a part of a mini-batch, and sums over all parts.
Out: a score per token for the choice. Means and choice span the whole mini-batch;
`workers/token_selection.py` adds the parts up. Left out on purpose: the treatment of chosen tokens
(`clip_cov.py`, `kl_cov.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TokenChoice = Callable[[Tensor, Tensor], tuple[Tensor, float]]
"""A token selection with its keyword arguments (named like their keys) already bound: from covariances and
draws, (n,) each, the draws uniform in [0, 1), to scores (n,), -inf for a token that must not be chosen, and
the fraction of all trained tokens to choose, those with the highest scores."""


def moments(logp: Tensor, advantages: Tensor) -> Tensor:
    """Count and sums (3,) of a part, (n,) each; those of parts add up."""
    return torch.stack([torch.tensor(float(len(logp))), logp.sum(), advantages.sum()]).double()


def covariances(logp: Tensor, advantages: Tensor, total: Tensor) -> Tensor:
    """(n,) of a part; `total`: the moments of the whole mini-batch, which has at least one token.

    >>> logp, advantages = torch.tensor([-1.0, -3.0]).double(), torch.tensor([2.0, 0.0]).double()
    >>> covariances(logp, advantages, moments(logp, advantages)).tolist()
    [1.0, 1.0]
    """
    count, of_logp, of_advantages = total
    return (logp - of_logp / count) * (advantages - of_advantages / count)


def number_chosen(share: float, tokens: int) -> int:
    """At least one, as in verl: a small share of a small mini-batch would round down to none.

    >>> number_chosen(0.0002, 12_000), number_chosen(0.0002, 100)
    (2, 1)
    """
    return max(1, int(share * tokens))
