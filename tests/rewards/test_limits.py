"""Memory, time and load: what a reward function may use, and what is said when it uses more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydraflow.errors import ConfigError, GuardStop
from hydraflow.rewards import worker
from hydraflow.rewards.config import CustomRewardConfig, RewardConfig
from hydraflow.rewards.failures import require_scored
from hydraflow.rewards.pool import RewardPool, RewardRow, check_function
from hydraflow.rewards.row_time import QueueTime

pytestmark = pytest.mark.slow(short=True)  # they wait for processes that take too long

FUNCTION = """
import os, resource, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "memory":
        return len(bytearray(2**31))
    if solution_str == "memory of a child":
        return subprocess.call([sys.executable, "-c", "bytearray(2**31)"], stderr=subprocess.DEVNULL)
    if solution_str == "core":
        return {"score": 1.0, "soft": resource.getrlimit(resource.RLIMIT_CORE)[0]}
    if solution_str == "work":
        os.sched_setaffinity(0, {int(ground_truth)})
        began = time.monotonic()
        used = time.process_time()
        while time.monotonic() < began + 1.3:
            pass
        return {"score": 1.0, "used": time.process_time() - used}
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(FUNCTION)
    return path


@pytest.fixture
def config(file: Path) -> RewardConfig:
    return RewardConfig(CustomRewardConfig(path=str(file)), timeout=1.0, max_memory=1.0, failure_score=-1.0)


def row(solution: str, truth: str = "") -> RewardRow:
    return RewardRow("any", solution, truth, {})


def test_a_row_that_asks_for_too_much_memory_fails_alone(config: RewardConfig) -> None:
    config.timeout = 30.0
    with RewardPool(config) as pool:
        first, failed, child, last, core = pool.score(
            [row("fine"), row("memory"), row("memory of a child"), row("fine"), row("core")]
        )
    assert (first.score, failed.score, last.score) == (1.0, -1.0, 1.0)
    assert failed.failed is not None
    assert failed.failed.startswith("MemoryError: ") and failed.failed.endswith(
        "the limit is reward.max_memory=1 GiB"
    )
    assert "(reward.py, line 6: return len(bytearray(2**31)))" in failed.failed
    assert child.score == 1.0, "exit code of a Python that ran into the same limit"
    assert core.extra["soft"] == 0.0


def test_a_file_that_asks_for_too_much_memory_is_refused_with_the_limit(
    config: RewardConfig, file: Path
) -> None:
    file.write_text("table = bytearray(2**31)\n" + FUNCTION)
    with pytest.raises(
        ConfigError, match=r"cannot be imported: MemoryError.*the limit is reward.max_memory=1 GiB"
    ):
        check_function(config)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import os; os._exit(0)", "while it was imported, it ended its process (exit code 0)"),
        ("import os; os.kill(os.getpid(), 11)", "while it was imported, it ended its process (signal 11)"),
        ("import time; time.sleep(600)", "its import did not finish within 2 seconds"),
        (
            "import itertools, signal; any(itertools.repeat(False))",
            "its import did not finish within 2 seconds",
        ),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_whose_import_never_comes_back_is_refused(
    config: RewardConfig, file: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str, workers: int
) -> None:
    file.write_text(f"{line}\n{FUNCTION}")
    config.num_workers = workers
    monkeypatch.setattr(worker, "START_SECONDS", 2.0 if "2 seconds" in words else 120.0)
    with RewardPool(config) as pool, pytest.raises(ConfigError) as caught:
        pool.require_loaded()
    (problem,) = caught.value.problems
    assert (problem.field, problem.value, problem.rule) == (
        "reward.custom_reward_function.path",
        str(file),
        words,
    )
    assert problem.remedy


def test_a_pool_goes_on_with_the_process_that_was_checked(config: RewardConfig, file: Path) -> None:
    file.write_text("def compute_score(**row):\n    import os\n    return os.getpid()\n")
    with RewardPool(config) as pool:
        pool.require_loaded()
        checked = pool._workers[0]._process.pid
        pool.score([row("fine")])
        assert pool._workers[0]._process.pid == checked


@pytest.mark.parametrize("raised", ["SystemExit(0)", "SystemExit()", "KeyError('x')"])
def test_without_processes_of_its_own_an_exit_is_a_failed_row(
    config: RewardConfig, file: Path, raised: str
) -> None:
    file.write_text(f"def compute_score(**row):\n    raise {raised}\n")
    config.num_workers = 0
    with RewardPool(config) as pool:
        (failed,) = pool.score([row("fine")])
    assert (
        failed.score == -1.0 and failed.failed is not None and failed.failed.startswith(raised.split("(")[0])
    )


@pytest.fixture
def crowded() -> Iterator[int]:
    """A processor that two busy processes share; its number."""
    processor = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, {{{processor}}}); print(flush=True)\nwhile True: pass"
    apart: dict[str, Any] = dict(stdout=subprocess.PIPE, start_new_session=True)  # Linux shares by sessions
    crowd = [subprocess.Popen([sys.executable, "-c", busy], **apart) for _ in range(2)]
    for process in crowd:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
    yield processor
    for process in crowd:
        process.kill()
        process.communicate()


@pytest.mark.skipif(
    QueueTime(os.getpid()).seconds() == 0.0,
    reason="this kernel does not count how long a process waits for a processor",
)
def test_a_row_does_not_time_out_because_others_use_the_processor(config: RewardConfig, crowded: int) -> None:
    """It works for 1.3 seconds, more than its limit, on a third of a processor."""
    config.timeout = 1.0
    with RewardPool(config) as pool:
        (result,) = pool.score([row("work", str(crowded))])
    assert result.failed is None, result
    assert result.extra["used"] < config.timeout


def test_the_share_of_failed_rows_that_ends_a_run() -> None:
    def judge(failed: int, rows: int, most: float) -> None:
        require_scored(failed, rows, "KeyError: 'x'", most, where="step 3", so="nothing was trained on them")

    judge(2, 4, 0.5)
    judge(4, 4, 1.0)
    judge(0, 4, 0.0)
    judge(0, 0, 0.0)
    with pytest.raises(GuardStop) as caught:
        judge(1, 4, 0.0)
    assert "failed on 1 of 4 rows (25%), more than reward.max_failed_share=0: " in str(caught.value)
    assert caught.value.exit_code == 5
