"""Calls under way: waiting for them, finding the first cause when one fails, and the future that stands for a
call.

In: the answers' references with who gives them. Out: results, or one error: a WorkerError, a worker's
decision to stop, or a ConfigError from a start. Whoever waits for one call watches all calls: a group that
fails ends the wait for another group that depends on it. Left out on purpose: retries. A group that failed is
ended, and a run goes on from its checkpoint.
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
"""Seconds of waiting for all ranks of a call, after which those that have answered are looked at: one may
have failed."""
GRACE = 1.0
"""Seconds in which the other ranks of a failed call may report too, so that the first cause is found."""
FETCH = 10.0
"""Seconds in which an answer that is there must arrive, after the answers of all ranks together have not."""


class Crew(Protocol):
    """The processes of a group, as far as waiting is concerned."""

    error: HydraflowError | None

    def end(self, error: HydraflowError) -> None:
        """Kills the processes and refuses further calls with `error`."""

    def log_of(self, rank: int, role: str) -> str:
        """Path of a rank's log; empty while unknown."""


@dataclass
class Work:
    """How long the slowest rank of one call worked, among those that have answered."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Ticket:
    """Who owes an answer, until when, and where it goes."""

    crew: Crew
    role: str
    rank: int
    node: str
    method: str
    seconds: float
    deadline: float
    """time.monotonic() at which `seconds` have passed."""
    answers: dict[int, Any]
    """Where the answer is kept, by rank."""
    work: Work
    """Shared by the tickets of one call."""

    def error(self, cause: str) -> WorkerError:
        """This call's error, with the end of the rank's log."""
        tail = log_tail(self.crew.log_of(self.rank, self.role))
        return WorkerError(
            role=self.role, rank=self.rank, node=self.node, method=self.method, cause=cause, log_tail=tail
        )


class Ledger:
    """All calls under way. Used by one thread."""

    def __init__(self, traffic: Traffic, timeline: Timeline):
        self.traffic, self.timeline = traffic, timeline
        self.stacks: Callable[[str], str] | None = None
        """Writes down where all workers stand, for the reason that it is given; returns the file. None:
        nobody does."""
        self.head: Head | None = None
        """Looked at while waiting; None: nobody does."""
        self.interrupt: Callable[[], None] | None = None
        """Called a few times a second while waiting; what it raises ends the wait, and the calls stay under
        way."""
        self.pending: dict[ObjectRef, Ticket] = {}

    def settle(self, refs: Sequence[ObjectRef]) -> None:
        """Waits until none of `refs` is owed. Raises when any call under way, one of these or another, fails
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
        """Takes what has arrived, without waiting."""
        self._take(self._ready([], 0.0))

    def _ready(self, wanted: list[ObjectRef], seconds: float) -> list[ObjectRef]:
        """Waits until all of `wanted` have answered, at most `seconds`; returns whatever has, of these calls
        and of others."""
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
                ticket.error("its answer is there, but does not arrive: the network to its node may be gone"),
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
        """Ends the groups that failed, with the first cause among all that is reported, and raises it."""
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
            self._keep(self._ready([], 0.0))  # who has told about itself meanwhile
            cause += (
                "; stacks of all workers:"
                f" {self.stacks(f'{first.role} rank {first.rank}, {first.method}: {cause}')}"
            )
        self._end({first.crew}, first.error(cause))

    def _end(self, crews: set[Crew], error: HydraflowError) -> None:
        """A group whose workers decided to stop keeps its processes: they may be writing a checkpoint
        still."""
        for crew in crews:
            self.forget(crew)
            if not isinstance(error, DECISIONS):
                crew.end(error)
        raise error

    def forget(self, crew: Crew) -> None:
        """Drops the calls of a group that is ended."""
        self.pending = {ref: ticket for ref, ticket in self.pending.items() if ticket.crew is not crew}


def _precedence(reported: tuple[Ticket, Failure]) -> tuple[int, float]:
    """The least is the first cause: a mistake of the user's, of which ranks often find the same one and the
    lowest tells it; then a death, which is the cause of its peers' broken connections, whoever reported
    first; then what happened first.
    """
    ticket, failure = reported
    if isinstance(failure.error, ConfigError):
        return 0, ticket.rank
    return (1 if failure.died else 2), failure.at


def _how_it_died(error: ray.exceptions.RayActorError) -> str:
    """Ray's line about the end of the process, without its numbers of the actor and its guesses at causes."""
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
        """Whether `get` would return at once. WorkerError when a call under way has failed."""
        self._ledger.peek()
        return len(self._answers) == len(self._refs) or self._crew.error is not None

    def shards(self, parts: int, padding: bool) -> list[LateShard]:
        """Shards that the receiving workers cut themselves."""
        receipts = tuple(self._refs[rank] for rank in self._collectors)
        return [LateShard(receipts, part, parts, padding) for part in range(parts)]
