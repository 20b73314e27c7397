"""ReMax (Li et al. 2023, https://arxiv.org/abs/2310.10505): REINFORCE with the greedy response's score as the
baseline.

    A_t = (sum of the rewards from token t on) - (score of the greedy response to the same prompt)

The greedy response is sampled and scored with the others, but not trained on.
"""

from __future__ import annotations

from torch import Tensor

from hydraflow.algorithms.trained_tokens import TrainedTokens


def remax(
    rewards: Tensor, mask: Tensor, lengths: Tensor, *, reward_baselines: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (N,) each, 0 where the mask is 0.

    `rewards`, `mask`: (N,), the tokens of all rows; `lengths`: (B,); `reward_baselines`: (B,).

    >>> import torch
    >>> rewards, baseline = torch.tensor([0.0, 3.0]), torch.tensor([2.0])
    >>> remax(rewards, torch.ones(2), torch.tensor([2]), reward_baselines=baseline)[0].tolist()
    [1.0, 1.0]
    """
    tokens = TrainedTokens(mask, lengths)
    returns = tokens.discounted(tokens.of(rewards), 1.0)  # (n,)
    baselines = reward_baselines.repeat_interleave(tokens.lengths)
    return tokens.put_back(returns - baselines), tokens.put_back(returns)
