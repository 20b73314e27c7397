"""Calls that do not wait, chains of them, and what passes through the controller."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import ray
import torch
from dispatch.probes import Probe
from ray._private.internal_api import memory_summary

from hydraflow import metrics
from hydraflow.dispatch.future import FETCH, CallFuture, PendingCall, PendingCalls
from hydraflow.dispatch.group import RoleGroup, WorkerGroup
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.timeline import Timeline
from hydraflow.dispatch.transport import INLINE_LIMIT, Traffic
from hydraflow.dispatch.worker import Failure
from hydraflow.errors import HydraflowError, WorkerError
from hydraflow.protocol.batch import DataProto

BatchOf = Callable[[int], DataProto]


class GroupHandle:
    """A group without processes: what waiting does to it."""

    def __init__(self) -> None:
        self.error: HydraflowError | None = None
        self.resent: Sequence[PendingCall] = ()

    def end(self, error: HydraflowError) -> None:
        self.error = error

    def log_of(self, rank: int, role: str) -> str:
        return ""

    def may_replace(self, call: PendingCall) -> bool:
        return False

    def replace(self, lost: Sequence[PendingCall], cause: str) -> None:
        self.resent = lost


def test_a_call_that_does_not_wait(pair: RoleGroup, batch_of: BatchOf) -> None:
    since = time.monotonic()
    future = pair.call(Probe.double_later, batch_of(3), seconds=0.5)
    assert time.monotonic() - since < 0.4
    assert pair.fetch(future.get()).get("y").tolist() == [0, 2, 4]
    assert time.monotonic() - since >= 0.5


@pytest.mark.parametrize("to", [1, 2, 4])
def test_futures_chain_over_groups_of_other_sizes(
    groups: dict[int, WorkerGroup], batch_of: BatchOf, to: int
) -> None:
    made = groups[4].role("probe").call(Probe.double_later, batch_of(5), seconds=0.2)
    assert isinstance(made, CallFuture)
    since = time.monotonic()
    chained = (
        groups[to]
        .role("probe")
        .call(Probe.apply, lambda data: DataProto.from_dict({"x": data.get("y") + 1}), made)
    )
    assert time.monotonic() - since >= 0.1
    assert groups[to].role("probe").fetch(chained).get("x").tolist() == [1, 3, 5, 7, 9]


def test_a_group_of_one_feeds_a_group_of_two(groups: dict[int, WorkerGroup], batch_of: BatchOf) -> None:
    made = groups[1].role("probe").call(Probe.double_later, batch_of(2))
    assert groups[2].role("probe").call(Probe.sum_of, made, key="y") == {"sum": metrics.summed(2.0)}


def test_columns_of_a_future_are_passed_on_alone(groups: dict[int, WorkerGroup], batch_of: BatchOf) -> None:
    one = groups[1].role("probe")
    made = groups[2].role("probe").call(Probe.double_later, batch_of(4))
    assert "y" in one.call(Probe.apply, _itself, made).keys()
    chosen = one.call(Probe.apply, _itself, made.columns("y"))
    assert list(chosen.keys()) == ["y"] and one.fetch(chosen).get("y").tolist() == [0, 2, 4, 6]


def _itself(data: DataProto) -> DataProto:
    return data


def test_a_future_of_metrics_is_no_batch(pair: RoleGroup, batch_of: BatchOf) -> None:
    future = pair.call(Probe.tokens_later, batch_of(4))
    assert metrics.values(future.get()) == {"tokens": 1 + 2 + 3 + 4}


def test_a_chain_never_passes_data_through_the_controller(
    runtime: Runtime, groups: dict[int, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MB are made and summed; the controller reads nothing of them, whatever Ray function it could read
    them with."""
    seen: list[object] = []
    get = ray.get
    monkeypatch.setattr(ray, "get", lambda refs, **options: seen.append(refs) or get(refs, **options))
    before = runtime.traffic()
    wide = groups[2].role("probe").call(Probe.big, DataProto.from_dict({"x": torch.arange(100)}), 50_000)
    later = wide.select_idxs(np.arange(99, -1, -1))
    total = groups[4].role("probe").call(Probe.sum_of, later, key="big")
    after = runtime.traffic()
    assert metrics.values(total) == {"sum": 100 * 50_000.0}
    assert after.total - before.total < 64 * 100
    columns = {column.ref for column in wide.columns["big"].refs}
    assert not [refs for refs in seen if columns & set(refs)]


