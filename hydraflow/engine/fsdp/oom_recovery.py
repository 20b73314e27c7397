"""Keeps a rank in step with the others when its memory runs out in the middle of a forward or backward pass.

FSDP gathers weights and sums gradients in collectives that all ranks run in the same order. A rank whose pass
was interrupted still has to take part in the remaining ones. It does so in a second pass over a few tokens,
which skips the collectives that were already run; its result is discarded. Then all ranks drop the call and
retry with smaller micro-batches.

With Ulysses, the size of a collective depends on the micro-batch: there the rank sends zeros of the size that
the others expect (`engine/token_exchange.py`).

In: passes, as functions of a micro-batch. Out: their results, and whether any rank ran out of memory, the
same on all ranks. Left out on purpose: which micro-batches are tried next (`engine/micro_batcher.py`).

With several copies of the model (HSDP), each copy is sharded on a mesh of its own ranks, and a hook of FSDP
sums gradients over copies. FSDP's built-in all-reduce, on a mesh of all ranks, could not be skipped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from hydraflow.device import ran_out_of_memory
from hydraflow.engine.base import OutOfMemory
from hydraflow.engine.oom_reports import note_out_of_memory, reports_of
from hydraflow.engine.process_group import add_parts, gather_parts, room_to_add
from hydraflow.models.packing import read_tokens
from hydraflow.models.routing import ROUTES
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

Result = TypeVar("Result")

FEW_TOKENS = 2
"""Tokens of the prompt, and of the response, of the dummy row in the repeated pass."""


class CollectiveCounter:
    """The collectives that a sharded model makes, counted pass by pass.

    replicas: the ranks with the same shard, over which gradients are also summed; None: there is one copy of
    the model.
    """

    def __init__(self, module: nn.Module, device: torch.device, replicas: dist.ProcessGroup | None):
        assert isinstance(module, FSDPModule)
        self._module, self._device = module, device
        self._made = self._to_skip = 0
        self._repeats = False
        self._gathers: list[_Gather] = []
        self.stands_in_for: DataProto | None = None
        """The micro-batch that the other ranks expect this rank to compute."""
        for unit, owner, name in _units(module):
            self._gathers.append(_Gather(self, owner, name))
            unit.set_custom_all_gather(self._gathers[-1])
            unit.set_custom_reduce_scatter(_Reduce(self))
            if replicas is not None:
                unit.set_all_reduce_hook(_ReplicaSum(self, replicas))

    def begin(self) -> None:
        """Resets the count of collectives; call it before each pass, because an error may have ended the one
        before in any state."""
        self._made = self._to_skip = 0
        self._repeats, self.stands_in_for = False, None
        for gather in self._gathers:
            gather.note_gathered()

    def catch_up(self, again: Callable[[], object]) -> None:
        """Repeats an interrupted pass for its remaining collectives; `again` runs it on a few tokens."""
        self._module.reset_iter_state()
        gc.collect()  # the error's frames keep the pass's tensors alive
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()
        self._to_skip, self._repeats = self._made, True
        again()
        self._repeats = False
        assert self._to_skip == 0, "a pass over fewer tokens runs the same collectives"

    def is_due(self, gather: _Gather | None = None) -> bool:
        """Whether to make a collective: in a repeated pass, only if the first one had not made it."""
        if self._repeats and gather is not None and gather.had_weights:
            gather.had_weights = False  # the other ranks still hold these weights gathered, as this rank did
            return False
        if self._to_skip:
            self._to_skip -= 1
            return False
        self._made += 1
        return True


class PassRunner(Generic[Result]):
    """Runs the passes of one call. Once memory has run out in one, this rank only takes part in the remaining
    collectives."""

    def __init__(self, collectives: CollectiveCounter):
        self._collectives = collectives
        self._too_large: DataProto | None = None
        self._results: list[Result] = []

    def run(self, data: DataProto, work: Callable[[DataProto], Result]) -> None:
        """Runs one pass, `work(data)`."""
        if self._too_large is not None:
            self._stand_in(data, work)
            return
        self._collectives.begin()
        try:
            self._results.append(work(data))
            return
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            note_out_of_memory(data, error)
        self._too_large = data
        self._results.clear()
        self._collectives.catch_up(lambda: self._stand_in(data, work))

    def _stand_in(self, data: DataProto, work: Callable[[DataProto], Result]) -> None:
        self._collectives.stands_in_for = data
        work(_few_tokens(data))
        self._collectives.stands_in_for = None

    def ran_out(self) -> float:
        """1 when memory has run out on this rank, else 0."""
        return float(self._too_large is not None)

    def results(self, oom_ranks: float) -> list[Result]:
        """The results of the passes. Raises OutOfMemory when `oom_ranks`, the sum of `ran_out` over ranks,
        is not 0."""
        if oom_ranks:
            raise OutOfMemory(reports_of(self._too_large))
        return self._results


class _Gather(DefaultAllGather):
    """FSDP's all-gather of one unit's weights, of which (`owner`, `name`) is one."""

    def __init__(self, collectives: CollectiveCounter, owner: nn.Module, name: str):
        self._collectives, self._owner, self._name = collectives, owner, name
        self.had_weights = False
        """Whether the unit's weights were already gathered when the pass started."""

    def note_gathered(self) -> None:
        self.had_weights = not isinstance(getattr(self._owner, self._name), DTensor)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self._collectives.is_due(self):
            output_tensor.zero_()
            return None
        if output_tensor.device.type != "cpu":
            return super().__call__(output_tensor, input_tensor, group, async_op)
        gather_parts(output_tensor, input_tensor, group)
        return None


