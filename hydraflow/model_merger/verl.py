"""Reads verl's FSDP checkpoints: model_world_size_W_rank_R.pt, fsdp_config.json, huggingface/.

In: a model's directory. Out: a `Checkpoint`. Each file is a state dict of DTensors cut along one dimension of
a mesh `fsdp` or `ddp x fsdp`, or of plain tensors (world size 1, buffers). Files are read with weights_only,
and only their structure: numbers stay on disk, and the types of torch.distributed become inert records. Left
out on purpose: optimizer and extra state, which are counted but not read; tensor-parallel meshes.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hydraflow.engine.inert import InertRecord, record_type
from hydraflow.engine.stored.checkpoint import Checkpoint, read_json
from hydraflow.engine.stored.pieces import UNREADABLE, Piece, StoredTensor, numbers_of, odd_strides, same
from hydraflow.errors import ConfigError, Problem

CONFIG = "fsdp_config.json"
LORA = "lora_train_meta.json"
_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_ZIP = b"PK\x03\x04"
_MESHES = (("fsdp",), ("ddp", "fsdp"))


class ShardedTensor(torch.Tensor):
    """A rank's part of a tensor: shape and type of the whole, the part itself, and how the whole was cut."""

    _local_tensor: torch.Tensor
    _spec: InertRecord

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Nothing can be computed with it."""
        raise AssertionError(f"{func} on a tensor that is only described")


_TYPES: list[Any] = [
    (ShardedTensor, "torch.distributed.tensor.DTensor"),
    *(
        (record_type(name.rpartition(".")[2]), f"torch.distributed.{name}")
        for name in (
            "_mesh_layout._FlatLayout",
            "_mesh_layout._MeshLayout",
            "device_mesh.DeviceMesh",
            "tensor._dtensor_spec.DTensorSpec",
            "tensor._dtensor_spec.ShardOrderEntry",
            "tensor._dtensor_spec.TensorMeta",
            "tensor.placement_types.Partial",
            "tensor.placement_types.Replicate",
            "tensor.placement_types.Shard",
            "tensor.placement_types._StridedShard",
        )
    ),
]
"""Stand-ins for the types that a shard names."""

StateDict = Mapping[str, torch.Tensor]


def file_of(world_size: int, rank: int, part: str = "model") -> str:
    """Name of a rank's file."""
    return f"{part}_world_size_{world_size}_rank_{rank}.pt"


def is_verl(directory: Path) -> bool:
    """Whether a directory is one model's checkpoint of this layout (or should be: its shards may be lost)."""
    return directory.is_dir() and (
        (directory / CONFIG).is_file() or any(_FILE.fullmatch(entry.name) for entry in directory.iterdir())
    )


def read(directory: Path) -> Checkpoint:
    """The checkpoint in `directory`. Raises ConfigError when no shard can be read, or shards do not belong
    together."""
    config = read_json(directory / CONFIG)
    world_size = _world_size(directory, config.pop("world_size", None))
    states, problems = _read_ranks(directory, world_size)
    if not states:
        raise ConfigError(problems)
    mesh = _mesh(directory, states, world_size)
    tensors: dict[str, StoredTensor] = {}
    if not problems:
        _require_same_names(directory, states)
        tensors = {name: _tensor(name, directory, states, replicated=len(mesh) > 1) for name in states[0]}
    lora = read_json(directory / LORA)
    holes = [Problem(str(directory), None, hole) for tensor in tensors.values() if (hole := tensor.holes())]
    return Checkpoint(
        directory,
        "verl",
        world_size,
        tensors,
        prefix="",
        lora_alpha=lora.get("lora_alpha"),
        details={"mesh": " x ".join(mesh), **config, **({"lora": lora} if lora else {})},
        others=_others(directory, world_size),
        problems=problems + holes,
    )


def _world_size(directory: Path, recorded: Any) -> int:
    """Number of ranks according to the file names; that of fsdp_config.json must be among them."""
    named = {int(found[1]) for entry in directory.iterdir() if (found := _FILE.fullmatch(entry.name))}
    if recorded is None and len(named) > 1:
        sizes = " and ".join(map(str, sorted(named)))
        rule = f"holds shards of {sizes} ranks, but no {CONFIG} says which to use"
        raise ConfigError.one(str(directory), None, rule)
    if not named:
        rule = f"all shards are missing: there is no {file_of(recorded or 1, 0)}"
        raise ConfigError.one(str(directory), None, rule)
    if recorded is not None and recorded not in named:
        sizes = ", ".join(map(str, sorted(named)))
        rule = f"does not fit the shards beside it, which are those of {sizes} ranks"
        raise ConfigError.one(f"{directory / CONFIG}: world_size", recorded, rule)
    return int(recorded) if recorded is not None else named.pop()


def _read_ranks(directory: Path, world_size: int) -> tuple[dict[int, StateDict], list[Problem]]:
    states: dict[int, StateDict] = {}
    problems = []
    for rank in range(world_size):
        try:
            states[rank] = _read_rank(directory / file_of(world_size, rank))
        except ConfigError as error:
            problems += error.problems
    return states, problems


def _read_rank(file: Path) -> StateDict:
    if not file.is_file():
        raise ConfigError.one(str(file), None, "this shard is missing")
    with file.open("rb") as opened:
        if opened.read(4) != _ZIP:
            rule = "is truncated, or not a shard of a model: it does not start as torch.save's files do"
            raise ConfigError.one(str(file), None, rule)
    try:
        with _inert_types():
            state = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = "holds what weights_only refuses, so it is not a model's shard; nothing was executed"
        raise ConfigError.one(str(file), None, f"{refused}: {_reason(error)}") from error
    except UNREADABLE as error:
        rule = f"is truncated, or not a shard of a model: {_reason(error)}"
        raise ConfigError.one(str(file), None, rule) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ConfigError.one(str(file), None, f"holds {_kind(state)}, not a state dict of tensors")
    return state


