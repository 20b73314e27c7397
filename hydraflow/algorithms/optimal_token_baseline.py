"""The optimal token baseline (OTB; Li et al. 2026, "The Optimal Token Baseline: Variance Reduction for
Long-Horizon LLM-RL", https://proceedings.mlr.press/v306/li26hy.html).

    w_t = 1 - 2 p_t + sum over the vocabulary of p^2
    W_t = w_1 + ... + w_t
    B_t = sum of (G_t W_t) / (sum of W_t + 1e-8), both over the group's trajectories that train a token at t
    A_t = G_t - B_t

G_t is the sum of the rewards from token t on, p_t the probability of token t; w_t is the squared norm of the
gradient of log p_t with respect to the logits. A trajectory that is the only one of its group to train a
token at t is its own baseline there, so its advantage is about 0; a group of one has a baseline of 0 instead.
`tir_optimal_token_baseline`, for rows with tokens that are not trained (tool outputs), counts trained tokens
only, and has a baseline of 0 wherever only one trajectory remains.

Where several rows make a sample, each counts as a trajectory. Importance weights of `rollout_correction` do
not enter W. (In verl they do, squared.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import Groups
from hydraflow.algorithms.trained_tokens import TrainedTokens


def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    group_ids: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (N,) each, 0 where the mask is 0.

    `rewards`, `mask`, `old_log_probs`, `sum_pi_squared`: (N,), the tokens of all rows; `lengths`: (B,);
    `group_ids`: (B,) integer, equal for the trajectories of one prompt.
    """
    tokens, groups = TrainedTokens(mask, lengths), Groups(group_ids)
    position = tokens.of(_positions(lengths))
    has_others = (groups.size > 1).repeat_interleave(tokens.lengths)
    return _less_baseline(tokens, rewards, old_log_probs, sum_pi_squared, groups, position, has_others)


def tir_optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    group_ids: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `optimal_token_baseline`, but positions count trained tokens only, and a single trajectory has a
    baseline of 0."""
    tokens, groups = TrainedTokens(mask, lengths), Groups(group_ids)
    position = _positions(tokens.lengths)
    return _less_baseline(tokens, rewards, old_log_probs, sum_pi_squared, groups, position, None)


def _less_baseline(
    tokens: TrainedTokens,
    rewards: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    groups: Groups,
    position: Tensor,
    has_baseline: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`position` (n,) of each trained token in its row. `has_baseline` (n,); None: where another trajectory
    has the same position."""
    returns = tokens.discounted(tokens.of(rewards), 1.0)  # (n,)
    # at least 0, but for rounding: without the bound, near-certain tokens would divide by noise around 0
    energy = 1.0 - 2.0 * tokens.of(old_log_probs).double().exp() + tokens.of(sum_pi_squared).double()
    energy = energy.clamp(min=0.0)
    summed = energy.cumsum(0)  # over all rows
    first = tokens.lengths.cumsum(0) - tokens.lengths
    before = torch.cat([summed.new_zeros(1), summed])[first].repeat_interleave(tokens.lengths)
    weights = summed - before  # (n,) W
    # a number for each pair of group and position
    width = int(position.max()) + 1 if len(position) else 1
    cells = Groups(groups.index.repeat_interleave(tokens.lengths) * width + position)
    baselines = cells.sums(weights * returns) / (cells.sums(weights) + 1e-8)
    wanted = cells.size > 1 if has_baseline is None else has_baseline
    advantages = returns - torch.where(wanted, baselines, 0.0).to(returns.dtype)
    return tokens.put_back(advantages), tokens.put_back(returns)


def _positions(lengths: Tensor) -> Tensor:
    """The position of each token in its row, from 0.

    >>> _positions(torch.tensor([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
