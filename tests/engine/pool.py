"""Gloo ranks in processes that live for a file of tests, forked from one that has imported the libraries: the
imports are what costs."""

from __future__ import annotations

import gc
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from by_bytes import packed

from hydraflow.engine import process_group

PRELOADED = [
    "engine.no_garbage",  # the first
    "hydraflow.workers.actor",
    "hydraflow.workers.critic",
    "hydraflow.engine.fsdp.engine",
    "hydraflow.engine.megatron.engine",
    "engine.oom_jobs",
    "engine.megatron_moe_jobs",
    "peft.tuners",
    "numpy.ma",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.export._trace",
    "torch.nested._internal.ops",
    "torch.nested._internal.sdpa",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]
"""Modules that import what ranks need, also what libraries import at their first use."""


def serve(
    rank: int, size: int, port: int, listener: socket.socket | None, device_type: str, pipe: Connection
) -> None:
    """A rank: runs what it receives until it receives nothing. listener: rank 0's, bound to the port."""
    gc.freeze()  # a rank that looked for garbage in what was imported would copy it
    gc.set_threshold(20_000, 20, 20)  # what a job leaves is small
    gc.enable()
    torch.set_num_threads(1)
    process_group.start(
        rank=rank,
        world_size=size,
        address="127.0.0.1",
        port=port,
        device_type=device_type,
        timeout_s=120,
        listen_fd=listener.detach() if listener else None,
    )
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            answer = packed((True, function(*args)))
        except Exception:  # the test that asked must see it
            answer = packed((False, traceback.format_exc()))
        pipe.send_bytes(answer)
    process_group.stop()


class Ranks:
    """Ranks, two by default, that run functions of `rank_jobs`."""

    def __init__(self, size: int = 2, device_type: str = "cpu") -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [mine for mine, _ in pairs]
        # Bound until rank 0 has it: a port that is only known to be free is soon another test's.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self.processes = [
                context.Process(
                    target=serve,
                    args=(rank, size, port, None if rank else listener, device_type, theirs),
                    daemon=True,
                )
                for rank, (_, theirs) in enumerate(pairs)
            ]
            for process in self.processes:
                process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returns."""
        job = packed((function, args))
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True)):
            assert process.is_alive(), f"rank {rank} is gone, exit code {process.exitcode}"
            pipe.send_bytes(job)
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(150), f"rank {rank} did not answer"
            answers.append(pipe.recv())
        broken = [answer for fine, answer in answers if not fine]
        assert not broken, broken[0]
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(20)


@contextmanager
def started(sizes: Sequence[int]) -> Iterator[dict[int, Ranks]]:
    """That many ranks each, which are ended without leaving their groups: of many layouts, that takes
    seconds."""
    made = {size: Ranks(size) for size in sizes}
    yield made
    for process in (process for pool in made.values() for process in pool.processes):
        process.terminate()
        process.join(20)
