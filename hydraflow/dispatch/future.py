"""Pending calls: waiting for them, finding the first cause when one fails, and the future of a call.

In: references to the answers, with the rank of each. Out: results, or one error: a WorkerError, a worker's
decision to stop, or a ConfigError from a worker's start. Waiting for one call watches all calls, so that a
failed group ends the wait for another group that depends on it. A group whose processes hold no state
replaces one that has died; any other group is ended, and the run resumes from its checkpoint.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NoReturn, Protocol

import ray
from ray import ObjectRef

from hydraflow.dispatch.head import RayHead
from hydraflow.dispatch.shards import CompletedFuture, Future, LateShard
from hydraflow.dispatch.timeline import Timeline
from hydraflow.dispatch.transport import Payload, Receipt, Traffic, unpack
from hydraflow.dispatch.worker import DECISIONS, Failure, log_tail
from hydraflow.errors import ConfigError, HydraflowError, WorkerError

SLICE = 0.25
"""Seconds to wait for all ranks of a call before checking the answers so far: one may be a failure."""
GRACE = 1.0
"""Seconds for the other ranks of a failed call to report as well, so that the first cause is found."""
UNNOTICED = 40.0
"""Seconds to wait for news of the death behind a broken connection: the peers' connections break at once, but
Ray's health checks take half a minute to notice that a machine is gone."""
BROKEN = re.compile(
    r"connection (was |is )?(reset|closed|refused)|broken pipe|socket closed|remote error", re.I
)
"""Messages of gloo, NCCL and sockets when the peer process has gone."""
COLOURS = re.compile(r"\x1b\[\d+m")
"""ANSI colours in Ray's messages."""
UNANSWERED = 5.0
"""Seconds of a wait before idle processes are asked whether they live."""
FETCH = 10.0
"""Seconds for one ready answer to arrive, after fetching the answers of all ranks together has failed."""


class GroupHandle(Protocol):
    """What waiting needs from a group of processes."""

    error: HydraflowError | None

    def end(self, error: HydraflowError) -> None:
        """Kills the processes and refuses further calls with `error`."""

    def log_of(self, rank: int, role: str) -> str:
        """Path of a rank's log; empty while unknown."""

    def may_replace(self, call: PendingCall) -> bool:
        """Whether the process that died with this call may be replaced."""

    def replace(self, lost: Sequence[PendingCall], cause: str) -> None:
        """Starts a replacement for a process that has died and resends its calls. Raises WorkerError when
        that fails, too."""


@dataclass(frozen=True)
class PendingCall:
    """A pending answer: its rank, its deadline, and where to store it."""

    group: GroupHandle
    role: str
    rank: int
    node: str
    method: str
    seconds: float
    deadline: float
    """time.monotonic() at which `seconds` have passed since it was sent or, if later, since an earlier call
    of its process or one that it waits for was answered."""
    answers: dict[int, Any]
    """The call's answers by rank; this one is added."""
    refs: dict[int, ObjectRef]
    """The call's pending answers, by rank; this one changes when the call is resent."""
    again: Callable[[], list[ObjectRef]] | None
    """Resends the call; None: its answer is not needed after a replacement."""
    awaits: frozenset[ObjectRef] = frozenset()
    """Answers of other calls that its process waits for before it runs the method."""
    renews: bool = True
    """Whether the limit starts again as in `deadline`; that of a process's start covers all of it."""
    number: int = field(default_factory=count().__next__)
    """In the order in which calls are sent."""
    columns: ObjectRef | None = None
    """The columns of the answer, if the call returns any."""
    attempts: int = 0
    """Number of resends."""

    def error(self, cause: str) -> WorkerError:
        """This call's error, with the end of the rank's log."""
        tail = log_tail(self.group.log_of(self.rank, self.role))
        return WorkerError(
            role=self.role, rank=self.rank, node=self.node, method=self.method, cause=cause, log_tail=tail
        )


class ReplacementDied(Exception):
    """A replacement process died while it was being set up; caught by `GroupHandle.replace`."""

    def __init__(self, failure: Failure):
        super().__init__(failure.cause)
        self.failure = failure


class Asking:
    """Asks, during one wait, whether a process without a pending call is dead. Ray does not always report its
    death to readers of the objects that it held: to the controller, or to the process that it waits for."""

    def __init__(self, ask_idle: Callable[[], None] | None):
        self._ask_idle = ask_idle
        self._due, self._seconds = time.monotonic() + UNANSWERED, UNANSWERED

    def ask_if_due(self) -> None:
        """Asks after UNANSWERED seconds, again after twice as long, and so on."""
        if self._ask_idle is not None and time.monotonic() > self._due:
            self._ask_idle()
            self._due += self._seconds
            self._seconds *= 2


