"""The reward pool with real processes: order, time limits, deaths, reasons."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydraflow.errors import EnvironmentFault
from hydraflow.rewards import worker
from hydraflow.rewards.config import CustomRewardConfig, RewardConfig
from hydraflow.rewards.pool import RewardPool, RewardRow
from hydraflow.rewards.worker import RewardProcess

MISCHIEF = '''
"""Does what the ground truth says."""
import itertools, os, signal, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info, offset=0.0):
    if ground_truth == "raise":
        raise KeyError("no such thing")
    if ground_truth == "sleep":
        time.sleep(60)
    if ground_truth == "swallow":
        try:
            time.sleep(60)
        except Exception:
            return 9.0
    if ground_truth == "stuck":
        any(itertools.repeat(False))  # a loop in C: no Python handler runs
    if ground_truth == "exit":
        os._exit(7)
    if ground_truth == "sys.exit":
        sys.exit(3)
    if ground_truth.startswith("kill"):
        with open(ground_truth.partition(" ")[2], "a") as log:
            log.write("x")
        if os.path.getsize(log.name) <= extra_info["times"]:
            os.kill(os.getpid(), signal.SIGKILL)
    if ground_truth == "disarm":
        signal.alarm(0)
    if ground_truth == "nan":
        return float("nan")
    return {"score": float(solution_str) + offset, "acc": extra_info.get("acc", 0), "pid": os.getpid()}
'''


def row(solution: float, ground_truth: str = "fine", **extra: Any) -> RewardRow:
    return RewardRow("any", str(solution), ground_truth, extra)


@pytest.fixture
def config(tmp_path: Path) -> RewardConfig:
    (tmp_path / "mischief.py").write_text(MISCHIEF)
    return RewardConfig(
        CustomRewardConfig(path=str(tmp_path / "mischief.py")), timeout=0.4, failure_score=-5.0
    )


@pytest.fixture
def pool(config: RewardConfig) -> Iterator[RewardPool]:
    with RewardPool(config) as made:
        yield made


def test_only_answers_have_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows bring their tests along, a whole file of them at once."""
    monkeypatch.setattr(worker, "LONGEST_ANSWER", 2**10)
    with RewardPool(RewardConfig()) as pool:
        (result,) = pool.score([RewardRow("arithmetic", "042", "042", {"tests": "x" * 2**21})])
    assert result.score == 1.0


def test_built_in_functions_and_empty_batches() -> None:
    with RewardPool(RewardConfig()) as pool:
        assert pool.score([]) == []
        results = pool.score(
            [
                RewardRow("arithmetic", "042", "042", {}),
                RewardRow("openai/gsm8k", "so 42", "42", {}),
                RewardRow("lighteval/MATH", r"\boxed{\frac12}", "0.5", {}),
                RewardRow("my/task", "1", "1", {}),
            ]
        )
    assert [r.score for r in results] == [1.0, 0.0, 1.0, 0.0]
    assert results[1].extra == {"acc": 0.0, "acc_flexible": 1.0}
    assert [r.failed is None for r in results] == [True, True, True, False]
    assert "has no built-in reward function" in str(results[3].failed)


def test_extra_info_and_reward_kwargs_reach_the_function(config: RewardConfig) -> None:
    config.custom_reward_function.reward_kwargs = {"offset": 10.0}
    with RewardPool(config) as pool:
        (result,) = pool.score([row(1, acc=1)])
    assert result.score == 11.0 and result.extra["acc"] == 1.0 and result.failed is None


def test_results_keep_the_order_of_rows_over_several_processes(config: RewardConfig) -> None:
    config.num_workers, config.timeout = 3, 30.0
    with RewardPool(config) as pool:
        results = pool.score([row(i) for i in range(200)])
    assert [r.score for r in results] == list(range(200))
    assert len({r.extra["pid"] for r in results}) == 3


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("raise", "KeyError: 'no such thing' (mischief.py, line 7: raise KeyError(\"no such thing\"))"),
        ("sys.exit", "SystemExit: 3 (mischief.py, line 20: sys.exit(3))"),
        ("sleep", "took longer than 0.4 seconds"),
        ("swallow", "took longer than 0.4 seconds"),
        ("nan", "returned nan, not a finite number"),
    ],
)
def test_a_bad_row_fails_alone_and_its_process_goes_on(pool: RewardPool, bad: str, reason: str) -> None:
    first, failed, last = pool.score([row(1), row(2, bad), row(3)])
    assert (failed.score, failed.extra, failed.failed) == (-5.0, {}, reason)
    assert (first.score, last.score) == (1.0, 3.0)
    assert first.extra["pid"] == last.extra["pid"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("stuck", "took longer than 0.4 seconds and could not be interrupted"),
        ("exit", "ended its process (exit code 7)"),
    ],
)
def test_a_process_that_hangs_or_dies_fails_its_row_alone_and_is_replaced(
    pool: RewardPool, bad: str, reason: str
) -> None:
    began = time.monotonic()
    first, failed, last = pool.score([row(1), row(2, bad), row(3)])
    assert time.monotonic() - began < 20
    assert (failed.score, failed.failed) == (-5.0, reason)
    assert (first.score, last.score) == (1.0, 3.0)
    assert pool.score([row(4)])[0].score == 4.0