def test_bytes_of_local_columns_are_counted_and_stored_once(
    runtime: Runtime, groups: dict[int, WorkerGroup]
) -> None:
    four = groups[4].role("probe")
    small, large = np.zeros(1000, np.uint8), np.zeros(10 * INLINE_LIMIT, np.uint8)
    for array, sent in ((small, 4 * 1000), (large, 10 * INLINE_LIMIT)):
        before = runtime.traffic().sent
        assert four.call(Probe.size_of, array) == [array.nbytes] * 4
        assert sent <= runtime.traffic().sent - before < sent + 4000
    batch = DataProto.from_dict({"x": torch.zeros(8, 100_000)})
    before = runtime.traffic().sent
    assert metrics.values(four.call(Probe.sum_of, batch, key="x")) == {"sum": 0.0}
    assert batch.get("x").nbytes <= runtime.traffic().sent - before < batch.get("x").nbytes + 4000


def test_fetching_counts_the_columns_that_were_read(runtime: Runtime, pair: RoleGroup) -> None:
    made = pair.call(Probe.big, DataProto.from_dict({"x": torch.arange(4)}), 1000)
    before = runtime.traffic().received
    assert runtime.fetch(made, ["big"]).get("big").sum() == 4000
    assert runtime.traffic().received - before == 4 * 1000 * 4


def test_a_column_is_freed_when_nobody_refers_to_it(pair: RoleGroup) -> None:
    before = _store_used_at_rest()
    made = pair.call(Probe.big, DataProto.from_dict({"x": torch.arange(4)}), 1_000_000)
    _until(lambda: _store_used() - before >= 15)
    del made
    _until(lambda: _store_used() - before < 1)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _store_used_at_rest() -> int:
    """Once what other tests have left is freed: the same for a second."""
    gc.collect()
    readings = [_store_used()]
    while len(readings) < 100 and len(set(readings[-10:])) + (len(readings) < 10) > 1:
        time.sleep(0.1)
        readings.append(_store_used())
    return readings[-1]


def _store_used() -> int:
    """MiB in the object store. What `ray memory --stats-only` prints; Ray has no public function for it."""
    return int(
        re.search(
            r"memory usage (\d+) MiB", memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
        )[1]
    )  # type: ignore[index]


def test_an_empty_call_is_cheap(pair: RoleGroup) -> None:
    times = []
    for _ in range(200):
        since = time.perf_counter()
        pair.call(Probe.nothing)
        times.append(time.perf_counter() - since)
    print(f"no-op call on 2 workers: median {1e3 * median(times):.2f} ms")
    # 2 to 3 ms on an idle machine; the bound only catches a mistake that makes every call wait for something.
    assert median(times) < 0.05


def test_an_answer_that_does_not_arrive_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node whose network is gone after it has answered; a network cannot be taken away here."""
    asked = []

    def get(refs: object, *, timeout: float) -> None:
        asked.append(timeout)
        raise ray.exceptions.GetTimeoutError("late")

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs, []))
    calls, group, ref = PendingCalls(Traffic(), Timeline(None)), GroupHandle(), object()
    deadline = time.monotonic() + 7.0
    calls.pending[ref] = PendingCall(  # type: ignore[index]
        group, "actor", 1, "there", "update", 7.0, deadline, {}, {}, None
    )
    with pytest.raises(
        WorkerError,
        match="actor rank 1 on node there failed in update: its answer is ready but does not arrive",
    ):
        calls.settle({1: ref})  # type: ignore[dict-item]
    assert asked == [7.0, FETCH] and group.error is not None


def test_a_limit_counts_the_call_and_not_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued behind a call of its process, or waiting for rows of another, or for a call that waits for
    them."""
    calls, now = PendingCalls(Traffic(), Timeline(None)), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sampler, scorer = object(), object()

    def pending(name: str, group: object, rank: int, *awaits: str) -> None:
        calls.pending[name] = PendingCall(  # type: ignore[index]
            group,
            "role",
            rank,
            "here",
            name,
            60.0,
            now + 60.0,
            {},
            {},
            None,
            frozenset(awaits),  # type: ignore[arg-type]
        )

    pending("samples", sampler, 0)
    pending("more samples", sampler, 0)
    pending("of another rank", sampler, 1)
    pending("scores", scorer, 0, "samples")
    pending("of the scores", scorer, 1, "scores")
    pending("alone", scorer, 2)
    pending("behind the scores", scorer, 0)
    pending("start", sampler, 0)
    calls.pending["start"] = replace(calls.pending["start"], renews=False)  # type: ignore[index]
    now = 150.0
    calls._renew("samples", calls.pending.pop("samples"))  # type: ignore[arg-type, call-overload]
    assert {call.method: call.deadline for call in calls.pending.values()} == {
        "more samples": 210.0,
        "of another rank": 160.0,
        "scores": 210.0,
        "of the scores": 210.0,
        "behind the scores": 210.0,
        "alone": 160.0,
        "start": 160.0,
    }


