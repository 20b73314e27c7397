"""A vLLM engine whose model is divided among the processes of an existing group.

In: the process's rank. Out: the executor class of its engine. vLLM would start a process per device; here
each process has its own engine, with a part of every layer (tensor parallelism), some of the layers (a
pipeline stage), or both. All get the same calls and schedule alike; only the last stage samples, and sends
what it sampled to the others. While it computes one batch, earlier stages compute the next, if there are
requests for it. Left out on purpose: shared memory between processes, which killed ones would leave behind.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any


def executor_in_group(rank: int) -> Any:
    """The executor class of one process. rank: among the engine's processes, stage by stage."""
    from vllm.distributed import get_pp_group, get_world_group
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class ExecutorInGroup(UniProcExecutor):
        supports_pp = True
        _sent: deque[Any]
        """On the last stage: sends of the latest batches, which hold what is being sent."""

        def _init_executor(self) -> None:
            # no broadcast queue: all engines get the same calls
            make = MessageQueue.create_from_process_group
            MessageQueue.create_from_process_group = lambda *args, **kwargs: None
            try:
                super()._init_executor()
            finally:
                MessageQueue.create_from_process_group = make
            self._sent = deque()

        def _distributed_args(self) -> tuple[str, int, int]:
            # on a CPU, ranks with the same name would share memory; local rank 0 because each process sees
            # one device
            return f"file://rank{rank}", rank, 0

        def get_kv_cache_specs(self) -> list[Any]:
            """All processes' specifications: each derives the same number of blocks from them."""
            return of_all(super().get_kv_cache_specs())

        def determine_available_memory(self) -> list[int]:
            """Bytes for the cache, of all processes."""
            return of_all(super().determine_available_memory())

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            super().initialize_from_config([kv_cache_configs[rank]])

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            """What the last stage has sampled. Earlier ones receive it when the result is needed, not before
            they have started the next batch."""
            stages = get_pp_group()
            if stages.world_size == 1:
                return super().sample_tokens(grammar_output, non_block)
            sampled = super().sample_tokens(grammar_output)
            future: Future[Any] = _Sampled(stages)
            if stages.is_last_rank:
                self._send(sampled)
                future.set_result(sampled)
            return future if non_block else future.result()

        def _send(self, sampled: Any) -> None:
            stages = get_pp_group()
            # earlier stages have received a batch's result before they begin the batch `world_size` later
            others = range(stages.world_size - 1)
            while len(self._sent) >= len(others) * stages.world_size:
                self._sent.popleft().wait()
            self._sent.extend(stages.isend_object(sampled, dst=stage) for stage in others)

    def of_all(mine: list[Any]) -> list[Any]:
        """The one entry of each process, in the order of ranks. Collective."""
        world = get_world_group()
        return [world.broadcast_object(*mine, src=other) for other in range(world.world_size)]

    return ExecutorInGroup


class _Sampled(Future[Any]):
    """What the last stage has sampled; waits for it when asked."""

    def __init__(self, stages: Any):
        super().__init__()
        self._stages = stages

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._stages.recv_object(src=self._stages.world_size - 1))
        return super().result()