class PendingCalls:
    """All pending calls. Used by one thread."""

    def __init__(self, traffic: Traffic, timeline: Timeline):
        self.traffic, self.timeline = traffic, timeline
        self.stacks: Callable[[str], str] | None = None
        """Writes the stacks of all workers for a given reason; returns the file. None: not configured."""
        self.head: RayHead | None = None
        """Ray's control service, checked while waiting; None: not checked."""
        self.interrupt: Callable[[], None] | None = None
        """Called a few times a second while waiting; an exception ends the wait. The calls stay pending,
        except those of a process that was just being replaced."""
        self.ask_idle: Callable[[], None] | None = None
        """Sends idle worker processes a call, so that the death of one is noticed; None: there are none."""
        self.pending: dict[ObjectRef, PendingCall] = {}
        self._died: list[tuple[PendingCall, Failure]] = []
        """Calls whose process is to be replaced."""
        self._replaced: tuple[GroupHandle, int] | None = None
        """Group and rank of the process that is being replaced."""

    def settle(self, refs: Mapping[int, ObjectRef]) -> None:
        """Waits until none of `refs` is pending. Raises when any pending call, one of these or another, fails
        or is late."""
        asking = Asking(self.ask_idle)
        while owed := self._owed(refs):
            asking.ask_if_due()
            self._wait(owed, len(owed))

    def settle_one(self, several: Sequence[Mapping[int, ObjectRef]]) -> int:
        """Waits until one of them has settled; returns its index. Raises as `settle` does."""
        asking = Asking(self.ask_idle)
        while True:
            owed = [self._owed(refs) for refs in several]
            if [] in owed:
                return owed.index([])
            asking.ask_if_due()
            self._wait([ref for refs in owed for ref in refs], 1)

    def await_columns(self, columns: list[ObjectRef], seconds: float) -> None:
        """Waits until `columns` can be read, at most `seconds`. Raises when a call fails or a worker process
        is dead."""
        start, asking = time.monotonic(), Asking(self.ask_idle)
        while len(ray.wait(columns, num_returns=len(columns), timeout=SLICE)[0]) < len(columns):
            if time.monotonic() - start > seconds:
                return
            asking.ask_if_due()
            self._check()
            self._take(_answered(list(self.pending), 0))

    def blame_lost_columns(self) -> None:
        """Raises the error of the process that has died, or of another call that fails meanwhile, if any."""
        if found := self._death_of_any():
            self._raise_first(found)

    def _owed(self, refs: Mapping[int, ObjectRef]) -> list[ObjectRef]:
        return [ref for ref in refs.values() if ref in self.pending]

    def _wait(self, owed: list[ObjectRef], count: int) -> None:
        """Waits for up to `count` of those answers, and stores all that have arrived."""
        self._check()
        left = min(call.deadline for call in self.pending.values()) - time.monotonic()
        ready = _answered(owed, max(0.0, min(left, SLICE)), count)
        ready += _answered([ref for ref in self.pending if ref not in owed], 0)
        if not ready and left <= 0:
            self._late()
        self._take(ready)

    def _check(self) -> None:
        """Raises when Ray's control service is gone, or when `interrupt` ends the wait."""
        if self.head is not None:
            self.head.look()
        if self.interrupt is not None:
            self.interrupt()

    def _take(self, refs: Sequence[ObjectRef]) -> None:
        """Stores these answers, replaces processes that have died, and raises on other failures."""
        failures, again = [], None
        for call, failure in self._keep(refs):
            if failure.died and (call.group, call.rank) == self._replaced:
                again = failure
            elif failure.died and call.group.may_replace(call):
                self._died.append((call, failure))
            else:
                failures.append((call, failure))
        if failures:
            self._fail(failures)
        if again is not None:
            raise ReplacementDied(again)
        while self._died and self._replaced is None:
            self._replace(*self._died[0])

    def _replace(self, first: PendingCall, failure: Failure) -> None:
        """Replaces a process. Other deaths in the meantime are handled afterwards."""
        lost = [call for call, _ in self._died if _same_process(call, first)]
        lost += [call for call in self.pending.values() if _same_process(call, first)]
        self.forget(first.group, first.rank)
        self._replaced = first.group, first.rank
        try:
            first.group.replace(sorted(lost, key=lambda call: call.number), failure.cause)
        except BaseException:
            self.forget(first.group, first.rank)
            raise
        finally:
            self._replaced = None

    def _keep(self, refs: Sequence[ObjectRef]) -> list[tuple[PendingCall, Failure]]:
        """Stores the answers that have arrived; returns those that are failures."""
        failures = []
        for ref, (call, answer) in zip(refs, self._read(refs), strict=True):
            if isinstance(answer, Failure):
                failures.append((call, answer))
            else:
                call.answers[call.rank] = answer
                self._renew(ref, call)
        return failures

    def _renew(self, ref: ObjectRef, done: PendingCall) -> None:
        """Gives the whole time limit to the calls that are queued behind an answered one in its process or
        wait for its answer, and to those behind these."""
        now = time.monotonic()
        before = [(ref, done)]
        while before:
            ref, done = before.pop()
            for other, call in self.pending.items():
                is_behind = ref in call.awaits or (_same_process(call, done) and call.number > done.number)
                if is_behind and call.renews and call.deadline < now + call.seconds:
                    self.pending[other] = replace(call, deadline=now + call.seconds)
                    before.append((other, call))

    def _read(self, refs: Sequence[ObjectRef]) -> list[tuple[PendingCall, Any]]:
        calls = [self.pending.pop(ref) for ref in refs]
        try:
            payloads = ray.get(list(refs), timeout=max(call.seconds for call in calls)) if refs else []
        except ray.exceptions.RayError:  # of any one of them
            return [(call, self._read_one(ref, call)) for ref, call in zip(refs, calls, strict=True)]
        return [(call, self._opened(call, payload)) for call, payload in zip(calls, payloads, strict=True)]

    def _read_one(self, ref: ObjectRef, call: PendingCall) -> Any:
        try:
            payload = ray.get(ref, timeout=FETCH)
        except ray.exceptions.GetTimeoutError:
            why = "its answer is ready but does not arrive: the network to its node may be down"
            return Failure(call.error(why), time.time())
        except ray.exceptions.RayActorError as error:
            return Failure(call.error(f"the process died: {_how_it_died(error)}"), time.time(), died=True)
        except ray.exceptions.RayError as error:
            why = "\n".join(str(error).strip().splitlines()[:12])
            return Failure(call.error(f"the call could not be made: {why}"), time.time())
        return self._opened(call, payload)

    def _opened(self, call: PendingCall, payload: Payload) -> Any:
        self.traffic.received += payload.nbytes
        self.timeline.note(call.role, call.rank, payload.spans)
        self.traffic.worked[call.role, call.rank] += payload.seconds
        answer = unpack(payload)
        columns_elsewhere = call.columns is not None and isinstance(answer, Receipt)
        return answer.at(call.columns) if columns_elsewhere else answer

    def _fail(self, failures: list[tuple[PendingCall, Failure]]) -> NoReturn:
        """Ends the groups that failed, with the first cause among all reports, and raises it."""
        failures = [*failures, *self._keep(_answered(list(self.pending), GRACE))]
        self._raise_first([*failures, *self._death_behind(failures)])

    def _raise_first(self, failures: list[tuple[PendingCall, Failure]]) -> NoReturn:
        _, first = min(failures, key=_precedence)
        self._end({call.group for call, _ in failures}, first.error)

    def _death_behind(self, failures: list[tuple[PendingCall, Failure]]) -> list[tuple[PendingCall, Failure]]:
        """If each failure follows from the death of another process: further failures, up to that death. A
        broken connection is due to a process of the same group, lost columns to one of any group."""
        if not all(_follows_a_death(failure) for _, failure in failures):
            return []
        if any(failure.lost_columns for _, failure in failures):
            return self._death_of_any()
        return self._death_among({call.group for call, _ in failures})

    def _death_of_any(self) -> list[tuple[PendingCall, Failure]]:
        if self.ask_idle is not None:
            self.ask_idle()
        return self._death_among(None)

    def _death_among(self, groups: set[GroupHandle] | None) -> list[tuple[PendingCall, Failure]]:
        """Failures of the pending calls of these groups (None: all), until one is a death or another cause,
        for at most UNNOTICED seconds."""
        found: list[tuple[PendingCall, Failure]] = []
        deadline = time.monotonic() + UNNOTICED
        while all(_follows_a_death(failure) for _, failure in found) and time.monotonic() < deadline:
            suspects = [ref for ref, call in self.pending.items() if groups is None or call.group in groups]
            if not suspects:
                break
            self._check()
            for call, failure in self._keep(_answered(suspects[:1], SLICE) or _answered(suspects, 0)):
                # what a process returned that can be replaced outlives it
                replaced = groups is None and failure.died and call.group.may_replace(call)
                (self._died if replaced else found).append((call, failure))
        return found

    def _late(self) -> None:
        """Ends the group of the first call that is late, and raises its error."""
        now = time.monotonic()
        late = [call for call in self.pending.values() if call.deadline <= now]
        first = min(late, key=lambda call: (call.deadline, call.number))
        ranks = sorted({call.rank for call in late if call.group is first.group})
        others = f" (nor from ranks {ranks[1:]})" if len(ranks) > 1 else ""
        cause = f"no answer in {first.seconds:g} seconds{others}"
        if self.stacks is not None:
            # learns the location of processes that reported meanwhile
            self._keep(_answered(list(self.pending), 0))
            try:
                written = self.stacks(f"{first.role} rank {first.rank}, {first.method}: {cause}")
            except (OSError, ray.exceptions.RayError) as error:
                written = f"they cannot be written: {error}"
            cause += f"; stacks of all workers: {written}"
        self._end({first.group}, first.error(cause))

    def _end(self, groups: set[GroupHandle], error: HydraflowError) -> NoReturn:
        """Ends these groups and raises `error`. If the workers decided to stop, their processes are kept:
        they may still be writing a checkpoint."""
        for group in groups:
            self.forget(group)
            if not isinstance(error, DECISIONS):
                group.end(error)
        raise error

    def forget(self, group: GroupHandle, rank: int | None = None) -> None:
        """Drops the pending calls of a group that has ended, or of one of its processes."""

        def dropped(call: PendingCall) -> bool:
            return call.group is group and (rank is None or call.rank == rank)

        self.pending = {ref: call for ref, call in self.pending.items() if not dropped(call)}
        self._died = [died for died in self._died if not dropped(died[0])]