def test_a_call_may_wait_for_another_longer_than_its_limit(runtime: Runtime, pair: RoleGroup) -> None:
    limits = pair.group.channel.timeouts  # type: ignore[attr-defined]
    pair.group.channel.timeouts = replace(limits, call=4.0)  # type: ignore[attr-defined]
    try:
        naps = [pair.call(Probe.nap, 1.0) for _ in range(5)]
        assert [one.get() for one in naps] == [[None, None]] * 5
    finally:
        pair.group.channel.timeouts = limits  # type: ignore[attr-defined]


def test_a_late_call_is_reported_where_stacks_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def stacks(why: str) -> str:
        raise FileNotFoundError(2, "No such file or directory", "/run/stacks")

    monkeypatch.setattr(ray, "wait", lambda refs, **options: ([], refs))
    calls, group, ref = PendingCalls(Traffic(), Timeline(None)), GroupHandle(), object()
    calls.stacks = stacks
    calls.pending[ref] = PendingCall(  # type: ignore[index]
        group,
        "actor",
        0,
        "there",
        "update",
        0.1,
        time.monotonic(),
        {},
        {},
        None,  # type: ignore[arg-type]
    )
    with pytest.raises(
        WorkerError, match=r"no answer in 0.1 seconds; stacks .* they cannot be written: .*/run/stacks"
    ):
        calls.settle({0: ref})  # type: ignore[dict-item]
    assert isinstance(group.error, WorkerError) and not calls.pending


def test_the_call_that_others_wait_for_is_blamed_and_calls_are_sent_again_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a renewal has given them one deadline."""

    calls, rollout, reward = PendingCalls(Traffic(), Timeline(None)), GroupHandle(), GroupHandle()
    how = ("here", "call", 0.1, time.monotonic() + 0.1, {}, {}, None)

    def pending(name: str, group: GroupHandle, rank: int, *awaits: str) -> PendingCall:
        call = PendingCall(group, name, rank, *how, frozenset(awaits))  # type: ignore[arg-type]
        calls.pending[name] = call  # type: ignore[index]
        return call

    pending("first", rollout, 3)
    pending("weights", rollout, 3)
    pending("scores", reward, 0, "weights")
    samples = pending("samples", rollout, 3)
    calls._renew("first", calls.pending.pop("first"))  # type: ignore[arg-type, call-overload]
    assert len({call.deadline for call in calls.pending.values()}) == 1
    del calls.pending["samples"]  # type: ignore[arg-type]
    failure = Failure(samples.error("died"), 0.0, died=True)
    calls._died.append((samples, failure))
    calls._replace(samples, failure)
    assert [call.role for call in rollout.resent] == ["weights", "samples"]

    pending("weights", rollout, 3)
    pending("scores", reward, 0, "weights")
    monkeypatch.setattr(ray, "wait", lambda refs, **options: ([], refs))
    time.sleep(0.11)
    with pytest.raises(WorkerError, match="weights rank 3 on node here failed in call: no answer"):
        calls.settle({3: "weights"})  # type: ignore[dict-item]
    assert rollout.error is not None and reward.error is None
