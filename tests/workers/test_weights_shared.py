"""A transfer of weights on a node: bit by bit, at most two buckets ahead, and a process that dies, hangs or
refuses ends it for all at once, with nobody else harmed."""

from __future__ import annotations

import logging
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from workers.by_hand import process, rollout_spec

from hydraflow.models.adapters import SIDES
from hydraflow.weights.buckets import BucketOptions, FlatBucket, into_buckets
from hydraflow.weights.connection import Listener
from hydraflow.weights.slots import OpenSlots, Slots
from hydraflow.workers.rollout import RolloutWorker
from hydraflow.workers.weights_shared import SlotOutlet, sent_buckets
from hydraflow.workers.weights_transfer import Outgoing, Received, receive_all, send_all

CPU = torch.device("cpu")
WAIT = 60.0
WEIGHTS = {f"w{i}": torch.arange(1000 * i, 1000 * i + 250, dtype=torch.float32) for i in range(12)}
"""A kilobyte each: a bucket of two kilobytes has two."""
Take = Callable[[FlatBucket], str | None]


def outgoing(made: list[int] | None = None) -> Outgoing:
    """made: gets the number of each bucket."""
    for header, numbers in into_buckets(
        WEIGHTS.items(), BucketOptions(1, 2000, torch.float32, checked=False)
    ):
        assert header is not None
        if made is not None:
            made.append(header.number)
        yield header, numbers


def sent(
    slots: Slots, listener: Listener, ranks: int, seconds: float = WAIT, made: list[int] | None = None
) -> bool:
    with closing(SlotOutlet(slots, listener, range(ranks), seconds)) as outlet:
        return send_all(outgoing(made), outlet)


def received(place: str, rank: int, take: Take, seconds: float = WAIT) -> Received | None:
    with closing(sent_buckets(place, rank, "cpu", seconds, OpenSlots())) as buckets:
        return receive_all(buckets, take)


def nothing(bucket: FlatBucket) -> None:
    """Takes it."""