@contextmanager
def _inert_types() -> Iterator[None]:
    """Lets weights_only create only the stand-ins, not types that imported libraries have allowed."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(_TYPES)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _mesh(directory: Path, states: Mapping[int, StateDict], world_size: int) -> tuple[str, ...]:
    """Names of the mesh's dimensions. Raises ConfigError for a mesh that verl does not use, or another world
    size."""
    meshes: dict[tuple[str, ...], Path] = {}
    for rank, state in states.items():
        file = directory / file_of(world_size, rank)
        for name, tensor in state.items():
            if not isinstance(tensor, ShardedTensor):
                continue
            mesh = vars(tensor._spec.mesh)
            names = tuple(mesh.get("_mesh_dim_names") or mesh.get("mesh_dim_names") or ())
            # torch 2.10 and older have `mesh` instead of `_rank_map`
            ranks = mesh["_rank_map"] if "_rank_map" in mesh else mesh["mesh"]
            if names not in _MESHES:
                rule = f"{name} is on a mesh {names}; only fsdp and ddp x fsdp can be merged"
                raise ConfigError.one(str(file), None, rule)
            if ranks.numel() != world_size:
                rule = f"{name} was cut for {ranks.numel()} ranks; the file's name says {world_size}"
                raise ConfigError.one(str(file), None, rule)
            meshes[names] = file
    if len(meshes) > 1:
        rule = f"its shards are on different meshes: {', '.join(map(str, meshes))}"
        raise ConfigError.one(str(directory), None, rule)
    return next(iter(meshes), ("fsdp",))


def _require_same_names(directory: Path, states: Mapping[int, StateDict]) -> None:
    for rank, state in states.items():
        odd = sorted(set(state) ^ set(states[0]))
        if odd:
            rule = f"does not belong to rank 0's shard: only one of them has {odd[0]} ({len(odd)} such names)"
            raise ConfigError.one(str(directory / file_of(len(states), rank)), None, rule)


def _tensor(name: str, directory: Path, states: Mapping[int, StateDict], *, replicated: bool) -> StoredTensor:
    """One tensor's pieces, in the order of ranks. `replicated`: the pieces are followed by copies of them."""
    first = states[0][name]
    dim = _cut_along(first, name, directory / file_of(len(states), 0))
    shape, at, pieces = tuple(first.shape), 0, []
    for rank, state in states.items():
        file, tensor = directory / file_of(len(states), rank), state[name]
        form = (tuple(tensor.shape), tensor.dtype, _cut_along(tensor, name, file))
        if form != (shape, first.dtype, dim):
            here = f"{name} is {tensor.dtype} {list(tensor.shape)} here"
            rule = f"{here} and {first.dtype} {list(shape)} in rank 0's shard"
            raise ConfigError.one(str(file), None, rule)
        local = tensor._local_tensor if isinstance(tensor, ShardedTensor) else tensor
        start = [0] * len(shape)
        if dim is not None:
            if replicated and at >= shape[dim]:
                break
            start[dim] = at
            at += local.shape[dim]
        if local.numel() or not first.numel():
            byte_range, strides = numbers_of(local, file), odd_strides(local)
            pieces.append(Piece(tuple(start), tuple(local.shape), byte_range, strides=strides))
    stored = StoredTensor(name, first.dtype, shape, tuple(pieces))
    return stored if dim is not None else _same_everywhere(stored)


def _cut_along(tensor: torch.Tensor, name: str, file: Path) -> int | None:
    """The dimension along which the mesh's last dimension cuts the tensor; None: every rank has all of it."""
    if not isinstance(tensor, ShardedTensor):
        return None
    *others, last = (type(placement).__name__ for placement in tensor._spec.placements)
    if set(others) - {"Replicate"} or last not in ("Shard", "Replicate"):
        rule = f"{name} is placed as {' x '.join([*others, last])}, which cannot be merged"
        raise ConfigError.one(str(file), None, rule)
    return int(tensor._spec.placements[-1].dim) if last == "Shard" else None


def _same_everywhere(stored: StoredTensor) -> StoredTensor:
    """A tensor that every rank has: the first copy. Raises ConfigError when the copies differ."""
    copies = [replace(stored, pieces=(piece,)) for piece in stored.pieces]
    for copy in copies[1:]:
        if not same(copies[0], copy):
            first = copies[0].pieces[0].byte_range.file.name
            rule = f"{stored.name} is not cut, but differs from the copy in {first}"
            raise ConfigError.one(str(copy.pieces[0].byte_range.file), None, rule)
    return copies[0] if copies else stored


def _others(directory: Path, world_size: int) -> dict[str, tuple[int, int]]:
    found = {}
    for part, prefix in (("optim", "optim"), ("extra", "extra_state")):
        files = [directory / file_of(world_size, rank, prefix) for rank in range(world_size)]
        if sizes := [file.stat().st_size for file in files if file.is_file()]:
            found[part] = (len(sizes), sum(sizes))
    return found


def _reason(error: BaseException) -> str:
    """The line of an error that says what is wrong, without torch's advice to trust the file."""
    lines = str(error).strip().splitlines() or [type(error).__name__]  # EOFError has no text
    line = next((line for line in lines if "nsupported" in line), lines[0])
    return " ".join(line.partition(" Please use")[0].split())[:200]


def _kind(state: object) -> str:
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    name, odd = next(item for item in state.items() if not isinstance(item[1], torch.Tensor))
    return f"a dict with {name}: {type(odd).__name__}"
