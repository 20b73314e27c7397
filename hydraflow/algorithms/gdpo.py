"""Group reward-decoupled normalization (GDPO; Liu et al. 2026, https://arxiv.org/abs/2601.05242): several
rewards, each compared in its group on its own.

    A = whiten(sum over k of weight_k * GRPO(reward_k))

Whitening spans all trained tokens of the step (`Estimator.whitened`), so the sum does not grow with the
number of rewards. GRPO of a sum of rewards cannot tell combinations with the same sum apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydraflow.algorithms.grpo import grpo


def gdpo(
    scores: Tensor,
    *,
    group_ids: Tensor,
    norm_adv_by_std_in_grpo: bool,
    gdpo_reward_weights: Sequence[float] | None,
) -> Tensor:
    """Advantages (B,), before they are whitened, of trajectories with these scores (B, K).

    `group_ids`: (B,) integer, equal for the trajectories of one prompt. Weights: K; None: 1 each.

    >>> scores, ids = torch.tensor([[1.0, 0.0], [3.0, 8.0]]), torch.tensor([7, 7])
    >>> weights = {"gdpo_reward_weights": [1.0, 0.5], "norm_adv_by_std_in_grpo": False}
    >>> gdpo(scores, group_ids=ids, **weights).tolist()
    [-3.0, 3.0]
    """
    weights = [1.0] * scores.shape[1] if gdpo_reward_weights is None else gdpo_reward_weights
    assert len(weights) == scores.shape[1], "gdpo_reward_weights needs one weight per reward"
    advantages = torch.zeros_like(scores[:, 0])
    for weight, reward in zip(weights, scores.unbind(1), strict=True):
        of_reward = grpo(reward, group_ids=group_ids, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
        advantages += weight * of_reward
    return advantages
