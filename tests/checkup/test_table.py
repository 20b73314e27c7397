"""The runner: no check can end, hang or silence the doctor."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import CheckSkipped, Finding, State, ok
from hydraflow.checkup.table import CHECKS, Check, run_checks
from hydraflow.errors import ConfigError
from hydraflow.schema import PPOConfig

FACTS = CheckContext(PPOConfig())


def only(check: Check) -> tuple[Finding, ...]:
    [result] = run_checks(FACTS, [check])
    return result.findings


def test_what_a_check_raises_is_a_problem_and_what_it_found_before_is_kept() -> None:
    def look(context: CheckContext) -> Iterator[Finding]:
        yield ok("so far")
        raise ZeroDivisionError("by zero")

    first, second = only(Check("odd", look))
    assert first == ok("so far")
    assert second.state is State.PROBLEM
    assert "ZeroDivisionError: by zero" in second.evidence


def test_a_check_that_ends_the_program_does_not() -> None:
    def look(context: CheckContext) -> Iterator[Finding]:
        sys.exit(7)

    [finding] = only(Check("exit", look))  # type: ignore[arg-type]
    assert finding.state is State.PROBLEM and "SystemExit" in finding.evidence


def test_a_check_that_hangs_is_given_up() -> None:
    def look(context: CheckContext) -> list[Finding]:
        time.sleep(60)
        return []

    began = time.monotonic()
    [finding] = only(Check("slow", look, seconds=lambda context: 0.2))
    assert time.monotonic() - began < 5
    assert finding.state is State.PROBLEM and "0.2 seconds" in finding.evidence


def test_users_mistakes_keep_their_remedy_and_skips_their_reason() -> None:
    def mistaken(context: CheckContext) -> Iterator[Finding]:
        raise ConfigError.one("trainer.nnodes", 0, "must be at least 1", "trainer.nnodes=1")

    def nothing(context: CheckContext) -> Iterator[Finding]:
        raise CheckSkipped("nothing to see")

    assert only(Check("mistake", mistaken)) == (  # type: ignore[arg-type]
        Finding(State.PROBLEM, "trainer.nnodes=0: must be at least 1", "trainer.nnodes=1"),
    )
    assert only(Check("skip", nothing)) == (Finding(State.SKIPPED, "nothing to see"),)  # type: ignore[arg-type]


def test_names_are_unique() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_what_a_run_would_miss_and_machines_that_are_not_here_are_reported() -> None:
    config = PPOConfig()
    config.cluster.nodes, config.cluster.devices_per_node = 64, 8
    [result] = run_checks(CheckContext(config), [check for check in CHECKS if check.name == "configuration"])
    said = {finding.state: finding.evidence for finding in result.findings}
    assert "must be given" in said[State.PROBLEM] and said[State.NOTE].startswith("cluster.*: ")
    assert CheckContext(config).config.cluster.nodes is None
