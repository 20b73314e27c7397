"""The reward function on three rows, in the processes that score during training, with their time limit.

In: three rows. Out: findings. Each row is scored twice: with its ground truth as the response, and with an
empty response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.data_files import row_problems
from hydraflow.checkup.finding import CheckSkipped, Finding, note, ok, problem, warning
from hydraflow.data.config import DataConfig
from hydraflow.data.files import FileRecord
from hydraflow.errors import EnvironmentFault
from hydraflow.rewards.config import RewardConfig
from hydraflow.rewards.pool import RewardPool, RewardResult, RewardRow
from hydraflow.rewards.row_time import MOST
from hydraflow.rewards.worker import GRACE_SECONDS, START_SECONDS

ROWS = 3


def seconds(config: RewardConfig) -> float:
    """Time limit of the check; the pool's own limits are shorter."""
    return START_SECONDS + 2 * ROWS * (MOST * config.timeout + GRACE_SECONDS) + 10.0


def check_reward(context: CheckContext) -> Iterator[Finding]:
    """Scores three rows. What the function raises, and how long it takes, is evidence."""
    records, data = context.first_rows[:ROWS], context.config.data
    if any(row_problems([record], data) for record in records):
        raise CheckSkipped("the first rows do not hold what scoring needs: see data files")
    rows = reward_rows(records, data)
    reward = context.config.reward
    try:
        with RewardPool(replace(reward, num_workers=1)) as pool:
            pool.require_loaded()
            results = pool.score(rows)
    except EnvironmentFault as error:
        yield problem(str(error), "correct the function in reward.custom_reward_function.path")
        return
    yield judge(rows, results, reward)


def reward_rows(records: Sequence[FileRecord], data: DataConfig) -> list[RewardRow]:
    """Each record twice: with its ground truth as the response, and with an empty one."""
    rows = []
    for record in records:
        values: dict[str, Any] = record.values
        truth = values["reward_model"]["ground_truth"]
        source, extra = str(values[data.reward_fn_key]), values.get("extra_info") or {}
        rows += [RewardRow(source, str(truth), truth, extra), RewardRow(source, "", truth, extra)]
    return rows


def judge(rows: Sequence[RewardRow], results: Sequence[RewardResult], reward: RewardConfig) -> Finding:
    """`rows` and `results` are in pairs, as `reward_rows` makes them."""
    failed = [result.failed for result in results if result.failed is not None]
    if failed:
        some = f"{len(failed)} of {len(results)} responses to {len(rows) // 2} rows"
        evidence = f"{some} could not be scored: {failed[0]}"
        longer = "reward.timeout=<seconds> if it needs longer"
        remedy = f"correct the function, or the rows' data_source and ground_truth; {longer}"
        found = problem if len(failed) == len(results) else warning
        return found(f"{evidence} (each would score reward.failure_score={reward.failure_score:g})", remedy)
    right, empty = [result.score for result in results[::2]], [result.score for result in results[1::2]]
    sources = ", ".join(sorted({row.data_source for row in rows}))
    scores = f"the ground truth scores {_few(right)}, an empty response {_few(empty)}"
    seen = f"{len(right)} rows of {sources}: {scores}"
    if right == empty:
        return note(f"{seen}: no difference, which is normal if a response also needs a certain format")
    return ok(seen)


def _few(scores: Sequence[float]) -> str:
    return ", ".join(f"{score:g}" for score in dict.fromkeys(scores))
