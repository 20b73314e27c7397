"""Workers that show what reached them, for tests with real processes."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hydraflow import metrics
from hydraflow.dispatch.host import WorkerHost
from hydraflow.dispatch.modes import (
    Dispatch,
    Execute,
    mesh_mode,
    register,
    register_dispatch_mode,
)
from hydraflow.dispatch.shards import split
from hydraflow.dispatch.worker import ProcessContext, Worker
from hydraflow.errors import ConfigError
from hydraflow.metrics import Metric
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates


def _reverse(context: Any, *args: Any) -> Any:
    """Rows in parts, the last part to rank 0."""
    return [split(value, context.world_size)[::-1] for value in args], {}


def _sum(context: Any, answers: list[int]) -> int:
    return sum(answers)


REVERSE_AND_SUM = f"{__name__}.reverse_and_sum"
register_dispatch_mode(REVERSE_AND_SUM, _reverse, _sum)


class Probe(Worker):
    """One method for each mode."""

    def __init__(self, process: ProcessContext, offset: int = 0):
        super().__init__(process)
        self.offset, self.calls_over = offset, 0

    def after_call(self) -> None:
        self.calls_over += 1

    @register(Dispatch.DP_COMPUTE_PROTO)
    def none_of(self, data: DataProto) -> DataProto:
        return data[:0]

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def count_calls_over(self) -> int:
        return self.calls_over

    def mesh_coordinates(self, mesh: str) -> Coordinates:
        """A 2 x 2 x 2 mesh in Megatron's order: tensor rank fastest, then data, then pipeline; collected from
        the last stage."""
        if mesh == "flat":
            return super().mesh_coordinates(mesh)
        rank = self.process.rank
        tensor, data, pipeline = rank % 2, rank // 2 % 2, rank // 4
        return Coordinates(data, 2, tensor == 0 and pipeline == 1)

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> dict[str, Any]:
        process = self.process
        return {
            "rank": process.rank, "world": process.world_size, "local": process.local_rank,
            "node": process.node, "roles": list(process.roles), "pid": os.getpid(),
            "master": (process.master_addr, process.master_port), "timeout": process.timeout_s,
            "threads": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS"),
        }  # fmt: skip

    @register(Dispatch.ONE_TO_ALL)
    def new_pages(self) -> int:
        """Pages that the system gives this process for ten tensors of 64 MiB, one after the other."""
        for count in (10, 10):  # the first ten may need new ones
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(count):
                torch.ones(2**24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    @register(Dispatch.ONE_TO_ALL)
    def peer_offset(self, role: str) -> int:
        return self.process.roles[role].offset  # type: ignore[attr-defined]

    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, x: int) -> tuple[int, int]:
        return self.process.rank, x + self.offset

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def executed_on_zero(self, x: int) -> tuple[int, int]:
        return self.process.rank, x

    @register(Dispatch.ONE_TO_ALL)
    def one_to_all(self, x: int, *, y: int) -> tuple[int, int, int]:
        return self.process.rank, x, y

    @register(Dispatch.ONE_TO_ALL)
    def rows_seen(self, data: DataProto) -> int:
        return len(data)

    @register(Dispatch.ALL_TO_ALL)
    def all_to_all(self, dealt: Any, same: Any) -> tuple[int, Any, Any]:
        return self.process.rank, dealt, same

    @register(Dispatch.DP_COMPUTE)
    def dp_compute(self, x: int) -> int:
        return 10 * self.process.rank + x

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto, factor: int = 2) -> DataProto:
        return _scaled(data, factor, self.process.rank)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double_later(self, data: DataProto, seconds: float = 0.0) -> DataProto:
        time.sleep(seconds)
        return _scaled(data, 2, self.process.rank)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def samples(self, data: DataProto, n: int) -> DataProto:
        return _scaled(data, 2, self.process.rank).repeat(n)

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[DataProto], DataProto], data: DataProto) -> DataProto:
        return function(data)

    @register(Dispatch.DP_COMPUTE_METRIC, padding=False)
    def measure(self, data: DataProto) -> dict[str, Metric]:
        x = data.get("x")
        return {
            "x/mean": metrics.mean(float(x.float().mean()), weight=len(x)),
            "x/max": metrics.maximum(float(x.max())),
        }

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def tokens_later(self, data: DataProto) -> dict[str, Metric]:
        return {"tokens": metrics.summed(float(ragged.lengths(data.get("ids")).sum()))}

    @register(Dispatch.MEGATRON_COMPUTE)
    def megatron(self, x: int) -> tuple[int, int]:
        return self.process.rank, x

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def megatron_rows(self, data: DataProto) -> DataProto:
        return _scaled(data, 1, self.process.rank)

    @register(mesh_mode("train"), blocking=False)
    def mesh_rows(self, data: DataProto) -> DataProto:
        return _scaled(data, 1, self.process.rank)

    @register(mesh_mode("train"))
    def mesh_metrics(self, data: DataProto) -> dict[str, Metric]:
        return {"x": metrics.summed(float(data.get("x").sum()))}

    @register(mesh_mode("flat"))
    def flat_rows(self, data: DataProto) -> DataProto:
        return _scaled(data, 1, self.process.rank)

    @register(REVERSE_AND_SUM)
    def user_mode(self, data: DataProto) -> int:
        return 10**self.process.rank * int(data.get("x").sum())

    @register(Dispatch.DP_COMPUTE_PROTO)
    def spoil(self, data: DataProto) -> DataProto:
        data.get("x").add_(100)
        return data

    @register(Dispatch.DP_COMPUTE_METRIC, read_only=True)
    def shared_when_read_only(self, data: DataProto) -> dict[str, Metric]:
        return {"shared": metrics.summed(float(_in_object_store(data.get("big"))))}

    @register(Dispatch.DP_COMPUTE_METRIC)
    def shared_otherwise(self, data: DataProto) -> dict[str, Metric]:
        return {"shared": metrics.summed(float(_in_object_store(data.get("big"))))}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def big(self, data: DataProto, width: int) -> DataProto:
        return DataProto.from_dict({"big": torch.ones(len(data), width)})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def sum_of(self, data: DataProto, key: str) -> dict[str, Metric]:
        return {"sum": metrics.summed(float(data.get(key).sum()))}

    @register(Dispatch.ONE_TO_ALL)
    def size_of(self, array: np.ndarray) -> int:
        return array.nbytes

    @register(Dispatch.DP_COMPUTE_PROTO)
    def not_a_batch(self, data: DataProto) -> Any:
        return 3

    def undeclared(self) -> None: ...


def _scaled(data: DataProto, factor: int, rank: int) -> DataProto:
    by = np.array([f"rank{rank}"] * len(data), dtype=object)
    tensors = {"y": data.get("x") * factor}
    if "ids" in list(data.keys()):
        tensors["ids2"] = data.get("ids") * factor
    return DataProto.from_dict(tensors, {"by": by}, {"factor": factor})


def _in_object_store(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= address < high:
            return "plasma" in line or "/dev/shm" in line
    return False


class Troubled(Worker):
    """Fails in every way."""

    @register(Dispatch.ONE_TO_ALL)
    def pids(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def join_collective(self) -> int:
        at = self.process
        store = torch.distributed.TCPStore(
            at.master_addr, at.master_port, at.world_size, at.rank == 0, master_listen_fd=at.listen_fd
        )
        torch.distributed.init_process_group("gloo", store=store, rank=at.rank, world_size=at.world_size)
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones)
        return int(ones)

    @register(Dispatch.ONE_TO_ALL)
    def fail_before_collective(self, rank: int) -> None:
        logging.getLogger("probe").info("about to reduce on rank %d", self.process.rank)
        if self.process.rank == rank:
            raise ZeroDivisionError(f"bad number on rank {rank}")
        torch.distributed.all_reduce(torch.ones(1))

    @register(Dispatch.ONE_TO_ALL)
    def die_before_collective(self, rank: int) -> None:
        if self.process.rank == rank:
            print("the last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(1))

    @register(Dispatch.ONE_TO_ALL)
    def die_after_connections_broke(self, rank: int, seconds: float) -> None:
        if self.process.rank != rank:
            raise RuntimeError("pair.cc:537] Read error: Connection reset by peer")
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    @register(Dispatch.ONE_TO_ALL)
    def sleep_on(self, rank: int, seconds: float) -> None:
        if self.process.rank == rank:
            time.sleep(seconds)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def broken_batch(self, data: DataProto) -> DataProto:
        raise Unpicklable(f"no batch from rank {self.process.rank}")

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def dying_batch(self, data: DataProto) -> DataProto:
        if self.process.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return data

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def wait_for_ever(self) -> None:
        time.sleep(600)


class Unpicklable(Exception):
    """An error that cannot be sent."""

    def __init__(self, message: str):
        super().__init__(message)
        self.handle = open(os.devnull)  # noqa: SIM115


class Unbuildable(Worker):
    """Its constructor fails on the last rank."""

    def __init__(self, process: ProcessContext):
        super().__init__(process)
        if process.rank == process.world_size - 1:
            raise FileNotFoundError("no model at /nowhere")


class Unstartable(WorkerHost):
    """A process that lacks a library."""

    def __init__(self, *args: Any):
        raise ImportError("no such library")


class Misconfigured(Worker):
    """Its constructor finds a mistake of the user's on every rank, on the last rank first."""

    def __init__(self, process: ProcessContext):
        super().__init__(process)
        time.sleep(0.2 * (process.world_size - process.rank))
        raise ConfigError.one(
            "model.path", f"/nowhere/{process.rank}", "there is no such directory", "model.path=<directory>"
        )


class Described(Worker):
    """Tells what is around it."""

    @register(Dispatch.ONE_TO_ALL)
    def surroundings(self) -> dict[str, str]:
        try:
            socket.create_server(("", self.process.master_port)).close()
            port = "free"
        except OSError:
            port = "held"
        return {**os.environ, "port": port, "scripting": str(torch.jit._state._enabled.enabled)}