def test_mathematics_that_no_time_would_be_enough_for_fails_its_row_alone() -> None:
    """The last of these powers has more digits than any memory."""
    texts = [r"\boxed{8}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2^3}"]
    began = time.monotonic()
    with RewardPool(RewardConfig(timeout=1.0, max_memory=4.0)) as pool:
        first, endless, last = pool.score([RewardRow("lighteval/MATH", text, "8", {}) for text in texts])
    assert (first.score, endless.score, last.score) == (1.0, 0.0, 1.0)
    assert "took longer than 1 seconds" in str(endless.failed)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("times", "score"), [(1, 2.0), (2, -5.0)])
def test_a_row_whose_process_is_killed_is_scored_once_more(
    pool: RewardPool, tmp_path: Path, times: int, score: float
) -> None:
    """Another process may have killed it; a row that does it by itself does it again."""
    results = pool.score([row(1), row(2, f"kill {tmp_path}/killed", times=times), row(3)])
    assert [result.score for result in results] == [1.0, score, 3.0]
    assert results[1].failed == (None if times == 1 else "ended its process (signal 9)")


def test_many_deaths_in_one_batch(config: RewardConfig) -> None:
    config.num_workers = 2
    with RewardPool(config) as pool:
        results = pool.score([row(i, "exit" if i % 4 == 0 else "fine") for i in range(16)])
    assert [r.score for r in results] == [-5.0 if i % 4 == 0 else i for i in range(16)]


def test_a_function_that_disarms_the_alarm_does_not_free_the_next_row(pool: RewardPool) -> None:
    disarmed, slow = pool.score([row(1, "disarm"), row(2, "sleep")])
    assert disarmed.failed is None and slow.failed == "took longer than 0.4 seconds"


def test_a_process_that_is_killed_while_idle_is_replaced(pool: RewardPool) -> None:
    pid = int(pool.score([row(1)])[0].extra["pid"])
    os.kill(pid, signal.SIGKILL)
    (result,) = pool.score([row(2)])
    assert result.score == 2.0 and result.failed is None and result.extra["pid"] != pid


def test_a_function_that_does_not_load_ends_the_run_with_its_reason(config: RewardConfig) -> None:
    Path(str(config.custom_reward_function.path)).write_text("import not_there\n")
    with RewardPool(config) as pool, pytest.raises(EnvironmentFault, match="No module named 'not_there'"):
        pool.score([row(1)])
    Path(str(config.custom_reward_function.path)).write_text("import os; os._exit(4)\n")
    with (
        RewardPool(config) as pool,
        pytest.raises(EnvironmentFault, match=r"while it was imported, it ended its process \(exit code 4\)"),
    ):
        pool.score([row(1)])


def test_close_ends_the_processes_and_a_closed_pool_starts_again(pool: RewardPool) -> None:
    pid = int(pool.score([row(1)])[0].extra["pid"])
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert pool.score([row(2)])[0].score == 2.0


def test_results_of_cheap_rows_come_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message for each of them would cost more than scoring it."""
    received: list[int] = []

    def receive(worker: RewardProcess) -> list[tuple[int, Any]]:
        found = whole(worker)
        received.append(len(found))
        return found

    whole = RewardProcess.receive
    monkeypatch.setattr(RewardProcess, "receive", receive)
    with RewardPool(RewardConfig()) as pool:
        pool.score(
            [RewardRow("arithmetic", "042", "042", {"index": i, "split": "train"}) for i in range(512)]
        )
    assert sum(received) == 512 and len(received) < 64


def test_without_processes_the_scores_are_the_same_and_the_function_is_loaded_once(tmp_path: Path) -> None:
    function = "calls = []\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    function += "    calls.append(1)\n    if solution_str == 'bad':\n        raise ValueError('no')\n"
    function += "    return {'score': 1 / 3, 'acc': solution_str == ground_truth, 'calls': len(calls)}\n"
    (tmp_path / "here.py").write_text(function)
    rows = [RewardRow("x", text, "good", {}) for text in ("good", "bad", "other")]
    custom = CustomRewardConfig(path=str(tmp_path / "here.py"))
    results = []
    for workers in (0, 1):
        with RewardPool(
            RewardConfig(custom_reward_function=custom, num_workers=workers, failure_score=-1.0)
        ) as pool:
            results.append([*pool.score(rows), *pool.score(rows)])
    assert results[0] == results[1]
    assert [result.extra.get("calls") for result in results[0]] == [1, None, 3, 4, None, 6]
    assert (
        results[0][1].failed == "ValueError: no (here.py, line 6: raise ValueError('no'))"
        and results[0][1].score == -1.0
    )


def test_the_first_failure_is_logged_at_once(config: RewardConfig, caplog: pytest.LogCaptureFixture) -> None:
    with RewardPool(config) as pool:
        for _ in range(2):  # in each call
            caplog.clear()
            pool.score([row(1), row(2, "raise"), row(3, "raise")])
            lines = [line for line in caplog.messages if "the reward function failed on a row" in line]
            assert len(lines) == 1 and "KeyError: 'no such thing'" in lines[0]
