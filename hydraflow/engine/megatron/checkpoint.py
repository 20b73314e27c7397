"""Takes and loads checkpoints of a model that Megatron-Core divides.

In: this rank's part and its optimizer. Out: a `ShardedSnapshot`, or the state loaded from one. Every
parameter is cut into parts of Hugging Face tensors, and so are its moments. So a checkpoint looks like any
other engine's: it can be read with any parallel sizes, and merged in the same way. (Megatron-Core's own
format is bound to its sizes and names, and has to be unpickled.) Left out on purpose: files
(`engine/sharded_checkpoint.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hydraflow.engine.base import EXTRA, HF_MODEL, MODEL, OPTIMIZER
from hydraflow.engine.hf_files import first_rank_copy, hf_files_of
from hydraflow.engine.megatron import export
from hydraflow.engine.megatron.build import Built
from hydraflow.engine.megatron.names import Part
from hydraflow.engine.megatron.optimizer import SLOTS, STEP, WEIGHT, CoreOptimizer, is_expert, sharers
from hydraflow.engine.process_group import host_group, on_every_rank
from hydraflow.engine.sharded_checkpoint import (
    SCHEDULE_STEP,
    ShardedSnapshot,
    State,
    facts,
    open_checkpoint,
    read_into,
)
from hydraflow.models.config import ModelConfig
from hydraflow.models.heads import PolicyModel, ValueModel


@torch.no_grad()
def snapshot(
    built: Built,
    model: ModelConfig,
    optimizer: CoreOptimizer,
    step: int,
    contents: Collection[str],
    *,
    weights: Iterable[tuple[str, torch.Tensor]],
    head: str,
    field: str,
) -> ShardedSnapshot:
    """Copies the named `contents` to host memory. Collective. weights: the engine's stream to rank 0, for
    HF_MODEL."""
    host_group()  # created here, in step on all ranks; `write` runs in the background
    state, prefix = State(), _prefix(head)
    slots = [WEIGHT] * (MODEL in contents)
    slots += SLOTS if OPTIMIZER in contents and optimizer.has_moments() else ()
    for number, (name, (parameter, holding)) in enumerate(built.holdings().items()):
        rank, ranks = _writer(is_expert(parameter))
        mine = number % ranks == rank  # ranks that hold the same tensors share the writing
        for slot in slots:
            pieces = _pieces(built, name, optimizer.whole(parameter, slot))
            if mine:
                for part, piece in zip(holding.parts, pieces, strict=True):
                    copy = piece.to("cpu", copy=True).contiguous()
                    state[_key(prefix, part, slot)] = _sharded(part, copy)
        if SLOTS[0] in slots:
            steps = optimizer.steps(parameter)
            state |= {_key(prefix, part, STEP): steps.clone() for part in holding.parts if mine}
    if MODEL in contents and _writer(experts=False)[0] == 0:
        for buffer, holding in built.buffers().values():
            (part,) = holding.parts
            state[_key(prefix, part, WEIGHT)] = _sharded(part, buffer.to("cpu", copy=True))
    if EXTRA in contents:
        state[SCHEDULE_STEP] = torch.tensor(step)
    whole = first_rank_copy(weights) if HF_MODEL in contents else None
    about = facts(
        model,
        contents,
        engine="megatron",
        head=head,
        tied=built.names.shape.tied,
        dtype=torch.promote_types(built.trunk.config.params_dtype, torch.float32),
        prefix=prefix,
    )
    files = None
    if dist.get_rank() == 0:
        files = hf_files_of(export.empty_model(built, model, head), model, weights=whole is not None)
    return ShardedSnapshot(state, whole, files, about, field)


@torch.no_grad()
def load(
    built: Built, optimizer: CoreOptimizer, directory: Path, contents: Collection[str], *, head: str
) -> int | None:
    """Loads the named `contents` into model and optimizer; returns the schedule's step, None when `extra` is
    not among them."""
    prefix, holdings = _prefix(head), list(built.holdings(copies=True).values())
    parts = [part for _, holding in holdings for part in holding.parts]
    buffers = {holding.parts[0]: buffer for buffer, holding in built.buffers().values()}

    def empty(slot: str, parts: Collection[Part]) -> State:
        return {_key(prefix, part, slot): _sharded(part, torch.empty(_stored_shape(part))) for part in parts}

    wanted = State({SCHEDULE_STEP: torch.tensor(0)} if EXTRA in contents else {})
    wanted |= empty(WEIGHT, [*parts, *buffers]) if MODEL in contents else {}
    reader = on_every_rank(lambda: open_checkpoint(directory, wanted))
    has_moments = OPTIMIZER in contents and _key(prefix, parts[0], SLOTS[0]) in reader.index.tensors
    if has_moments:
        wanted |= {_key(prefix, part, STEP): torch.zeros(()) for part in parts}
        wanted |= {key: tensor for slot in SLOTS for key, tensor in empty(slot, parts).items()}
    read_into(wanted, reader, directory)
    if OPTIMIZER in contents:
        optimizer.make_moments(empty=not has_moments)
    slots = [*([WEIGHT] if MODEL in contents else []), *(SLOTS if has_moments else [])]
    for parameter, holding in holdings:
        for slot in slots:
            pieces = [_local(part, wanted[_key(prefix, part, slot)]) for part in holding.parts]
            optimizer.set_whole(parameter, slot, holding.join(pieces).to(parameter.device))
        if has_moments:
            optimizer.set_steps(parameter, wanted[_key(prefix, holding.parts[0], STEP)])
    for part, buffer in buffers.items() if MODEL in contents else ():
        buffer.copy_(_local(part, wanted[_key(prefix, part, WEIGHT)]))
    return int(wanted[SCHEDULE_STEP]) if EXTRA in contents else None


def stored_bytes(built: Built, contents: Collection[str]) -> int:
    """Bytes of this rank's part of a checkpoint, AdamW's two moments counted even before the first step."""
    numbers = 0.0
    for parameter, _ in built.holdings().values():
        numbers += parameter.numel() / dist.get_world_size(sharers(parameter))
    wide = torch.promote_types(built.trunk.config.params_dtype, torch.float32).itemsize
    copies = (MODEL in contents) + 2 * (OPTIMIZER in contents)
    whole = (HF_MODEL in contents) * built.trunk.config.params_dtype.itemsize
    return math.ceil(numbers * (wide * copies + whole))


def _key(prefix: str, part: Part, slot: str) -> str:
    if slot == WEIGHT:
        return f"model.{prefix}{part.name}"
    return f"optim.{prefix}{part.name}.{slot}"


def _prefix(head: str) -> str:
    return PolicyModel.prefix if head == "policy" else ValueModel.prefix


def _writer(experts: bool) -> tuple[int, int]:
    """This rank's index among the ranks that hold the same tensors, and their number. `_pieces` puts the
    slices of an expert together, so the ranks that share an expert count as holding the same."""
    if not experts:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return group.rank(), group.size()
    slices = parallel_state.get_expert_tensor_parallel_world_size()
    data = parallel_state.get_expert_data_parallel_rank()
    rank = data * slices + parallel_state.get_expert_tensor_parallel_rank()
    return rank, slices * parallel_state.get_expert_data_parallel_world_size()


def _pieces(built: Built, name: str, local: torch.Tensor) -> Sequence[torch.Tensor]:
    """This rank's parts of a parameter; for experts all slices, which the ranks that share the experts
    exchange."""
    holding = built.names.holding(name)
    if holding.parts[0].slice is None:
        return holding.cut(local)
    found = [torch.empty_like(local) for _ in range(built.names.slices)]
    dist.all_gather(found, local.contiguous(), group=parallel_state.get_expert_tensor_parallel_group())
    whole = local.new_empty(_stored_shape(holding.parts[0]))
    for names, slice in zip(built.names.of_slices(), found, strict=True):
        of_rank = names.holding(name)
        assert of_rank.parts[0].slice is not None
        of_rank.parts[0].slice.of(whole).copy_(of_rank.cut(slice)[0])
    return (whole,)


def _sharded(part: Part, local: torch.Tensor) -> torch.Tensor:
    """A Hugging Face tensor, in host memory, of which this rank has a part: of a matrix shared by
    tensor-parallel ranks, or of the experts shared by expert-parallel ranks."""
    group = (
        parallel_state.get_tensor_model_parallel_group()
        if part.slice is None
        else parallel_state.get_expert_model_parallel_group()
    )
    placement = Replicate() if part.dim is None else Shard(part.dim)
    whole = torch.empty(part.shape, device="meta")
    return DTensor.from_local(
        local, _mesh(group), [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )


@lru_cache(maxsize=2)
def _mesh(group: dist.ProcessGroup) -> DeviceMesh:
    """Mesh of the ranks that have parts of a tensor. Cached, because creating one takes longer than copying a
    small tensor; there are two such groups."""
    return DeviceMesh.from_group(group, "cpu")


def _stored_shape(part: Part) -> list[int]:
    """The shape in which a part is stored."""
    shape = list(part.shape)
    if part.dim is not None:
        shape[part.dim] = part.size
    return shape


def _local(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    local = tensor.to_local()
    return local if part.slice is None else part.slice.of(local)
