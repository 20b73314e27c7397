"""From rewards to advantages, by the estimator that `algorithm.adv_estimator` chooses.

In: all rows of a step at once (whitening spans the batch and groups must be whole). Out: advantages and
returns, (N,) each, 0 where the mask is 0. Left out on purpose: the mathematics, one file each; their table
is `ESTIMATORS` in `config.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.config import ESTIMATORS, AlgorithmConfig
from hydraflow.algorithms.masked import keep


def estimate_advantages(
    config: AlgorithmConfig,
    scores: Tensor,
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    values: Tensor | None = None,
    group_ids: Tensor | None = None,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns. Columns of tokens are flat, (N,), one row after the other; those of rows, (B,).

    scores (B,): sums of the rows' rewards. rewards (N,): after any KL penalty. mask (N,): 1 = trained token.
    lengths (B,): tokens of each row. values (N,): the critic's, for estimators that need one. group_ids (B,):
    equal for the responses to one prompt. samples (B,): number of the sample in its group; several rows of
    one sample count once in their group, with the mean of their scores. None: every row is a sample.
    """
    estimator = ESTIMATORS[config.adv_estimator]
    needed = {"values": values} if estimator.critic else {}
    needed |= {"group_ids": group_ids} if estimator.groups else {}
    assert all(given is not None for given in needed.values()), f"{config.adv_estimator} needs {list(needed)}"
    if estimator.per_trajectory:
        index = _rows_of_samples(group_ids, samples)
        if index is not None:
            count = torch.bincount(index).to(scores.dtype)
            scores = scores.new_zeros(len(count)).index_add(0, index, scores) / count
            first = torch.zeros_like(count, dtype=torch.int64).scatter_(0, index, torch.arange(len(index)))
            needed = {name: column[first] for name, column in needed.items() if column is not None}
        estimated: Tensor = estimator.bound(config)(scores, **needed)
        per_row = estimated if index is None else estimated[index]  # (B,)
        advantages = keep(per_row.repeat_interleave(lengths), mask)
        return advantages, advantages
    found: tuple[Tensor, Tensor] = estimator.bound(config)(rewards, mask, lengths, **needed)
    return found


def _rows_of_samples(group_ids: Tensor | None, samples: Tensor | None) -> Tensor | None:
    """The sample (B,) that each row is of, numbered from 0; None: every row is one of its own."""
    if group_ids is None or samples is None:
        return None
    pairs, index = torch.unique(torch.stack([group_ids, samples]), dim=1, return_inverse=True)
    return index if pairs.shape[1] < len(index) else None
