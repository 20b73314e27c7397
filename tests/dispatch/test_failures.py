"""Failures: one error that names the first cause, soon, and nothing that hangs."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import ray
from dispatch.probes import Misconfigured, Probe, Troubled, Unbuildable, Unstartable

from hydraflow.dispatch import group
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.future import GRACE, UNANSWERED
from hydraflow.dispatch.group import Recovery, RoleGroup, Timeouts
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import ConfigError, WorkerError
from hydraflow.protocol.batch import DataProto

BatchOf = Callable[[int], DataProto]
SOON = 8.0
"""Seconds; a second or two on an idle machine."""


Start = Callable[..., RoleGroup]


@pytest.fixture
def start(ray_session: None) -> Iterator[Start]:
    """Starts groups of two processes with one role, all in one runtime, and unless `ready` is False waits for
    them all."""
    runtimes: list[Runtime] = []

    def make(cls: type = Troubled, role: str = "troubled", ready: bool = True, **limits: float) -> RoleGroup:
        if not runtimes:
            runtimes.append(Runtime(RayInitConfig(), Timeouts(**{"start": 120, "call": 60, **limits})))
        runtimes[0].start([ResourcePool(role, [2], cpus=0.25)])
        group = runtimes[0].group(role, {role: RoleSpec(cls)})
        if ready:
            runtimes[0].await_ready()
        return group.role(role)

    yield make
    for runtime in runtimes:
        runtime.stop()


def _error_of(call: Callable[..., Any], *args: Any) -> tuple[WorkerError, float]:
    since = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        call(*args)
    return caught.value, time.monotonic() - since


def _until_it_fails(read: Callable[[], Any]) -> None:
    """The columns of a process that has died stay on its machine for a moment."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        read()


def _assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + SOON
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes of a failed group are still there"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"  # noqa: SIM115
    except OSError:
        return False


def test_an_exception_while_the_others_are_in_a_collective(start: Start) -> None:
    role = start()
    assert role.call(Troubled.join_collective) == [2, 2]
    pids = role.call(Troubled.pids)
    error, seconds = _error_of(role.call, Troubled.fail_before_collective, 1)
    assert seconds < SOON
    assert (error.role, error.rank, error.method, error.node) == (
        "troubled",
        1,
        "fail_before_collective",
        os.uname().nodename,
    )
    assert (
        error.cause.startswith("ZeroDivisionError: bad number on rank 1")
        and "raise ZeroDivisionError" in error.cause
    )
    assert "about to reduce on rank 1" in error.log_tail
    assert pickle.loads(pickle.dumps(error)).facts == error.facts
    _assert_gone(pids)
    again, seconds = _error_of(role.call, Troubled.pids)
    assert again is error and seconds < 0.1


def test_a_death_is_the_first_cause_of_broken_connections(start: Start) -> None:
    role = start()
    role.call(Troubled.join_collective)
    error, seconds = _error_of(role.call, Troubled.die_before_collective, 0)
    assert seconds < SOON
    assert (error.role, error.rank, error.method) == ("troubled", 0, "die_before_collective")
    assert (
        error.cause.startswith("the process died: The actor is dead")
        and "exit" in error.cause
        and "the last words" in error.log_tail
    )
    assert "\n" not in error.cause and "Some common causes" not in error.cause


def test_a_broken_connection_waits_for_the_death_behind_it(start: Start) -> None:
    """Ray notices the loss of a machine later than its peers do."""
    role = start()
    error, _ = _error_of(role.call, Troubled.die_after_connections_broke, 1, 2 * GRACE)
    assert (error.rank, error.cause.partition(":")[0]) == (1, "the process died")


def test_columns_that_never_come_are_blamed_on_the_process_that_is_dead(start: Start) -> None:
    role = start()
    pids = role.call(Troubled.pids)
    never = ray.remote(num_cpus=0, max_retries=0)(lambda: time.sleep(600)).remote()
    os.kill(pids[1], signal.SIGKILL)
    error, seconds = _error_of(role.group.channel.calls.await_columns, [never], 60.0)
    assert (error.role, error.rank, error.cause.partition(":")[0]) == ("troubled", 1, "the process died")
    assert seconds < UNANSWERED + SOON
    ray.cancel(never, force=True)


def test_a_wait_notices_a_death_in_a_group_without_pending_calls(start: Start) -> None:
    """The process that is waited for may be reading the dead one's columns, and would never learn of it."""
    maker, reader = start(), start(role="reader")
    pids = maker.call(Troubled.pids)
    os.kill(pids[0], signal.SIGKILL)
    error, seconds = _error_of(reader.call, Troubled.sleep_on, 1, 600.0)
    assert (error.role, error.rank, error.method) == ("troubled", 0, "identify")
    assert error.cause.startswith("the process died") and seconds < UNANSWERED + SOON


@pytest.mark.parametrize("fetched", [True, False], ids=["the-controller", "another-process"])
def test_lost_columns_are_blamed_on_the_process_that_died(
    start: Start, batch_of: BatchOf, fetched: bool
) -> None:
    """Whether the controller reads them or another process, which reports only that they are lost."""
    maker, reader = start(Probe), start(Probe, role="reader")
    batch = maker.call(Probe.double, batch_of(2))
    os.kill(maker.call(Probe.where)[1]["pid"], signal.SIGKILL)
    read = partial(reader.fetch, batch) if fetched else partial(reader.call, Probe.none_of, batch)
    error, seconds = _error_of(_until_it_fails, read)
    assert (error.role, error.rank) == ("troubled", 1) and seconds < UNANSWERED + SOON
    assert error.cause.startswith("the process died")


