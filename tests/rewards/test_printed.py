"""What reward functions print: in the rotated log, a tag on every line, without control characters, and not
without end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hydraflow.dispatch.config import LogConfig
from hydraflow.logs import read
from hydraflow.rewards import printed
from hydraflow.rewards.config import CustomRewardConfig, RewardConfig
from hydraflow.rewards.pool import RewardPool, RewardRow
from hydraflow.rewards.printed import (
    BURST_BYTES,
    BYTES_PER_SECOND,
    LINE_BYTES,
    TAG_BYTES,
    LineSplitter,
    PrintedReader,
)
from hydraflow.system.role_logs import LogSettings, RoleLogs

FORGED = "2026-11-21T08:47:24.123Z ERROR actor-0 hydraflow: all is lost"


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[RoleLogs]:
    """This process has log files that are small."""
    made = RoleLogs(LogSettings(str(tmp_path / "logs"), LogConfig(max_megabytes=50_000 / 2**20)), 0, "reward")
    root = logging.getLogger()
    before, root.handlers = root.handlers, [made]
    yield made
    root.handlers = before
    made.close()


def config(tmp_path: Path, body: str, timeout: float = 30.0) -> RewardConfig:
    function = (
        "import os, sys\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n   "
        f" {body}\n    return 1.0\n"
    )
    (tmp_path / "mine.py").write_text(function)
    return RewardConfig(CustomRewardConfig(path=str(tmp_path / "mine.py")), timeout=timeout)


def score(config: RewardConfig, rows: int = 1) -> list[float]:
    with RewardPool(config) as pool:
        return [result.score for result in pool.score([RewardRow("any", "", "", {})] * rows)]


def test_lines_are_in_the_role_s_log_with_a_tag_each(tmp_path: Path, logs: RoleLogs) -> None:
    body = (
        "print('to be read'); print('and this', file=sys.stderr); os.write(1, b'past Python\\n'); print('no"
        " end', end='', flush=True)"
    )
    assert score(config(tmp_path, body)) == [1.0]
    records = [(record.level, record.role, record.text) for record in read(tmp_path / "logs", [], [])]
    assert records == [
        ("OUT", "reward", text) for text in ("to be read", "and this", "past Python", "no end")
    ]


def test_lines_are_the_role_s_that_scored_whoever_runs_meanwhile(tmp_path: Path, logs: RoleLogs) -> None:
    with RewardPool(config(tmp_path, "print('mine')")) as pool:
        pool.score([RewardRow("any", "", "", {})])
        with logs.of("actor"):
            pool.close()
            logging.getLogger("x").warning("the actor's")
    assert {(record.role, record.text) for record in read(tmp_path / "logs", [], [])} == {
        ("reward", "mine"),
        ("actor", "x: the actor's"),
    }


def test_a_printed_line_cannot_pass_for_another_s(tmp_path: Path, logs: RoleLogs) -> None:
    score(config(tmp_path, f"print('first\\n{FORGED}\\r{FORGED}\\n\\x1b[2J\\x1b]0;title\\x07red\\x9b')"))
    records = list(read(tmp_path / "logs", [], []))
    assert [(record.level, record.text) for record in records] == [
        ("OUT", "first"),
        ("OUT", FORGED),
        ("OUT", "red"),
    ]


def test_what_an_exception_says_cannot_pass_for_another_s_line(tmp_path: Path, logs: RoleLogs) -> None:
    with RewardPool(
        config(tmp_path, f"raise KeyError() if 0 else ValueError('x\\n{FORGED}\\x1b[31m')")
    ) as pool:
        (result,) = pool.score([RewardRow("any", "", "", {})])
    assert result.failed is not None and "\n" not in result.failed and "\x1b" not in result.failed
    logging.getLogger("x").warning("in more lines\n%s", FORGED)
    # the first failure, which is logged at once, and this one
    assert [record.level for record in read(tmp_path / "logs", [], [])] == ["WARNING", "WARNING"]


def test_a_flood_is_rotated_and_cut_and_delays_nobody(tmp_path: Path, logs: RoleLogs) -> None:
    assert score(config(tmp_path, "print(('x' * 99 + '\\n') * 100_000)"), rows=4) == [1.0] * 4
    sizes = [path.stat().st_size for path in (tmp_path / "logs").iterdir()]
    assert len(sizes) == 4 and max(sizes) < 50_000 + LINE_BYTES + 200
    said = [record.text for record in read(tmp_path / "logs", [], []) if "dropped" in record.text]
    assert sum(int(text.split()[0].lstrip("(")) for text in said) > 30_000_000


def test_a_function_that_prints_when_nobody_reads_fails_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrintedReader, "run", lambda self: None)
    monkeypatch.setattr(printed.PrintedReader, "join", lambda self, timeout=None: None)
    with RewardPool(config(tmp_path, "print('x' * 10_000_000)", timeout=0.5)) as pool:
        (result,) = pool.score([RewardRow("any", "", "", {})])
    assert result.failed is not None and result.failed.startswith("took longer than 0.5 seconds")


def test_without_log_files_it_goes_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score(config(tmp_path, "print('seen')"))
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "seen\n")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines(clock: Callable[[], float]) -> tuple[LineSplitter, list[str]]:
    written: list[str] = []
    return LineSplitter(written.append, 1.0, clock), written


def test_lines_are_written_when_they_end_and_long_ones_are_broken(clock: Clock) -> None:
    made, written = lines(clock)
    made.feed(b"one\ntw")
    made.feed(b"o\n" + b"x" * (LINE_BYTES + 5))
    assert written == ["one", "two", "x" * LINE_BYTES]
    made.end()
    assert written[3:] == ["x" * 5]


def test_what_comes_too_fast_is_dropped_and_counted(clock: Clock) -> None:
    made, written = lines(clock)
    line = b"y" * (1000 - TAG_BYTES) + b"\n"
    burst = int(BURST_BYTES / 1000)
    made.feed(line * (burst + 10))
    assert len(written) == burst + 1, "the line that overdraws the budget is written"
    clock.now = 0.5
    made.feed(b"dropped, too\n")
    assert len(written) == burst + 1
    clock.now = 5.0
    made.feed(b"the rest of it\nback\n")
    lost = 9 * len(line) + len(b"dropped, too\n") + len(b"the rest of it\n")
    assert written[burst + 1 :] == [
        (
            f"({lost} bytes that the reward function printed were dropped: more than {BYTES_PER_SECOND:.0f} a"
            " second)"
        ),
        "back",
    ]


def test_what_was_dropped_last_is_said_at_the_end(clock: Clock) -> None:
    made, written = lines(clock)
    made.feed(b"z" * 999_999 + b"\n" + b"a\n" * 100_000)
    made.end()
    assert written[-1].endswith(f"dropped: more than {BYTES_PER_SECOND:.0f} a second)")