def _same_process(one: PendingCall, other: PendingCall) -> bool:
    return one.group is other.group and one.rank == other.rank


def _answered(refs: list[ObjectRef], seconds: float, count: int | None = None) -> list[ObjectRef]:
    """The references that are ready once `count` are (None: all), or after `seconds`."""
    enough = len(refs) if count is None else count
    return ray.wait(refs, num_returns=enough, timeout=seconds, fetch_local=False)[0] if refs else []


def _follows_a_death(failure: Failure) -> bool:
    """Whether the failure is what other processes report when one has died."""
    return not failure.died and (failure.lost_columns or BROKEN.search(failure.cause) is not None)


def _precedence(reported: tuple[PendingCall, Failure]) -> tuple[int, float]:
    """Sort key; the smallest is the first cause: a user error (all ranks often find the same one, so the
    lowest rank reports it); then a death, which causes its peers' broken connections even if they report
    first; then whatever happened first."""
    call, failure = reported
    if isinstance(failure.error, ConfigError):
        return 0, call.rank
    return (1 if failure.died else 2), failure.at


def _how_it_died(error: ray.exceptions.RayActorError) -> str:
    """Ray's line about how the process ended, without actor ids and guesses at causes; if it failed to start,
    the end of Ray's report."""
    if error.actor_init_failed:
        return "\n".join(COLOURS.sub("", str(error)).strip().splitlines()[-12:])
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    how = lines[:2][-1].partition(" Some common causes include")[0]
    if "SYSTEM_ERROR" not in how:
        return how
    return f"{how} It crashed or was killed, perhaps because the machine ran out of memory."


