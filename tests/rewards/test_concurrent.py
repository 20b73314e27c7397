"""Asynchronous functions and functions of many rows: limits hold for each row, and a bad row fails alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hydraflow.errors import ConfigError
from hydraflow.rewards.config import MANAGERS, CustomRewardConfig, RewardConfig, RewardManagerConfig
from hydraflow.rewards.pool import RewardPool, RewardResult, RewardRow, check_function

pytestmark = pytest.mark.slow(short=True)  # they wait for processes that take too long

ASYNC = """
import asyncio, itertools, os, time
most = now = 0

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    global most, now
    now += 1
    most = max(most, now)
    try:
        if ground_truth == "wait":
            await asyncio.sleep(60)
        if ground_truth == "block":
            time.sleep(60)
        if ground_truth == "stuck":
            any(itertools.repeat(False))
        if ground_truth == "exit":
            os._exit(7)
        if ground_truth == "raise":
            raise TimeoutError("of its own")
        await asyncio.sleep(0.1)
        return {"score": float(solution_str), "most": most, "pid": os.getpid()}
    finally:
        now -= 1
"""
BATCH = """
import itertools, os

def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    if "raise" in ground_truths:
        raise KeyError("no such thing")
    if "stuck" in ground_truths:
        any(itertools.repeat(False))
    if "exit" in ground_truths:
        os._exit(7)
    if "short" in ground_truths:
        return [1.0] * (len(solution_strs) - 1)
    return [{"score": scale * float(text), "rows": len(solution_strs)} for text in solution_strs]
