"""Scores a Parquet file of responses with a reward function, and averages by data source. Needs neither Ray nor a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from hydraflow.data.files import Record, read_records
from hydraflow.jobs.generate import writable
from hydraflow.rewards.custom import check_reward
from hydraflow.rewards.pool import RewardPool, RewardResult, RewardRow
from hydraflow.schema import EvalConfig


def run_eval(config: EvalConfig) -> None:
    """Prints, and writes to `output.path` where one is named, `{data_source: {score/mean@n, acc/mean@n, score/best@n, rows, failed}}`."""
    target = writable(config.output.path) if config.output.path else None
    data = config.data
    needed = [data.response_key, data.data_source_key, data.reward_model_key]
    records = read_records(data.path, key="data.path", columns=needed)
    sources = [str(record.values[data.data_source_key]) for record in records]
    check_reward(config.reward, sorted(set(sources)))
    rows, owners = _rows(records, config)
    pool = RewardPool(config.reward)
    try:
        results = pool.score(rows)
    finally:
        pool.close()
    report = {source: _averages(*_of_source(source, sources, owners, results)) for source in sorted(set(sources))}
    text = json.dumps(report, indent=2)
    print(text)
    if target is not None:
        target.write_text(text + "\n")


def _rows(records: Sequence[Record], config: EvalConfig) -> tuple[list[RewardRow], list[int]]:
    """One row per response, and the record that it belongs to."""
    rows, owners = [], []
    for number, record in enumerate(records):
        values = record.values
        responses = values[config.data.response_key]
        for text in [responses] if isinstance(responses, str) else responses:
            truth = values[config.data.reward_model_key].get("ground_truth")
            extra = values.get("extra_info") or {}
            rows.append(RewardRow(str(values[config.data.data_source_key]), text, truth, extra))
            owners.append(number)
    return rows, owners


def _of_source(
    source: str, sources: Sequence[str], owners: Sequence[int], results: Sequence[RewardResult]
) -> tuple[list[RewardResult], list[int]]:
    mine = [i for i, owner in enumerate(owners) if sources[owner] == source]
    return [results[i] for i in mine], [owners[i] for i in mine]


def _averages(results: Sequence[RewardResult], owners: Sequence[int]) -> dict[str, Any]:
    scores = np.array([result.score for result in results])
    accuracies = np.array([float(result.extra.get("acc", result.score)) for result in results])
    prompts = np.unique(owners)
    best = [scores[np.asarray(owners) == prompt].max() for prompt in prompts]
    n = len(results) // len(prompts)
    return {
        f"score/mean@{n}": float(scores.mean()),
        f"acc/mean@{n}": float(accuracies.mean()),
        f"score/best@{n}": float(np.mean(best)),
        "rows": len(results),
        "failed": sum(result.failed is not None for result in results),
    }
