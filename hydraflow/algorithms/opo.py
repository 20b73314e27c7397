"""On-policy RL with optimal reward baseline (Hao et al. 2025, https://arxiv.org/abs/2505.23585).

    A = score - sum of (tokens * score) / sum of tokens, both over the group

This baseline minimises the variance of the gradient if a response's squared gradient norm grows in proportion
to its length. A group of one has nothing to compare with: its advantage is its score, as in GRPO.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import Groups


def opo(scores: Tensor, *, group_ids: Tensor, trained_tokens: Tensor) -> Tensor:
    """Advantages (B,) of trajectories with these scores (B,).

    `group_ids`: (B,) integer, equal for the trajectories of one prompt. `trained_tokens`: (B,), how many each
    trajectory has.

    >>> scores, ids = torch.tensor([1.0, 5.0]), torch.tensor([7, 7])
    >>> opo(scores, group_ids=ids, trained_tokens=torch.tensor([3, 1])).tolist()  # the baseline is 2
    [-1.0, 3.0]
    """
    groups = Groups(group_ids)
    return torch.where(groups.size == 1, scores, groups.centred(scores, trained_tokens))