@contextmanager
def forked(work: Callable[[], bool]) -> Iterator[int]:
    """A process that does this; its exit code says whether it was true. One that a signal has stopped is
    killed at the end."""
    if not (pid := os.fork()):
        os._exit(0 if work() else 1)
    try:
        yield pid
    finally:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            _, status = os.waitpid(pid, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def test_every_bit_arrives_everywhere_and_no_slot_is_filled_while_somebody_reads_it() -> None:
    slots, made = Slots(CPU), list[int]()

    def read(place: str, rank: int) -> tuple[Received | None, dict[str, torch.Tensor]]:
        mine: dict[str, torch.Tensor] = {}

        def take(bucket: FlatBucket) -> str | None:
            time.sleep(0.003 * (bucket.header.number % 3))  # by turns faster and slower than the sender
            mine.update(
                (name, one.clone()) for name, one in bucket.weights() if isinstance(one, torch.Tensor)
            )
            assert made[-1] <= bucket.header.number + 2, "one is read, one waits, and one has been gathered"
            return f"bucket {bucket.header.number}" if bucket.header.number > 3 else None

        return received(place, rank, take), mine

    for _ in range(2):
        listener = Listener()
        made.clear()
        with ThreadPoolExecutor(2) as readers:
            reading = [readers.submit(read, listener.name, rank) for rank in range(2)]
            assert sent(slots, listener, 2, made=made)
        assert made == list(range(6))
        for answer, mine in (one.result() for one in reading):
            assert answer == Received("bucket 4") and mine.keys() == WEIGHTS.keys()
            assert all(torch.equal(mine[name], one) for name, one in WEIGHTS.items())


def test_each_side_has_two_buckets_in_memory_and_the_sender_only_the_tensors_of_the_next() -> None:
    """Measured: what is mapped, and which tensors of the stream are alive whenever the next one is made."""
    numbers = 2**16
    bucket, alive, most = 2 * 4 * numbers, list[weakref.ref[np.ndarray]](), 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(12):
            made = np.full(numbers, number, dtype=np.float32)
            alive.append(weakref.ref(made))
            most = max(most, sum(one() is not None for one in alive))
            yield f"w{number}", torch.from_numpy(made)
            del made

    def mapped() -> int:
        """Bytes of slots in this process's address space."""
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        ends = [line[0].split("-") for line in lines if "/memfd:hydraflow-weights" in line]
        return sum(int(end, 16) - int(start, 16) for start, end in ends)

    def receives(place: str) -> bool:
        seen: list[int] = []
        received(place, 0, lambda _: seen.append(mapped() - before))
        return seen == [bucket, *[2 * bucket] * 5]

    before, slots, listener = mapped(), Slots(CPU), Listener()
    options = BucketOptions(1, bucket, torch.float32, checked=False)
    with forked(lambda: receives(listener.name)) as reader:
        with closing(SlotOutlet(slots, listener, [0], WAIT)) as outlet:
            assert send_all(into_buckets(stream(), options), outlet)
        assert mapped() - before == 2 * bucket
        ended = os.waitid(os.P_PID, reader, os.WEXITED | os.WNOWAIT)
        assert ended is not None and ended.si_status == 0
    assert most == 3, "two fill a bucket, the third is the next one's first"


@pytest.mark.parametrize("end", ["killed", "refuses"])
def test_a_receiver_that_ends_ends_the_transfer_for_all_at_once(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(bucket: FlatBucket) -> None:
        if bucket.header.number == 1:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("it is not what was asked for")

    def refuses(place: str) -> bool:
        with pytest.raises(ValueError, match="it is not"):
            received(place, 1, fail)
        return True

    slots, listener, since = Slots(CPU), Listener(), time.monotonic()
    with forked(lambda: received(listener.name, 0, nothing) is None), forked(lambda: refuses(listener.name)):
        made: list[int] = []
        assert not sent(slots, listener, 2, made=made)
    assert made == list(range(6)), "all are made: other ranks take part in that"
    assert "weights did not arrive everywhere: generation rank 1 has ended" in caplog.text
    assert time.monotonic() - since < WAIT / 2
    again = Listener()
    with forked(lambda: received(again.name, 0, nothing) == Received(None)):
        assert sent(slots, again, 1)


def test_a_receiver_that_hangs_is_named_in_time(caplog: pytest.LogCaptureFixture) -> None:
    def stop(bucket: FlatBucket) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    slots, listener = Slots(CPU), Listener()
    with forked(lambda: received(listener.name, 0, stop) is None):
        assert not sent(slots, listener, 1, seconds=1.0)
    assert "generation rank 0 has not answered within 1 seconds" in caplog.text


def test_a_sender_that_dies_or_hangs_ends_it_for_the_receivers(caplog: pytest.LogCaptureFixture) -> None:
    for how, said in ((signal.SIGKILL, "has ended"), (signal.SIGSTOP, "has not answered within 2 seconds")):
        listener = Listener()

        def die(how: signal.Signals = how) -> Outgoing:
            for number, bucket in enumerate(outgoing()):
                if number == 3:
                    os.kill(os.getpid(), how)
                yield bucket

        def send(listener: Listener = listener, die: Callable[[], Outgoing] = die) -> bool:
            with closing(SlotOutlet(Slots(CPU), listener, [0], WAIT)) as outlet:
                return send_all(die(), outlet)

        caplog.set_level(logging.WARNING)
        with forked(send):
            listener.close()  # the other process has it
            assert received(listener.name, 0, nothing, seconds=2.0) is None
        assert f"the actor's rank 0 {said}" in caplog.text


def test_a_process_without_base_weights_takes_no_adapters(one_rank: None, tiny: str) -> None:
    """It took the place of one that had them, and the same call was made again."""
    adapters = {f"model.layers.0.self_attn.q_proj.{side}.weight": torch.ones(2, 8) for side in SIDES}
    worker = RolloutWorker(process(), rollout_spec(tiny))
    listener, slots = Listener(), Slots(CPU)
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(worker.read_weights, listener.name, False)
        with closing(SlotOutlet(slots, listener, [0], WAIT)) as outlet:
            assert not send_all(
                into_buckets(adapters.items(), BucketOptions(1, 2000, torch.float32, checked=False)), outlet
            )
        assert reading.result() is None and worker.version is None
