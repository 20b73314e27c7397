"""Asymmetric REINFORCE, AsymRE (Arnal et al. 2025, https://arxiv.org/abs/2506.20520): a baseline below the
mean.

    A = score - (mean of the group + asymre_baseline_shift)

With a negative shift, good samples count for more than bad ones, which keeps the policy from collapsing when
samples come from an older policy. Every sample then pulls slightly towards the policy that produced it, even
in a group of equal scores. A group of one has nothing to compare with: its advantage is its score, as in
GRPO. The paper's loss is `gpg`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import Groups


def asymre(scores: Tensor, *, group_ids: Tensor, asymre_baseline_shift: float) -> Tensor:
    """Advantages (B,) of trajectories with these scores (B,).

    `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> scores, ids = torch.tensor([1.0, 3.0]), torch.tensor([7, 7])
    >>> asymre(scores, group_ids=ids, asymre_baseline_shift=-0.5).tolist()
    [-0.5, 1.5]
    """
    groups = Groups(group_ids)
    return torch.where(groups.size == 1, scores, groups.centred(scores) - asymre_baseline_shift)