@dataclass(frozen=True, eq=False)
class CallFuture(Future):
    """The result of a call to worker processes."""

    calls: PendingCalls
    group: GroupHandle
    refs: dict[int, ObjectRef]
    """Pending answers by rank."""
    answers: dict[int, Any]
    collectors: list[int]
    """Ranks whose answers are used, in the order of their rows."""
    collect: Callable[[list[Any]], Any]
    joins: bool

    def get(self) -> Any:
        self.calls.settle(self.refs)
        if len(self.answers) < len(self.refs):
            assert self.group.error is not None, "an answer is missing though its group did not fail"
            raise self.group.error
        answers = [self.answers[rank] for rank in self.collectors]
        return self.collect([one.batch() if isinstance(one, Receipt) else one for one in answers])

    def shards(self, parts: int, padding: bool) -> list[LateShard]:
        receipts = tuple(self.refs[rank] for rank in self.collectors)
        return [LateShard(receipts, part, parts, padding) for part in range(parts)]


def await_any(futures: Sequence[Future]) -> int:
    """Waits until one of them is ready; returns its index. Raises WorkerError when a call fails."""
    late = [future for future in futures if isinstance(future, CallFuture)]
    ready = next((number for number, one in enumerate(futures) if isinstance(one, CompletedFuture)), None)
    if ready is not None:
        return ready
    assert len(late) == len(futures), "it waits for whole calls only"
    return late[0].calls.settle_one([one.refs for one in late])
