"""Exports full weights of a divided model under Hugging Face's names, one tensor at a time.

In: this rank's part. Out: a stream for the generation engine and for files. A tensor is assembled only on the
ranks that need it: its stage's tensor-parallel ranks send their parts, and a rank of another stage gets the
result. Left out on purpose: the receiver of the stream (`generation/`), files (`engine/hf_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hydraflow.engine.config import MegatronConfig
from hydraflow.engine.megatron.build import Built
from hydraflow.engine.megatron.parallel import Place
from hydraflow.models import loading
from hydraflow.models.config import ModelConfig
from hydraflow.models.heads import PolicyModel, ValueModel


@dataclass(frozen=True)
class Outlined:
    """A Hugging Face tensor, and where its parts are."""

    stage: int
    parameter: str
    """Megatron-Core's name within the stage."""
    part: int
    """Its index among the parameter's parts."""
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    experts: bool
    """Whether expert-parallel ranks divide it."""


def outline(built: Built, place: Place) -> list[Outlined]:
    """All tensors of all stages, the same list on every rank. Collective."""
    mine = [
        Outlined(place.stage, name, number, part.name, part.shape, tensor.dtype, part.slice is not None)
        for name, (tensor, holding) in built.tensors().items()
        for number, part in enumerate(holding.parts)
    ]
    found: list[list[Outlined]] = [[]] * place.stages
    dist.all_gather_object(found, mine, group=parallel_state.get_pipeline_model_parallel_group())
    return [tensor for stage in found for tensor in stage]


@torch.no_grad()
def stream(
    built: Built, outlined: list[Outlined], place: Place, settings: MegatronConfig, *, to: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """See `TrainEngine.weights`."""
    device = next(built.trunk.parameters()).device
    holdings = built.tensors()
    wanted = None if to is None else Place.of(to, dist.get_world_size(), settings)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    for tensor in outlined:
        dtype = tensor.dtype
        full = torch.empty(tensor.shape, dtype=dtype, device="meta")
        is_here = tensor.stage == place.stage
        takes_part = wanted is None or place.shares_with(wanted, experts=tensor.experts)
        if takes_part and is_here:
            parameter, _ = holdings[tensor.parameter]
            full = _joined(built, parameter, tensor, None if wanted is None else wanted.within, full)
        if wanted is None and place.stages > 1:  # all stages get it
            full = full if is_here else torch.empty(tensor.shape, dtype=dtype, device=device)
            dist.broadcast(full, place.rank(stage=tensor.stage), group=pipeline)
        elif wanted is not None and wanted.within == place.within:
            # only the wanted rank gets it, from the rank at its position in the tensor's stage
            if is_here and place.stage != wanted.stage:
                dist.send(full, place.rank(stage=wanted.stage), group=pipeline)
                full = torch.empty(tensor.shape, dtype=dtype, device="meta")
            elif not is_here and place.stage == wanted.stage:
                full = torch.empty(tensor.shape, dtype=dtype, device=device)
                dist.recv(full, place.rank(stage=tensor.stage), group=pipeline)
        yield tensor.name, full


def _joined(
    built: Built, parameter: torch.Tensor, tensor: Outlined, within: int | None, nothing: torch.Tensor
) -> torch.Tensor:
    """The full tensor on the rank at position `within` of its stage, or on all of them; `nothing` on the
    others."""
    holding = built.names.holding(tensor.parameter)
    sharers = built.names.of_sharers(holding.parts[tensor.part])
    group = (
        parallel_state.get_expert_tensor_and_model_parallel_group()
        if tensor.experts
        else parallel_state.get_tensor_model_parallel_group()
    )
    at = None if within is None else within % len(sharers)
    is_wanted = at in (None, dist.get_rank(group))
    if holding.parts[tensor.part].dim is None or len(sharers) == 1:
        return holding.cut(parameter.detach())[tensor.part].reshape(tensor.shape) if is_wanted else nothing
    mine = parameter.detach().contiguous()
    found = [torch.empty_like(mine) for _ in sharers] if is_wanted else None
    if at is None:
        assert found is not None
        dist.all_gather(found, mine, group=group)
    else:
        dist.gather(mine, found, dist.get_global_rank(group, at), group=group)
    if found is None:
        return nothing
    whole = parameter.new_empty(tensor.shape)
    for names, local in zip(sharers, found, strict=True):
        holding = names.holding(tensor.parameter)
        holding.parts[tensor.part].of(whole).copy_(holding.cut(local)[tensor.part])
    return whole


def empty_model(built: Built, model: ModelConfig, head: str) -> PolicyModel | ValueModel:
    """transformers' model of the same shape, on the meta device."""
    dtype = built.trunk.config.params_dtype
    return loading.empty_model(built.config, model, head=head, dtype=dtype, attention="eager", chunk_tokens=1)
