"""From rewards to advantages, by the estimator that `algorithm.adv_estimator` chooses.

In: all rows of a step at once (whitening spans the batch and groups must be whole). Out: advantages and
returns, (N,) each, 0 where the mask is 0. Left out on purpose: the mathematics, one file each; their table
is `ESTIMATORS` in `config.py`.
"""

from __future__ import annotations

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
) -> tuple[Tensor, Tensor]:
    """Advantages and returns. Columns of tokens are flat, (N,), one row after the other; those of rows, (B,).

    scores (B,): sums of the rows' rewards. rewards (N,): after any KL penalty. mask (N,): 1 = trained token.
    lengths (B,): tokens of each row. values (N,): the critic's, for estimators that need one. group_ids (B,):
    equal for the responses to one prompt.
    """
    estimator = ESTIMATORS[config.adv_estimator]
    needed = {"values": values} if estimator.critic else {}
    needed |= {"group_ids": group_ids} if estimator.groups else {}
    assert all(given is not None for given in needed.values()), f"{config.adv_estimator} needs {list(needed)}"
    if estimator.per_trajectory:
        per_row: Tensor = estimator.bound(config)(scores, **needed)  # (B,)
        advantages = keep(per_row.repeat_interleave(lengths), mask)
        return advantages, advantages
    found: tuple[Tensor, Tensor] = estimator.bound(config)(rewards, mask, lengths, **needed)
    return found
