"""The fast checks, which main_ppo runs before it starts anything.

In: `CheckContext` with what the run has opened already. Out: warnings in the log, or one ConfigError with
every problem. Left out on purpose: checks that take longer than milliseconds; `python -m hydraflow.doctor`
runs all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import State
from hydraflow.checkup.table import CHECKS, Check, Result, run_checks
from hydraflow.checkup.trackers import look_at
from hydraflow.errors import ConfigError, Problem
from hydraflow.trainer.config import LoopConfig

SECONDS = 5.0
"""Seconds after which a fast check is abandoned, before the run itself hangs on a network drive."""

log = logging.getLogger(__name__)


def require_healthy(
    context: CheckContext, checks: Iterable[Check] = CHECKS, *, known: Sequence[Problem] = ()
) -> None:
    """Raises ConfigError with every problem of the fast checks; logs their warnings. Keys and
    files with a `known` problem are not reported again: two checks may open the same file."""
    fast = [replace(check, seconds=SECONDS) for check in checks if check.fast]
    _warn_or_raise(list(run_checks(context, fast)), known)


def _warn_or_raise(results: Sequence[Result], known: Sequence[Problem]) -> None:
    for result in results:
        for finding in result.findings:
            if finding.state is State.WARNING:
                remedy = f"\n      -> {finding.remedy}" if finding.remedy else ""
                log.warning("%s: %s%s", result.name, finding.evidence, remedy)
    already_reported = tuple(problem.head for problem in known)
    if problems := [problem for result in results for problem in _problems(result, already_reported)]:
        raise ConfigError(problems)


def require_trackers(trainer: LoopConfig, *, known: Sequence[Problem] = ()) -> None:
    """As `require_healthy`, for the trackers only: the other checks need a PPO configuration."""
    looked = Check("trackers", lambda context: look_at(trainer), seconds=SECONDS)
    _warn_or_raise(list(run_checks(None, [looked])), known)


def _problems(result: Result, already_reported: tuple[str, ...]) -> list[Problem]:
    found = [finding for finding in result.findings if finding.state is State.PROBLEM]
    new = [finding for finding in found if not finding.evidence.startswith(already_reported)]
    return [Problem(result.name, None, finding.evidence, finding.remedy) for finding in new]
