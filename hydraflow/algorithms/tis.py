"""Truncated importance sampling, as in the actor's gradient of IMPALA (Espeholt et al. 2018,
https://arxiv.org/abs/1802.01561, section 4.2).

    loss = -A stop_gradient(clip(ratio, tis_lower_bound, tis_upper_bound)) logp

A token that has become less probable counts less, and with the paper's upper bound of 1 none counts more. It
is CISPO's loss with bounds on the weight itself. The ratio is to the old policy; weights for samples of
another engine are those of `correction.py`.
"""

from __future__ import annotations

from hydraflow.algorithms.cispo import cispo
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def tis(tokens: TokenInputs, *, tis_lower_bound: float, tis_upper_bound: float) -> TokenTerms:
    """Statistics as in `cispo`.

    >>> import torch
    >>> logp, zero = torch.tensor([[0.5, 2.0]]).log(), torch.zeros(1, 2)
    >>> tokens = TokenInputs(logp, zero, advantages=zero + 1, mask=zero + 1)
    >>> tis(tokens, tis_lower_bound=0.0, tis_upper_bound=1.0).loss  # 0.5 log 2, and -log 2
    tensor([[ 0.3466, -0.6931]])
    """
    return cispo(tokens, clip_ratio_low=1.0 - tis_lower_bound, clip_ratio_high=tis_upper_bound - 1.0)