"""


def score(
    tmp_path: Path, source: str, bad: dict[int, str], rows: int = 8, manager: str = "naive", **values: Any
) -> list[RewardResult]:
    (tmp_path / "mine.py").write_text(source)
    custom = CustomRewardConfig(path=str(tmp_path / "mine.py"), reward_kwargs=values.pop("reward_kwargs", {}))
    config = RewardConfig(
        custom, reward_manager=RewardManagerConfig(manager), failure_score=-5.0, **{"timeout": 2.0} | values
    )
    with RewardPool(config) as pool:
        pool.require_loaded()
        return pool.score([RewardRow("any", str(i), bad.get(i, "fine"), {}) for i in range(rows)])


def test_rows_wait_at_the_same_time_up_to_the_limit(tmp_path: Path) -> None:
    results = score(tmp_path, ASYNC, {}, rows=40, max_concurrent=20)
    assert [result.score for result in results] == list(range(40))
    assert max(result.extra["most"] for result in results) == 20


def test_without_processes_rows_come_one_after_the_other(tmp_path: Path) -> None:
    results = score(tmp_path, ASYNC, {1: "raise"}, rows=3, num_workers=0)
    assert [result.score for result in results] == [0.0, -5.0, 2.0]
    assert results[2].extra["most"] == 1.0


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("wait", "took longer than 1 seconds"),
        ("block", "took longer than 1 seconds"),
        ("raise", 'TimeoutError: of its own (mine.py, line 19: raise TimeoutError("of its own"))'),
    ],
)
def test_a_bad_row_fails_alone_and_its_process_goes_on(tmp_path: Path, bad: str, reason: str) -> None:
    results = score(tmp_path, ASYNC, {2: bad}, timeout=1.0, max_concurrent=2)
    assert [result.score for result in results] == [0, 1, -5, 3, 4, 5, 6, 7]
    assert results[2].failed == reason
    assert len({result.extra["pid"] for result in results if result.failed is None}) == 1


@pytest.mark.parametrize(
    ("bad", "reason"),
    [("stuck", "took longer than 0.3 seconds and could not be interrupted"), ("exit", "(exit code 7)")],
)
def test_a_row_that_ends_its_process_fails_alone(tmp_path: Path, bad: str, reason: str) -> None:
    """The rows that were under way with it are scored once more, each alone."""
    began = time.monotonic()
    results = score(tmp_path, ASYNC, {2: bad}, rows=4, timeout=0.3, max_concurrent=3)
    assert [result.score for result in results] == [0, 1, -5, 3]
    assert reason in str(results[2].failed)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_batch_is_one_call(tmp_path: Path, workers: int) -> None:
    given = {"manager": "batch", "num_workers": workers}
    results = score(tmp_path, BATCH, {}, **given, reward_kwargs={"scale": 2.0})
    assert [result.score for result in results] == [2.0 * i for i in range(8)]
    assert {result.extra["rows"] for result in results} == {8.0}


@pytest.mark.parametrize(
    ("bad", "reason", "workers"),
    [
        ("raise", "KeyError: 'no such thing'", 1),
        ("raise", "KeyError: 'no such thing'", 0),
        ("short", "returned 0 scores for 1 rows", 0),
        ("short", "returned 0 scores for 1 rows", 2),
        ("exit", "ended its process (exit code 7)", 1),
    ],
)
def test_rows_of_a_failed_batch_are_tried_alone(tmp_path: Path, bad: str, reason: str, workers: int) -> None:
    results = score(tmp_path, BATCH, {5: bad}, manager="batch", num_workers=workers)
    assert [result.score for result in results] == [0, 1, 2, 3, 4, -5, 6, 7]
    assert reason in str(results[5].failed)
    assert {result.extra["rows"] for result in results if result.failed is None} == {1.0}


def test_a_batch_has_the_time_of_its_rows(tmp_path: Path) -> None:
    results = score(tmp_path, BATCH, {0: "stuck"}, rows=2, manager="batch", timeout=0.2)
    assert [result.score for result in results] == [-5, 1]
    assert "could not be interrupted" in str(results[0].failed)


def test_a_batch_function_has_its_own_arguments_and_is_not_asynchronous(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text("def compute_score(data_sources, solution_strs):\n    return []\n")
    config = RewardConfig(
        CustomRewardConfig(path=str(tmp_path / "rows.py")), reward_manager=RewardManagerConfig("batch")
    )
    with pytest.raises(ConfigError, match="is called with data_sources, solution_strs, ground_truths"):
        check_function(config)
    (tmp_path / "rows.py").write_text("async def compute_score(**lists):\n    return []\n")
    with pytest.raises(ConfigError, match="scores rows one by one"):
        check_function(config)


def test_names_of_arguments_are_free_where_their_order_is_not(tmp_path: Path) -> None:
    source = "def compute_score(source, answer, truth, info=None):\n    return float(answer) + 10\n"
    assert [one.score for one in score(tmp_path, source, {}, rows=2)] == [10.0, 11.0]


@pytest.mark.parametrize("manager", [name for name in MANAGERS if name != "batch"])
def test_other_managers_call_with_one_row(tmp_path: Path, manager: str) -> None:
    """verl's form, with its default and more arguments than it names."""
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
    source += "    return {'score': float(solution_str), 'more': len(kwargs) + len(extra_info)}\n"
    results = score(tmp_path, source, {}, rows=2, manager=manager, reward_kwargs={"scale": 2.0})
    assert [(one.score, one.extra["more"]) for one in results] == [(0.0, 1.0), (1.0, 1.0)]


SLOW = """
import asyncio, time

def computes(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.1)
    return 1.0

async def waits(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.05)
    return float(solution_str)
"""


@pytest.mark.parametrize("names", [["computes", "waits"], ["waits", "computes"]])
def test_what_rows_compute_takes_no_time_from_rows_that_wait(names: list[str], tmp_path: Path) -> None:
    """24 rows compute for more than the limit of one; a row is over as soon as it could be."""
    (tmp_path / "mine.py").write_text(SLOW)
    functions = [{"path": str(tmp_path / "mine.py"), "name": name} for name in names]
    with RewardPool(RewardConfig(functions=functions, timeout=1.0, max_concurrent=24)) as pool:
        pool.require_loaded()
        results = pool.score([RewardRow("any", str(i), "", {}) for i in range(24)])
    assert [(one.failed, one.score) for one in results] == [(None, i + 1.0) for i in range(24)]
