"""`split`: a Hugging Face directory becomes an FSDP checkpoint, as training would have saved it before its
first step; or Megatron-Core's (`megatron_split.py`).

In: a directory, a number of ranks, a layout. Out: a model's directory of that layout, whole or not at all.
The weights pass through transformers, so names are those of its modules; they must fit into memory.
Left out on purpose: optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hydraflow.engine.dcp_index import SHARDS
from hydraflow.engine.dcp_writer import CheckpointWriter
from hydraflow.errors import ConfigError, Problem
from hydraflow.model_merger import dcp, megatron_split, target, verl
from hydraflow.model_merger.outputs import DTYPES
from hydraflow.model_merger.progress import Advance, bar
from hydraflow.models import loading
from hydraflow.models.config import ModelSourceConfig

_FIELD = "--hf_dir"
_PREFIX = {"policy": "lm.", "value": ""}
"""Prefix of Hugging Face's names in hydraflow's trainer (`models/heads.py`)."""


def split(
    hf_dir: str,
    target_dir: str,
    *,
    world_size: int,
    backend: str,
    layout: str | None,
    separate_layers: bool,
    dtype: str,
    is_value_model: bool,
    trust_remote_code: bool,
    overwrite: bool,
) -> list[str]:
    """Splits, and returns lines for the user. `layout`: hydraflow (None) or verl. Raises ConfigError before
    anything is written."""
    if world_size < 1:
        raise ConfigError.one("--world_size", world_size, "must be at least 1", "--world_size 1")
    source = Path(hf_dir)
    if not (source / "config.json").is_file():
        rule = "is not a Hugging Face directory: there is no config.json in it"
        raise ConfigError.one(_FIELD, hf_dir, rule)
    target.require_free(Path(target_dir), source, overwrite=overwrite)
    if backend == "megatron":
        flags = {"--layout": layout, "--is-value-model": is_value_model}
        _refuse("--backend megatron", flags | {"--trust-remote-code": trust_remote_code})
        return megatron_split.split(
            source,
            target_dir,
            files=world_size,
            dtype=dtype,
            separate_layers=separate_layers,
            overwrite=overwrite,
        )
    _refuse("--backend fsdp", {"--separate-layers": separate_layers})
    head = "value" if is_value_model else "policy"
    weights = _read(source, dtype, head, trust_remote_code)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    with (
        target.unfinished(Path(target_dir), source, nbytes=nbytes, overwrite=overwrite) as folder,
        bar("splitting", nbytes) as advance,
    ):
        if layout == "verl":
            _write_verl(folder, weights, world_size, advance)
        else:
            _write_dcp(folder, weights, world_size, head, advance)
        target.copy_settings(target.settings(source), folder / "huggingface")
    sizes = f"{len(weights)} tensors, {nbytes / 1e9:.3f} GB"
    return [f"{Path(target_dir).absolute()}: {sizes}, {world_size} ranks, layout {layout or 'hydraflow'}"]


def _refuse(backend: str, flags: Mapping[str, object]) -> None:
    for flag, value in flags.items():
        if value:
            shown = None if value is True else value
            raise ConfigError.one(flag, shown, f"cannot be used with {backend}", f"leave out {flag}")


def _read(source: Path, dtype: str, head: str, trust: bool) -> dict[str, torch.Tensor]:
    model = ModelSourceConfig(path=str(source), trust_remote_code=trust)
    try:
        config = loading.load_config(model, field=_FIELD)
        own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        kept = DTYPES.get(dtype, own)
        shape = loading.empty_model(config, model, head=head, dtype=kept, attention="eager", chunk_tokens=1)
        weights = loading.read_weights(config, model, head=head, dtype=kept, field=_FIELD)
    except ConfigError as error:
        raise ConfigError([_in_flags(problem) for problem in error.problems]) from error
    names = (
        name.removeprefix(shape.prefix) for name in shape.state_dict()
    )  # in the order in which training saves
    return {name: weights[name] for name in names}


def _in_flags(problem: Problem) -> Problem:
    """Rewrites a problem with the model for this command line, where `path` and `trust_remote_code` are
    flags."""
    remedy = problem.remedy.replace(f"{_FIELD}.trust_remote_code=true", "--trust-remote-code")
    return replace(problem, field=problem.field.removesuffix(".path"), remedy=remedy)


def _shards(tensor: torch.Tensor, world_size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) of each rank that has any, as FSDP cuts them: along the first dimension."""
    first = 0
    for rows in tensor.chunk(world_size) if tensor.dim() else (tensor,):
        yield first, rows
        first += len(rows) if tensor.dim() else 0


def _write_dcp(
    folder: Path, weights: Mapping[str, torch.Tensor], world_size: int, head: str, advance: Advance
) -> None:
    """torch's distributed checkpoint, as `world_size` ranks would write it. A tied tensor is in it once."""
    (folder / SHARDS).mkdir()
    writer, planned = CheckpointWriter(folder / SHARDS), {}
    firsts = {tensor.data_ptr(): name for name, tensor in reversed(list(weights.items()))}
    once = {name: tensor for name, tensor in weights.items() if firsts[tensor.data_ptr()] == name}
    for rank in range(world_size):
        for name, tensor in once.items():
            found = list(_shards(tensor, world_size))
            if rank >= len(found):
                continue
            key, (first, rows) = f"{dcp.MODEL}{_PREFIX[head]}{name}", found[rank]
            start = [first, *[0] * (tensor.dim() - 1)][: tensor.dim()]
            writer.add_box(key, tensor.shape, start, rows, writer.write(rows.clone(), rank))
            planned[key] = ("model", key.removeprefix(dcp.MODEL))
            advance(rows.nbytes)
    writer.finish(planned)
    facts = {"engine": "fsdp2", "world_size": world_size, "head": head, "contents": ["model"], "lora_rank": 0}
    facts |= {"tied": len(once) < len(weights), "module_prefix": _PREFIX[head]}
    target.write_json(folder / dcp.FACTS, facts)


def _write_verl(folder: Path, weights: Mapping[str, torch.Tensor], world_size: int, advance: Advance) -> None:
    """One file of DTensors for each rank; writing them needs no process group. Tied tensors share storage."""
    for rank in range(world_size):
        ranks = torch.arange(world_size)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("fsdp",), _init_backend=False, _rank=rank)
        copies: dict[int, torch.Tensor] = {}
        state = {}
        for name, tensor in weights.items():
            found = list(_shards(tensor, world_size))
            rows = found[rank][1] if rank < len(found) else tensor[:0]
            if tensor.data_ptr() not in copies:
                copies[tensor.data_ptr()] = rows.clone()
            spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))
            state[name] = DTensor(copies[tensor.data_ptr()], spec, requires_grad=False)
            advance(rows.nbytes)
        torch.save(state, folder / verl.file_of(world_size, rank))
    target.write_json(folder / verl.CONFIG, {"FSDP_version": 2, "world_size": world_size})
