"""Pending calls: waiting for them, finding the first cause when one fails, and the future of a call.

In: references of the answers, with the rank of each. Out: results, or one error: a WorkerError, a worker's
decision to stop, or a ConfigError from a start. Waiting for one call watches all calls: a group that
fails ends the wait for another group that depends on it. Left out on purpose: retries. A failed group is
ended, and the run resumes from its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray import ObjectRef

from hydraflow.dispatch.head import Head
from hydraflow.dispatch.shards import LateShard, Promised
from hydraflow.dispatch.timeline import Timeline
from hydraflow.dispatch.transport import Parcel, Traffic, unpack
from hydraflow.dispatch.worker import DECISIONS, Failure, log_tail
from hydraflow.errors import ConfigError, HydraflowError, WorkerError

SLICE = 0.25
"""Seconds to wait for all ranks of a call before checking the answers so far: one may be a failure."""
GRACE = 1.0
"""Seconds for the other ranks of a failed call to report as well, so that the first cause is found."""
FETCH = 10.0
"""Seconds for one ready answer to arrive, after fetching the answers of all ranks together has failed."""


class Crew(Protocol):
    """What waiting needs to know of a group's processes."""

    error: HydraflowError | None

    def end(self, error: HydraflowError) -> None:
        """Kills the processes and refuses further calls with `error`."""

    def log_of(self, rank: int, role: str) -> str:
        """Path of a rank's log; empty while unknown."""


@dataclass
class Work:
    """Run time of the slowest rank of one call, among those that have answered."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Ticket:
    """A pending answer: which rank owes it, by when, and where it goes."""

    crew: Crew
    role: str
    rank: int
    node: str
    method: str
    seconds: float
    deadline: float
    """time.monotonic() at which `seconds` have passed."""
    answers: dict[int, Any]
    """The call's answers by rank; this one is added."""
    work: Work
    """Shared by the tickets of one call."""

    def error(self, cause: str) -> WorkerError:
        """This call's error, with the end of the rank's log."""
        tail = log_tail(self.crew.log_of(self.rank, self.role))
        return WorkerError(
            role=self.role, rank=self.rank, node=self.node, method=self.method, cause=cause, log_tail=tail
        )