def test_lost_columns_are_not_blamed_on_a_process_that_is_replaced(start: Start) -> None:
    """What it returned outlives it; the death of another is found after its own."""
    maker, spare = start(), start(role="spare")
    spare.group.recovery = Recovery(lambda rank: None, max_retries=2)
    dead, others = maker.call(Troubled.pids)[1], spare.call(Troubled.pids)
    spare.call(Troubled.wait_for_ever)
    os.kill(others[0], signal.SIGKILL)
    calls = spare.group.channel.calls
    ray.wait(list(calls.pending), num_returns=1, timeout=SOON, fetch_local=False)
    os.kill(dead, signal.SIGKILL)
    error, _ = _error_of(calls.blame_lost_columns)
    assert (error.role, error.rank) == ("troubled", 1) and error.cause.startswith("the process died")
    assert spare.group.error is None


def test_a_search_for_a_death_can_be_interrupted(start: Start) -> None:
    role = start()
    role.call(Troubled.wait_for_ever)
    calls, since = role.group.channel.calls, time.monotonic()

    def interrupt() -> None:
        if time.monotonic() > since + 1:
            raise KeyboardInterrupt

    calls.interrupt = interrupt
    with pytest.raises(KeyboardInterrupt):
        calls.blame_lost_columns()
    assert time.monotonic() - since < SOON


def test_columns_have_a_limit(start: Start) -> None:
    never = ray.remote(num_cpus=0, max_retries=0)(lambda: time.sleep(600)).remote()
    since = time.monotonic()
    start().group.channel.calls.await_columns([never], 0.5)
    assert time.monotonic() - since < 0.5 + SOON
    ray.cancel(never, force=True)


def test_a_process_that_cannot_start_says_why(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "WorkerHost", Unstartable)
    error, _ = _error_of(start(ready=False).group.await_ready)
    assert error.cause.startswith("the process died: ") and "\x1b" not in error.cause
    assert error.cause.endswith("ImportError: no such library")


def test_a_call_past_its_deadline(start: Start) -> None:
    role = start(call=2.0)
    pids = role.call(Troubled.pids)
    error, seconds = _error_of(role.call, Troubled.sleep_on, 1, 600.0)
    assert 2.0 <= seconds < SOON
    assert (error.role, error.rank, error.method, error.node) == (
        "troubled",
        1,
        "sleep_on",
        os.uname().nodename,
    )
    assert (
        error.cause.startswith("no answer in 2 seconds; stacks of all workers: ")
        and "in sleep_on" in error.log_tail
    )
    _assert_gone(pids)


def test_a_worker_that_cannot_be_built(start: Start) -> None:
    error, _ = _error_of(start(Unbuildable, ready=False).group.await_ready)
    assert (error.role, error.rank, error.method) == ("troubled", 1, "__init__")
    assert error.cause.startswith("FileNotFoundError: no model at /nowhere")


def test_a_mistake_in_the_configuration_that_a_worker_finds(start: Start) -> None:
    group = start(Misconfigured, ready=False).group
    with pytest.raises(ConfigError) as caught:
        group.await_ready()
    assert str(caught.value).splitlines()[1:] == [
        "  1. model.path=/nowhere/0: there is no such directory",
        "      -> model.path=<directory>",
    ]
    with pytest.raises(ConfigError) as again:
        group.await_ready()
    assert again.value is caught.value


def test_a_failed_maker_is_named_by_those_who_depend_on_it(start: Start, batch_of: BatchOf) -> None:
    maker, reader = start(ready=False), start(Probe, role="reader")
    error, seconds = _error_of(reader.call, Probe.double, maker.call(Troubled.broken_batch, batch_of(2)))
    assert seconds < SOON and (error.role, error.method) == ("troubled", "broken_batch")
    assert error.cause.startswith(("Unpicklable: no batch from rank 0", "Unpicklable: no batch from rank 1"))


def test_a_batch_that_never_comes_is_blamed_on_the_process_that_died(start: Start, batch_of: BatchOf) -> None:
    maker, reader = start(ready=False), start(Probe, role="reader")
    error, seconds = _error_of(reader.call, Probe.double, maker.call(Troubled.dying_batch, batch_of(2)))
    assert seconds < SOON and (error.role, error.rank, error.method) == ("troubled", 1, "dying_batch")
    assert error.cause.startswith("the process died")


def test_waiting_for_one_group_ends_when_another_fails(start: Start) -> None:
    patient, hasty = start(ready=False), start(role="hasty")
    pids = hasty.call(Troubled.pids)
    waiting, doomed = patient.call(Troubled.wait_for_ever), hasty.call(Troubled.wait_for_ever)
    os.kill(pids[0], signal.SIGKILL)
    error, seconds = _error_of(waiting.get)
    assert seconds < SOON and (error.role, error.rank, error.method) == ("hasty", 0, "wait_for_ever")
    assert _error_of(doomed.get)[0] is error
