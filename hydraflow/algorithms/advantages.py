"""Computes advantages from rewards, with the estimator that `algorithm.adv_estimator` names.

In: all rows of a step at once (whitening spans the batch and groups must be whole). Out: advantages and
returns, (N,) each, 0 where the mask is 0; nothing here has a gradient. Left out on purpose: the estimators
themselves, one file each; `ESTIMATORS` in `config.py` lists them.
"""

from __future__ import annotations

from torch import Tensor

from hydraflow.algorithms.config import ESTIMATORS, OF_ESTIMATORS, AlgorithmConfig, Estimator
from hydraflow.algorithms.samples import Samples
from hydraflow.algorithms.token_terms import keep
from hydraflow.algorithms.trained_tokens import TrainedTokens, row_sums, whiten


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
    reward_baselines: Tensor | None = None,
    reward_parts: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns. Token columns are flat, (N,), one row after the other; row columns are (B,).

    scores (B,): sums of the rows' rewards. rewards (N,): after any KL penalty. mask (N,): 1 = trained token.
    lengths (B,): tokens of each row. values (N,): the critic's, for estimators that need one. group_ids (B,):
    equal for the responses to one prompt. samples (B,): index of the sample within its group; rows that share
    a sample count once, with the mean of their scores. None: every row is a sample.
    Only for estimators that ask for them: reward_baselines (B,), the score of the greedy response to the
    row's prompt; reward_parts (B, K), several rewards in place of the score; old_log_probs and
    sum_pi_squared (N,).
    """
    estimator = ESTIMATORS[config.adv_estimator]
    function = estimator.bound(config)
    columns = _columns_of(
        estimator,
        values=values,
        group_ids=group_ids,
        reward_baselines=reward_baselines,
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
    )
    if estimator.per_trajectory:
        joined = Samples.of(group_ids, samples)
        of_samples = {name: joined.first(column) for name, column in columns.items()}
        if estimator.counts:
            of_samples["trained_tokens"] = joined.sum(row_sums(mask, lengths))
        if estimator.several_rewards:
            assert reward_parts is not None, f"{config.adv_estimator} needs reward_parts"
            scores = reward_parts
        per_row = joined.to_rows(function(joined.mean(scores), **of_samples))  # (B,)
        advantages, returns = keep(per_row.repeat_interleave(lengths), mask), None
    else:
        advantages, returns = function(rewards, mask, lengths, **columns)
    if estimator.whitened or config.whiten_advantages:
        tokens = TrainedTokens(mask, lengths)
        advantages = tokens.put_back(whiten(tokens.of(advantages)))
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    return advantages, advantages if returns is None else returns


def _columns_of(estimator: Estimator, **given: Tensor | None) -> dict[str, Tensor]:
    """The subset of the given columns that the estimator takes."""
    flags = OF_ESTIMATORS | {"old_log_probs": "sum_pi_squared", "sum_pi_squared": "sum_pi_squared"}
    needed = {name: column for name, column in given.items() if getattr(estimator, flags[name])}
    columns = {name: column for name, column in needed.items() if column is not None}
    assert len(columns) == len(needed), f"the estimator needs {list(needed)}"
    return columns
