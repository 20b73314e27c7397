"""Computes advantages from rewards, with the estimator that `algorithm.adv_estimator` names.

In: all rows of a step at once (whitening spans the batch and groups must be whole). Out: advantages and
returns, (N,) each, 0 where the mask is 0; nothing here has a gradient. Left out on purpose: the estimators
themselves, one file each; `ESTIMATORS` in `config.py` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    samples: Tensor | None = None,
    reward_parts: Tensor | None = None,
    **columns: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns. Token columns are flat, (N,), one row after the other; row columns are (B,).

    scores (B,): sums of the rows' rewards. rewards (N,): after any KL penalty. mask (N,): 1 = trained token.
    lengths (B,): tokens of each row. samples (B,): index of the sample within its group; rows that share a
    sample count once, with the mean of their scores. None: every row is a sample. reward_parts (B, K):
    several rewards in place of the score, for estimators that ask for them.
    columns: all others that an estimator may ask for: group_ids (B,), equal for the responses to one prompt;
    values (N,), the critic's; reward_baselines (B,), the score of the greedy response to the row's prompt;
    old_log_probs and sum_pi_squared (N,).
    """
    estimator = ESTIMATORS[config.adv_estimator]
    function = estimator.bound(config)
    asked = _asked(estimator, columns)
    if estimator.per_trajectory:
        joined = Samples.of(columns.get("group_ids"), samples)
        of_samples = {name: joined.first(column) for name, column in asked.items()}
        if estimator.counts:
            of_samples["trained_tokens"] = joined.sum(row_sums(mask, lengths))
        if estimator.several_rewards:
            assert reward_parts is not None, f"{config.adv_estimator} needs reward_parts"
            scores = reward_parts
        per_row = joined.to_rows(function(joined.mean(scores), **of_samples))  # (B,)
        advantages, returns = keep(per_row.repeat_interleave(lengths), mask), None
    else:
        advantages, returns = function(rewards, mask, lengths, **asked)
    if estimator.whitened or config.whiten_advantages:
        tokens = TrainedTokens(mask, lengths)
        advantages = tokens.put_back(whiten(tokens.of(advantages)))
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    return advantages, advantages if returns is None else returns


def _asked(estimator: Estimator, given: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The subset of the given columns that the estimator takes."""
    flags = OF_ESTIMATORS | {"old_log_probs": "sum_pi_squared", "sum_pi_squared": "sum_pi_squared"}
    del flags["trained_tokens"]  # counted here
    assert given.keys() <= flags.keys(), f"no estimator takes {sorted(given.keys() - flags.keys())}"
    needed = [name for name, flag in flags.items() if getattr(estimator, flag)]
    columns = {name: column for name in needed if (column := given.get(name)) is not None}
    assert len(columns) == len(needed), f"the estimator needs {needed}"
    return columns