class Ledger:
    """All pending calls. Used by one thread."""

    def __init__(self, traffic: Traffic, timeline: Timeline):
        self.traffic, self.timeline = traffic, timeline
        self.stacks: Callable[[str], str] | None = None
        """Writes the stacks of all workers for a given reason; returns the file. None: not configured."""
        self.head: Head | None = None
        """Ray's control service, checked while waiting; None: not checked."""
        self.interrupt: Callable[[], None] | None = None
        """Called a few times a second while waiting; an exception ends the wait, and the calls stay
        pending."""
        self.pending: dict[ObjectRef, Ticket] = {}

    def settle(self, refs: Sequence[ObjectRef]) -> None:
        """Waits until none of `refs` is pending. Raises when any pending call, one of these or another, fails
        or is late."""
        while owed := [ref for ref in refs if ref in self.pending]:
            if self.head is not None:
                self.head.look()
            if self.interrupt is not None:
                self.interrupt()
            left = min(ticket.deadline for ticket in self.pending.values()) - time.monotonic()
            ready = self._ready(owed, max(0.0, min(left, SLICE)))
            if not ready and left <= 0:
                self._late()
            self._take(ready)

    def peek(self) -> None:
        """Processes the answers that have arrived, without waiting."""
        self._take(self._ready([], 0.0))

    def _ready(self, wanted: list[ObjectRef], seconds: float) -> list[ObjectRef]:
        """Waits until all of `wanted` have answered, at most `seconds`; returns those that have, of these
        calls and of others."""
        done = (
            ray.wait(wanted, num_returns=len(wanted), timeout=seconds, fetch_local=False)[0] if wanted else []
        )
        others = [ref for ref in self.pending if ref not in wanted]
        return done + (
            ray.wait(others, num_returns=len(others), timeout=0, fetch_local=False)[0] if others else []
        )

    def _take(self, refs: Sequence[ObjectRef]) -> None:
        failures = self._keep(refs)
        if failures:
            self._fail(failures)

    def _keep(self, refs: Sequence[ObjectRef]) -> list[tuple[Ticket, Failure]]:
        """Stores the answers that have arrived; returns those that are failures."""
        failures = []
        for ticket, answer in self._read(refs):
            if isinstance(answer, Failure):
                failures.append((ticket, answer))
            else:
                ticket.answers[ticket.rank] = answer
        return failures

    def _read(self, refs: Sequence[ObjectRef]) -> list[tuple[Ticket, Any]]:
        tickets = [self.pending.pop(ref) for ref in refs]
        try:
            parcels = ray.get(list(refs), timeout=max(ticket.seconds for ticket in tickets)) if refs else []
        except ray.exceptions.RayError:
            return [(ticket, self._read_one(ref, ticket)) for ref, ticket in zip(refs, tickets, strict=True)]
        return [
            (ticket, self._opened(ticket, parcel)) for ticket, parcel in zip(tickets, parcels, strict=True)
        ]

    def _read_one(self, ref: ObjectRef, ticket: Ticket) -> Any:
        try:
            parcel = ray.get(ref, timeout=FETCH)
        except ray.exceptions.GetTimeoutError:
            return Failure(
                ticket.error("its answer is ready, but does not arrive: the network to its node may be gone"),
                time.time(),
            )
        except ray.exceptions.RayActorError as error:
            return Failure(ticket.error(f"the process died: {_how_it_died(error)}"), time.time(), died=True)
        except ray.exceptions.RayError as error:
            why = "\n".join(str(error).strip().splitlines()[:12])
            return Failure(ticket.error(f"the call could not be made: {why}"), time.time())
        return self._opened(ticket, parcel)

    def _opened(self, ticket: Ticket, parcel: Parcel) -> Any:
        self.traffic.received += parcel.nbytes
        self.timeline.note(ticket.role, ticket.rank, parcel.spans)
        self.traffic.worked += max(0.0, parcel.seconds - ticket.work.seconds)
        ticket.work.seconds = max(ticket.work.seconds, parcel.seconds)
        return unpack(parcel)

    def _fail(self, failures: list[tuple[Ticket, Failure]]) -> None:
        """Ends the groups that failed, with the first cause among all reports, and raises it."""
        rest = list(self.pending)
        reported = ray.wait(rest, num_returns=len(rest), timeout=GRACE, fetch_local=False)[0] if rest else []
        failures = [*failures, *self._keep(reported)]
        _, first = min(failures, key=_precedence)
        self._end({ticket.crew for ticket, _ in failures}, first.error)

    def _late(self) -> None:
        now = time.monotonic()
        late = [ticket for ticket in self.pending.values() if ticket.deadline <= now]
        if not late:
            return
        first = min(late, key=lambda ticket: (ticket.deadline, ticket.rank))
        ranks = sorted({ticket.rank for ticket in late if ticket.crew is first.crew})
        others = f" (nor from ranks {ranks[1:]})" if len(ranks) > 1 else ""
        cause = f"no answer in {first.seconds:g} seconds{others}"
        if self.stacks is not None:
            self._keep(self._ready([], 0.0))  # processes that have reported their location since
            cause += (
                "; stacks of all workers:"
                f" {self.stacks(f'{first.role} rank {first.rank}, {first.method}: {cause}')}"
            )
        self._end({first.crew}, first.error(cause))

    def _end(self, crews: set[Crew], error: HydraflowError) -> None:
        """A group whose workers decided to stop keeps its processes: they may still be writing a
        checkpoint."""
        for crew in crews:
            self.forget(crew)
            if not isinstance(error, DECISIONS):
                crew.end(error)
        raise error

    def forget(self, crew: Crew) -> None:
        """Drops the calls of a group that has ended."""
        self.pending = {ref: ticket for ref, ticket in self.pending.items() if ticket.crew is not crew}


def _precedence(reported: tuple[Ticket, Failure]) -> tuple[int, float]:
    """Sort key; the smallest is the first cause: a user error (all ranks often find the same one, so the
    lowest rank reports it); then a death, which causes its peers' broken connections even if they report
    first; then whatever happened first."""
    ticket, failure = reported
    if isinstance(failure.error, ConfigError):
        return 0, ticket.rank
    return (1 if failure.died else 2), failure.at


def _how_it_died(error: ray.exceptions.RayActorError) -> str:
    """Ray's line about the end of the process, without its actor ids and its guesses at causes."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return lines[:2][-1].partition(" Some common causes include")[0]


class Future(Promised):
    """The result of a call to worker processes."""

    def __init__(
        self,
        ledger: Ledger,
        crew: Crew,
        refs: dict[int, ObjectRef],
        answers: dict[int, Any],
        collectors: Iterable[int],
        collect: Callable[[list[Any]], Any],
        joins: bool,
    ):
        self._ledger, self._crew, self._refs, self._answers = ledger, crew, refs, answers
        self._collectors, self._collect = list(collectors), collect
        self.joins = joins

    def get(self) -> Any:
        """Waits for the result. WorkerError as in `WorkerGroup`."""
        self._ledger.settle(list(self._refs.values()))
        if len(self._answers) < len(self._refs):
            assert self._crew.error is not None, "an answer is missing though its group did not fail"
            raise self._crew.error
        return self._collect([self._answers[rank] for rank in self._collectors])

    def done(self) -> bool:
        """Whether `get` would return at once. WorkerError when a pending call has failed."""
        self._ledger.peek()
        return len(self._answers) == len(self._refs) or self._crew.error is not None

    def shards(self, parts: int, padding: bool) -> list[LateShard]:
        """Shards that the receiving workers slice themselves."""
        receipts = tuple(self._refs[rank] for rank in self._collectors)
        return [LateShard(receipts, part, parts, padding) for part in range(parts)]
