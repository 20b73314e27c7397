"""The result of a check: a state, the evidence for it, and a remedy. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from hydraflow.errors import Problem
from hydraflow.redact import public_text


class State(StrEnum):
    """How a check ended; only a problem keeps a run from starting."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing to do."""
    WARNING = "warning"
    """The run starts, but may be slow, fail later or learn less."""
    PROBLEM = "problem"
    SKIPPED = "skipped"
    """This configuration does not need the check, or what it checks does not exist yet."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    state: State
    evidence: str
    """What was seen, with numbers."""
    remedy: str = ""
    """A remedy, if possible a command or an override to paste."""


class CheckSkipped(Exception):
    """A check has nothing to check; the message says why."""


ok = partial(Finding, State.OK)
note = partial(Finding, State.NOTE)
warning = partial(Finding, State.WARNING)
problem = partial(Finding, State.PROBLEM)


def of_problem(found: Problem) -> Finding:
    """A user's mistake as a finding."""
    return problem(found.fault, public_text(found.remedy))
