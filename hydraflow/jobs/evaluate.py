"""Scores a file of responses with a reward function, and averages by data source. Needs neither Ray nor a
model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from hydraflow.data.files import FileRecord, raise_problems, read_records
from hydraflow.errors import EnvironmentFault, Problem
from hydraflow.jobs.output import output_file
from hydraflow.rewards.config import RewardConfig
from hydraflow.rewards.failures import require_scored
from hydraflow.rewards.pool import RewardPool, RewardResult, RewardRow, function_means
from hydraflow.rewards.selection import check_sources
from hydraflow.schema import EvalConfig, EvalDataConfig

logger = logging.getLogger(__name__)


def run_eval(config: EvalConfig) -> None:
    """Prints the report of `averages` as JSON, and writes it to `output.path` if that is set.

    If more rows fail than `reward.max_failed_share` allows, the report is still written, and GuardStop is
    raised.
    """
    with output_file(config.output.path) if config.output.path else nullcontext() as unfinished:
        scored = score(config)
        text = json.dumps(averages(scored, config.reward), indent=2)
        print(text, flush=True)
        if unfinished is not None:
            try:
                unfinished.write_text(text + "\n")
            except OSError as error:
                raise EnvironmentFault(f"{config.output.path} cannot be written: {error.strerror}") from error
    _require_scored(config, scored)


Scored = dict[str, list[list[RewardResult]]]
"""Data source -> for each prompt the results of its responses."""


def score(config: EvalConfig) -> Scored:
    """Scores every response of the file.

    Raises ConfigError for an unusable file, rows that cannot be scored and data sources without a reward
    function.
    """
    data = config.data
    named = ("response_key", "data_source_key", "reward_model_key")
    columns = {getattr(data, name): f"data.{name}" for name in named}
    records = read_records(data.path, key="data.path", columns=columns)
    raise_problems([problem for record in records for problem in _row_problems(record, data)])
    sources: dict[str, list[list[RewardRow]]] = {}  # per source, per prompt: its responses
    for record in records:
        sources.setdefault(str(record.values[data.data_source_key]), []).append(_rows(record, data))
    raise_problems(list(_count_problems(sources, data)))
    check_sources(config.reward, sources)
    rows = [row for prompts in sources.values() for responses in prompts for row in responses]
    with RewardPool(config.reward) as pool:
        pool.require_loaded()
        results = iter(pool.score(rows))
    scored = {}
    for source, prompts in sources.items():
        scored[source] = [[next(results) for _ in responses] for responses in prompts]
    return scored


def averages(scored: Scored, reward: RewardConfig) -> dict[str, dict[str, Any]]:
    """`{data_source: {score/mean@n, acc/mean@n, score/best@n, prompts, responses, failed}}`, and
    `reward/<name>` for each of `reward.functions`; n: responses per prompt."""
    return {source: _averages(source, prompts, reward) for source, prompts in scored.items()}


def _require_scored(config: EvalConfig, scored: Scored) -> None:
    results = [result for prompts in scored.values() for responses in prompts for result in responses]
    failures = [result.failed for result in results if result.failed is not None]
    first, most = next(iter(failures), None), config.reward.max_failed_share
    so = f"they count with reward.failure_score={config.reward.failure_score:g} in the averages"
    require_scored(len(failures), len(results), first, most, where=str(config.data.path), so=so)


def _texts(record: FileRecord, data: EvalDataConfig) -> list[Any]:
    responses = record.values[data.response_key]
    return responses if isinstance(responses, list) else [responses]


def _row_problems(record: FileRecord, data: EvalDataConfig) -> Iterator[Problem]:
    texts = _texts(record, data)
    if not texts or not all(isinstance(text, str) for text in texts):
        shown = str(record.values[data.response_key])[:80]
        yield record.problem(f"column {data.response_key} must hold a text or a list of texts, not {shown}")
    model = record.values[data.reward_model_key]
    if not isinstance(model, dict) or model.get("ground_truth") is None:
        content = '{"style": ..., "ground_truth": ...}'
        yield record.problem(f"column {data.reward_model_key} must hold {content}")
    for column in (data.reward_model_key, "extra_info"):
        try:  # rows go to the reward processes as JSON
            json.dumps(record.values.get(column))
        except (TypeError, ValueError, RecursionError) as error:
            rule = f"column {column} cannot be written as JSON: {error}"
            yield record.problem(rule, "store it as text or numbers")


def _rows(record: FileRecord, data: EvalDataConfig) -> list[RewardRow]:
    values = record.values
    source, truth = str(values[data.data_source_key]), values[data.reward_model_key]["ground_truth"]
    return [RewardRow(source, text, truth, values.get("extra_info") or {}) for text in _texts(record, data)]


def _count_problems(sources: Mapping[str, list[list[RewardRow]]], data: EvalDataConfig) -> Iterator[Problem]:
    for source, prompts in sources.items():
        counts = sorted({len(responses) for responses in prompts})
        if len(counts) > 1:
            have = f"prompts of data source {source} have {', '.join(map(str, counts))} responses"
            rule = f"{have}; averages need the same number"
            remedy = "give every prompt of a data source the same number of responses"
            yield Problem(f"column {data.response_key}", None, rule, remedy)


def _averages(source: str, results: Sequence[Sequence[RewardResult]], reward: RewardConfig) -> dict[str, Any]:
    scores = np.array([[result.score for result in prompt] for prompt in results])  # (prompts, n)
    accuracies = np.array([[one.extra.get("acc", one.score) for one in prompt] for prompt in results])
    failures = [result.failed for prompt in results for result in prompt if result.failed is not None]
    if failures:
        text = "%s: %d of %d responses could not be scored; the first: %s"
        logger.warning(text, source, len(failures), scores.size, failures[0])
    prompts, n = scores.shape
    return {
        f"score/mean@{n}": float(scores.mean()),
        f"acc/mean@{n}": float(accuracies.mean()),
        f"score/best@{n}": float(scores.max(axis=1).mean()),
        "prompts": prompts,
        "responses": scores.size,
        "failed": len(failures),
        **function_means(reward, [one for prompt in results for one in prompt]),
    }
