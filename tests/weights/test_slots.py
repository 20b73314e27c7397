"""Buckets in memory that processes share: bit by bit, in two slots that are opened once, with nothing left
behind a process that is killed."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraflow import device
from hydraflow.errors import EnvironmentFault, StoreFull
from hydraflow.weights import slots as module
from hydraflow.weights.buckets import BucketOptions, checksum_of, into_buckets
from hydraflow.weights.slots import DevicePlace, OpenSlots, SentBucket, Slots

CPU = torch.device("cpu")


def weights(seed: int, sizes: tuple[int, ...] = (40, 30, 20, 200)) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(size, generator=draw) for i, size in enumerate(sizes)}


def sent(slots: Slots, given: dict[str, torch.Tensor], max_bytes: int = 300) -> Iterator[SentBucket]:
    for header, numbers in into_buckets(
        given.items(), BucketOptions(1, max_bytes, torch.float32, checked=False)
    ):
        assert header is not None
        yield slots.put(header, numbers)


def sums(slots: OpenSlots, bucket: SentBucket) -> list[tuple[str, int, int]]:
    """Of each weight or part of one in a bucket: name, place of its first number, checksum."""
    found = []
    for name, one in slots.read(bucket).weights():
        whole = isinstance(one, torch.Tensor)
        found.append((name, 0, checksum_of(one)) if whole else (name, one.start, checksum_of(one.numbers)))
    return found


@dataclass
class Receiver:
    """A process that was made before the buckets."""

    pid: int
    line: Connection

    def ask(self, bucket: SentBucket) -> Any:
        self.line.send(bucket)
        return self.line.recv()


@contextmanager
def receiver() -> Iterator[Receiver]:
    mine, theirs = Pipe()
    pid = os.fork()
    if not pid:
        slots = OpenSlots()
        mine.close()  # so that the end of the test ends this process
        try:
            while True:
                found = sums(slots, theirs.recv())
                theirs.send((found, {number: id(tensor) for number, (_, tensor) in slots._open.items()}))
        except EOFError:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    theirs.close()
    yield Receiver(pid, mine)
    mine.close()
    os.waitpid(pid, 0)


def files(pid: int) -> int:
    """Slots that a process has open."""
    folder = f"/proc/{pid}/fd"
    found = [one for one in os.listdir(folder) if os.path.exists(f"{folder}/{one}")]
    links = [one for one in found if "hydraflow-weights" in os.readlink(f"{folder}/{one}")]
    return len({os.stat(f"{folder}/{one}").st_ino for one in links})


def mapped(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:hydraflow-weights")


def named(pid: int) -> list[str]:
    """Files of /dev/shm that a process has mapped: what has a name outlives a process that is killed."""
    maps = Path(f"/proc/{pid}/maps").read_text().split()
    return [path for path in maps if path.startswith("/dev/shm") and Path(path).exists()]


def test_every_bit_arrives_in_two_slots_that_are_opened_once() -> None:
    with receiver() as other:
        slots, opened = Slots(CPU), set()
        for seed in range(3):
            given, found = weights(seed), list[tuple[str, int, int]]()
            for bucket in sent(slots, given):
                some, tensors = other.ask(bucket)
                found += some
            opened.add(tuple(tensors.values()))
            parts = [("w0", 0, given["w0"]), ("w1", 0, given["w1"]), ("w2", 0, given["w2"])]
            parts += [("w3", start, given["w3"][start : start + 75]) for start in (0, 75, 150)]
            assert found == [(name, start, checksum_of(numbers)) for name, start, numbers in parts]
        assert len(opened) == 1 and len(*opened) == 2, "the same two tensors each time"
        assert files(os.getpid()) == 2 and mapped(other.pid) == 2
        larger = weights(4, (1000,))
        for bucket in sent(slots, larger, max_bytes=4000):
            assert other.ask(bucket)[0] == [("w0", 0, checksum_of(larger["w0"]))]
        assert files(os.getpid()) == 2 and mapped(other.pid) == 2
        assert named(os.getpid()) == named(other.pid) == []
        del slots, bucket
    assert files(os.getpid()) == 0


def test_a_receiver_that_is_killed_leaves_the_sender_unharmed() -> None:
    slots, given = Slots(CPU), weights(0)
    with receiver() as other:
        other.ask(next(sent(slots, given)))
        os.kill(other.pid, signal.SIGKILL)
    mine = OpenSlots()
    assert [name for bucket in sent(slots, given) for name, *_ in sums(mine, bucket)] == [
        *("w0", "w1", "w2"),
        *["w3"] * 3,
    ]


def test_a_sender_that_is_killed_leaves_nothing_behind() -> None:
    (mine, theirs), before = Pipe(), mapped(os.getpid())
    if not (pid := os.fork()):
        slots = Slots(CPU)  # stays until the process is killed
        theirs.send(next(sent(slots, weights(0))))
        signal.pause()
    bucket = mine.recv()
    reader = OpenSlots()
    assert sums(reader, bucket)[0] == ("w0", 0, checksum_of(weights(0)["w0"]))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert sums(reader, bucket)[0] == ("w0", 0, checksum_of(weights(0)["w0"])), "what is open stays"
    with pytest.raises(EnvironmentFault, match=f"cannot be read from /proc/{pid}/fd/.*is gone"):
        OpenSlots().read(bucket)
    del reader
    assert mapped(os.getpid()) == before


def test_a_lack_of_memory_is_an_error_that_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        StoreFull, match=r"no memory for .* 288 bytes \(No space left on device\).*_bucket_megabytes"
    ):
        next(sent(Slots(CPU), weights(0)))


def test_slots_of_a_device_are_lent_and_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what torch shares host memory with, in the place of CUDA's handles: all else is the same."""

    def lend(tensor: torch.Tensor) -> tuple[Any, ...]:
        return os.getpid(), *tensor.untyped_storage()._share_fd_cpu_()

    def borrow(lent: tuple[Any, ...]) -> torch.Tensor:
        pid, descriptor, nbytes = lent
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        storage = torch.UntypedStorage._new_shared_fd_cpu(opened, nbytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    monkeypatch.setattr(module, "lend", lend)
    monkeypatch.setattr(module, "borrow", borrow)
    with receiver() as other:
        slots = Slots(CPU)
        slots._slots += [module._DeviceSlot(CPU), module._DeviceSlot(CPU)]
        for seed in range(2):
            found, given = [], weights(seed)
            for bucket in sent(slots, given):
                assert isinstance(bucket.place, DevicePlace)
                found += other.ask(bucket)[0]
            assert found[:3] == [(name, 0, checksum_of(given[name])) for name in ("w0", "w1", "w2")]
        assert files(os.getpid()) == 0


def test_a_tensor_that_is_lent_names_its_device_in_words_that_hold_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The two calls of torch are replaced; which argument is the device is read from torch itself."""
    from torch.multiprocessing import reductions

    names = [*inspect.signature(reductions.rebuild_cuda_tensor).parameters]
    given = tuple(f"their {name}" for name in names)
    opened: list[tuple[Any, ...]] = []

    def rebuild(*facts: Any) -> torch.Tensor:
        opened.append(facts)
        return torch.zeros(1)

    rebuild.__signature__ = inspect.signature(reductions.rebuild_cuda_tensor)  # type: ignore[attr-defined]
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (rebuild, given))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(device, "device_identity", lambda where: f"identity of {where}")
    monkeypatch.setattr(device, "number_of", {"identity of cpu": 5}.get)
    lent = device.lend(torch.zeros(1))
    place = names.index("storage_device")
    assert lent[place] == "identity of cpu" and len(lent) == len(given)
    device.borrow(lent)
    assert opened[0][place] == 5
    assert [*opened[0][:place], *opened[0][place + 1 :]] == [*given[:place], *given[place + 1 :]]


def test_a_cpu_is_no_device_that_another_process_could_see() -> None:
    assert device.device_identity(CPU) == "" and device.number_of("") is None