class _Reduce(DefaultReduceScatter):
    """FSDP's reduce-scatter of one unit's gradients. gloo's would send all sums to every rank; on a CPU ranks
    exchange their parts instead, and each adds up its own in the order of ranks."""

    def __init__(self, collectives: CollectiveCounter):
        self._collectives = collectives

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, *args: Any
    ) -> Any:
        on_cpu = input_tensor.device.type == "cpu"
        sent = input_tensor.view(group.size(), -1)
        received = room_to_add(sent, group) if on_cpu else None  # before the collective is counted
        if not self._collectives.is_due():
            output_tensor.zero_()
            return None
        if not on_cpu:
            return super().__call__(output_tensor, input_tensor, group, op, *args)
        assert op == dist.ReduceOp.SUM
        add_parts(output_tensor, sent, group, received)
        return None


class _ReplicaSum:
    """Sums one unit's gradients over the copies of the model, after the reduce-scatter within each copy."""

    def __init__(self, collectives: CollectiveCounter, replicas: dist.ProcessGroup):
        self._collectives, self._replicas = collectives, replicas

    def __call__(self, reduced: torch.Tensor) -> None:
        if not self._collectives.is_due():
            return
        if reduced.device.type != "cpu":
            # allocated on the reduce-scatter's stream, which may reuse it only after this stream is done
            reduced.record_stream(torch.get_device_module(reduced.device).current_stream())
        dist.all_reduce(reduced, group=self._replicas)


def _units(module: nn.Module) -> Iterator[tuple[FSDPModule, nn.Module, str]]:
    """FSDP units: the sharded module, and one of its parameters as (owner module, name)."""
    for part in module.modules():
        if isinstance(part, FSDPModule) and (found := next(_own_parameters(part), None)):
            yield part, *found


def _own_parameters(part: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Parameters below `part`, without those of sharded modules below it."""
    for name, _ in part.named_parameters(recurse=False):
        yield part, name
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


def _few_tokens(data: DataProto) -> DataProto:
    """A dummy row: the start of the first row."""
    columns = {name: column for name, column in data.items() if isinstance(column, torch.Tensor)}
    routes = columns.pop(ROUTES, None)
    few = DataProto.from_dict({name: _first_cells(column) for name, column in columns.items()})
    if routes is None:
        return few
    return few.with_columns({ROUTES: ragged.from_rows([ragged.rows(routes)[0][: int(read_tokens(few))]])})


def _first_cells(column: torch.Tensor) -> torch.Tensor:
    return ragged.from_rows([ragged.rows(column)[0][:FEW_TOKENS]]) if ragged.is_ragged(column) else column[:1]
