"""Errors that reach the user: what is wrong, which rule it breaks, and how to fix it.

In: the facts of an error. Out: one message without a stack trace, and the process's exit code. Left out on
purpose: our own bugs, which are `assert`s and propagate with their stack traces.

Exit codes: 0 done, 2 a user error, nearly always found before anything starts, 3 an environment fault found
later, 4 a worker failed, 5 training stopped by a guard, 130 interrupted, 143 ended by a repeated SIGTERM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hydraflow.redact import public, public_text, public_word

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One mistake: the key, its value, the rule that it breaks, and a remedy. Printed without secrets."""

    field: str
    """Configuration key or file, as the user writes it."""
    value: object
    """Its current value; `None` leaves it out of the message."""
    rule: str
    """The broken rule, with numbers."""
    remedy: str = ""
    """The remedy, if possible as an override to paste."""

    def __str__(self) -> str:
        return self.fault + (f"\n      -> {public_text(self.remedy)}" if self.remedy else "")

    def to_json(self) -> dict[str, str | None]:
        """The fields as a mapping, without secrets."""
        return {
            "field": public_word(self.field),
            "value": None if self.value is None else shown(self.value, self.field),
            "rule": public_text(self.rule),
            "remedy": public_text(self.remedy),
        }

    @property
    def fault(self) -> str:
        """The message without the remedy."""
        return f"{self.head}: {public_text(self.rule)}"

    @property
    def head(self) -> str:
        """The subject of the problem: the key and its value, or the file."""
        if self.value is None:
            return public_word(self.field)
        return f"{self.field}={shown(self.value, self.field)}"


def first_line(error: BaseException) -> str:
    """A one-line summary: the first line, with the second if the first is only a heading; the error's class
    if it has no text.

    >>> first_line(ValueError("cannot be read:\\n  no header")), first_line(EOFError())
    ('cannot be read: no header', 'EOFError')
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def shown(value: object, key: str = "") -> str:
    """A value as in an override, without secrets; `key`: the key that has the value.

    >>> shown(None), shown(False), shown(["0-3", 8]), shown({"a": [1]})
    ('null', 'false', '[0-3,8]', '{a: [1]}')
    >>> shown("s3cr3t", "judge.api_key"), shown({"HF_TOKEN": "s3cr3t"})
    ('(hidden)', '{HF_TOKEN: (hidden)}')
    """
    return _written(public(value, key))


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        items = ",".join(_written(item) or "''" for item in value)
        return f"[{items}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_written(item)}' for name, item in value.items())}}}"
    return str(value)


class HydraflowError(Exception):
    """Base of every error that is shown to the user as a message, not as a stack trace."""

    exit_code = 1


class ConfigError(HydraflowError, ValueError):
    """User errors: configuration, data, paths, resources. Reported all at once.

    >>> print(ConfigError([Problem("trainer.nnodes", 0, "must be at least 1", "trainer.nnodes=1")]))
    1 problem found before anything was started:
      1. trainer.nnodes=0: must be at least 1
          -> trainer.nnodes=1
    """

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], *, started: bool = False):
        assert problems, "a ConfigError names at least one problem"
        self.problems = list(problems)
        self.started = started
        """Whether the run had started processes. Set by a caller, because the code that finds the mistake
        usually does not know."""
        super().__init__(self.problems)

    def __str__(self) -> str:
        noun = "problem" if len(self.problems) == 1 else "problems"
        when = "after the run had started" if self.started else "before anything was started"
        lines = [f"{len(self.problems)} {noun} found {when}:"]
        return "\n".join(lines + [f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1)])

    def __reduce__(self) -> tuple[type, tuple[list[Problem]], dict[str, object]]:
        return type(self), (self.problems,), {"started": self.started}

    @classmethod
    def one(cls, field: str, value: object, rule: str, remedy: str = "") -> ConfigError:
        """A report with a single problem."""
        return cls([Problem(field, value, rule, remedy)])


@contextmanager
def after_the_start() -> Iterator[None]:
    """Marks a ConfigError from the block as raised after the run had started."""
    try:
        yield
    except ConfigError as error:
        error.started = True
        raise


class Faults:
    """Collects the problems of several checks for one report.

    Callers skip checks that need a missing result: their problems would only follow from the first.

    >>> faults = Faults()
    >>> faults.result(lambda: 7), faults.passes(lambda: None), faults.problems
    (7, True, [])
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def result(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; None if it raised a ConfigError, whose problems are kept."""
        try:
            return work()
        except ConfigError as error:
            self.add(error.problems)
            return None

    def passes(self, check: Callable[[], object]) -> bool:
        """Runs `check`; False if it raised a ConfigError, whose problems are kept."""
        try:
            check()
        except ConfigError as error:
            self.add(error.problems)
            return False
        return True

    def add(self, problems: Sequence[Problem]) -> None:
        """Adds problems, without duplicates: two checks may open the same file."""
        self.problems += [problem for problem in problems if problem not in self.problems]

    def require_none(self) -> None:
        """Raises one ConfigError with all problems, if there are any."""
        if self.problems:
            raise ConfigError(self.problems)


class EnvironmentFault(HydraflowError):
    """A fault of the machine or cluster that is found after the start (a lost node, a full disk)."""

    exit_code = 3


class LostColumns(EnvironmentFault):
    """Columns of a batch that are gone with the process that made them, or do not arrive in time."""


class DoesNotFit(EnvironmentFault):
    """A single row needs more memory than a device has."""


class StoreFull(EnvironmentFault):
    """A machine's object store has no room for the data that its processes exchange."""


class WorkerError(HydraflowError):
    """A worker died, raised or did not answer in time. Picklable."""

    exit_code = 4

    def __init__(self, *, role: str, rank: int, node: str, method: str, cause: str, log_tail: str = ""):
        self.facts = dict(role=role, rank=rank, node=node, method=method, cause=cause, log_tail=log_tail)
        self.role, self.rank, self.node = role, rank, node
        self.method, self.cause, self.log_tail = method, cause, log_tail
        tail = f"\n--- last lines of its log ---\n{log_tail}" if log_tail else ""
        super().__init__(f"{role} rank {rank} on node {node} failed in {method}: {cause}{tail}")

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return partial(WorkerError, **self.facts), ()  # type: ignore[arg-type]


class GuardStop(HydraflowError):
    """A guard stopped training: weights that disagree at step 0, or too many bad steps."""

    exit_code = 5
