"""What a check says: a state, the evidence for it, and what would repair it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hydraflow.errors import Problem
from hydraflow.redact import public_text


class State(StrEnum):
    """How a check ended; only a problem keeps a run from starting."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing to do."""
    WARNING = "warning"
    """The run starts, and may be slow, fail later or learn less."""
    PROBLEM = "problem"
    SKIPPED = "skipped"
    """This configuration needs nothing of it, or what it looks at is not there yet."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    state: State
    evidence: str
    """What was seen, with numbers."""
    remedy: str = ""
    """What would repair it, as a command or an override to paste where there is one."""


class CheckSkipped(Exception):
    """A check has nothing to look at; the message says why."""


def ok(evidence: str) -> Finding:
    return Finding(State.OK, evidence)


def note(evidence: str, remedy: str = "") -> Finding:
    return Finding(State.NOTE, evidence, remedy)


def warning(evidence: str, remedy: str = "") -> Finding:
    return Finding(State.WARNING, evidence, remedy)


def problem(evidence: str, remedy: str = "") -> Finding:
    return Finding(State.PROBLEM, evidence, remedy)


def of_problem(found: Problem) -> Finding:
    """A user's mistake as a finding."""
    return problem(found.fault, public_text(found.remedy))
