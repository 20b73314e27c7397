"""GRPO for pass@k (Tang et al. 2025, https://arxiv.org/abs/2503.19595): what the best response adds to its
group's best score.

    A = score - second best score of the group, for the best response; 0 for the others
    A = A / (std of the group + 1e-6), unless that is switched off as in Dr. GRPO

Two responses that share the best score add nothing to each other: both get 0, as do all responses of a group
with equal scores. A group of one has no second best: its advantage is 0. (verl raises an error.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import Groups


def grpo_passk(scores: Tensor, *, group_ids: Tensor, norm_adv_by_std_in_grpo: bool) -> Tensor:
    """Advantages (B,) of trajectories with these scores (B,).

    `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> scores, ids = torch.tensor([1.0, 4.0, 2.0, 3.0, 3.0]), torch.tensor([0, 0, 0, 1, 1])
    >>> grpo_passk(scores, group_ids=ids, norm_adv_by_std_in_grpo=False).tolist()
    [0.0, 2.0, 0.0, 0.0, 0.0]
    """
    groups = Groups(group_ids)
    is_best = scores == groups.best(scores)
    shares = groups.sums(is_best.to(scores.dtype))
    second = groups.best(scores.masked_fill(is_best, -torch.inf))
    wins = is_best & (shares == 1) & (groups.size > 1)
    advantages = torch.where(wins, scores - second, 0.0)
    return advantages / (groups.std(scores) + 1e-6) if norm_adv_by_std_in_grpo else advantages
