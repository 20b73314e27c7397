"""Builds this rank's part of a model on Megatron-Core, and fills it.

In: a `ModelConfig` and a `MegatronConfig`. Out: `Built`, with weights. Only rank 0 reads a Hugging Face
directory; it broadcasts tensor by tensor, and every rank keeps its parts. From a checkpoint of Megatron-Core
every rank reads its own parts. Left out on purpose: optimizer (`optimizer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from hydraflow.device import resolve_dtype
from hydraflow.engine.config import MegatronConfig
from hydraflow.engine.megatron.architecture import Architecture, section_of
from hydraflow.engine.megatron.core_config import frequencies, transformer_config
from hydraflow.engine.megatron.layers import Trunk, layer_spec
from hydraflow.engine.megatron.names import HEAD, Holding, Names, vocabulary_share
from hydraflow.engine.megatron.parallel import Place
from hydraflow.engine.megatron.stored_weights import open_weights, read_part
from hydraflow.engine.process_group import from_first_rank, on_every_rank, on_first_rank
from hydraflow.models import loading
from hydraflow.models.config import ModelConfig


@dataclass(frozen=True)
class Built:
    """A rank's part of a model."""

    chunks: tuple[Trunk, ...]
    """One, or several with the interleaved schedule, whose layers are not adjacent."""
    names: Names
    config: Any
    """transformers' configuration."""

    @property
    def trunk(self) -> Trunk:
        """The last chunk; on the last stage it has the model's last layers and head."""
        return self.chunks[-1]

    def holdings(self, *, copies: bool = False) -> dict[str, tuple[torch.nn.Parameter, Holding]]:
        """Parameters by name (see `Names.holding`), each with what this rank holds of it. `copies`: also the
        last stage's copy of a tied embedding."""
        return {
            name: (parameter, self.names.holding(name))
            for chunk in self.chunks
            for name, parameter in chunk.counted(chunk.named_parameters())
            if copies or not (name == HEAD and self.names.shape.tied)
        }

    def buffers(self) -> dict[str, tuple[torch.Tensor, Holding]]:
        """Buffers that are saved (router biases) by name, each with what this rank holds of it."""
        return {
            name: (buffer, self.names.holding(name))
            for chunk in self.chunks
            for name, buffer in chunk.counted(loading.persistent_buffers(chunk))
        }

    def tensors(self, *, copies: bool = False) -> dict[str, tuple[torch.Tensor, Holding]]:
        """Parameters and buffers together."""
        return {**self.holdings(copies=copies), **self.buffers()}


def build_model(
    model: ModelConfig, settings: MegatronConfig, place: Place, *, head: str, device: torch.device, field: str
) -> Built:
    """This rank's part, with its weights. Raises ConfigError on every rank alike."""
    config = loading.load_config(model, field=field)
    shape = Architecture.of(config, field=field, path=model.path)
    section = section_of(field)
    shape.require_divisible(settings, section=section)
    dtype = resolve_dtype(settings.compute_dtype, device.type)
    if head == "value":
        shape = replace(shape, tied=False)
    core = transformer_config(shape, model, settings, dtype, section=section)
    angles, rotary_scale = frequencies(config)

    def chunk(number: int) -> Trunk:
        place_in_stage = number if settings.chunks > 1 else None
        first = get_transformer_layer_offset(core, place_in_stage, place.stage)
        layers = layer_spec(core, shape, rotary_scale=rotary_scale, first=first, chunk=place_in_stage)
        return Trunk(
            head=head,
            frequencies=angles,
            padding=config.pad_token_id,
            config=core,
            transformer_layer_spec=layers,
            vocab_size=vocabulary_share(shape.vocabulary, place.tensor_size) * place.tensor_size,
            max_sequence_length=config.max_position_embeddings,
            pre_process=place.stage == 0 and number == 0,
            post_process=place.is_last and number == settings.chunks - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            parallel_output=True,
            vp_stage=place_in_stage,
        ).to(device)

    chunks = tuple(chunk(number) for number in range(settings.chunks))
    names = Names(
        shape,
        place.tensor,
        place.tensor_size,
        experts=place.expert,
        expert_shares=place.expert_size,
        slice=place.expert_tensor,
        slices=place.expert_tensor_size,
    )
    built = Built(chunks, names, config)
    _mark_divided(built)
    if settings.use_dist_checkpointing:
        on_every_rank(lambda: _fill_from_core(built, model, settings, head=head, field=field))
    else:
        _fill(built, model, head=head, dtype=dtype, device=device, field=field)
    return built


def _mark_divided(built: Built) -> None:
    """Marks divided weights: the gradient norm counts these on every rank, all others once. Megatron-Core
    marks them during initialisation, which is skipped here."""
    for parameter, holding in built.holdings(copies=True).values():
        dim = holding.parts[0].dim
        if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, dim, 1)


@torch.no_grad()
def _fill(
    built: Built, model: ModelConfig, *, head: str, dtype: torch.dtype, device: torch.device, field: str
) -> None:
    def read() -> dict[str, torch.Tensor]:
        return loading.read_weights(built.config, model, head=head, dtype=dtype, field=field)

    source = on_first_rank(read) or {}
    # each tensor with its own dtype, because transformers keeps router biases in float32
    listed: list[Any] = [[(name, tensor.shape, tensor.dtype) for name, tensor in source.items()]]
    dist.broadcast_object_list(listed, src=0)
    wanted: dict[str, list[str]] = {}
    holdings = built.tensors(copies=True)
    for name, (_, holding) in holdings.items():
        for part in holding.parts:
            wanted.setdefault(part.name, []).append(name)
    pieces: dict[str, dict[str, torch.Tensor]] = {}
    for hf_name, shape, own_dtype in listed[0]:
        full = from_first_rank(partial(source.__getitem__, hf_name), shape, own_dtype, device)
        for name in wanted.pop(hf_name, []):
            parameter, holding = holdings[name]
            found = pieces.setdefault(name, {})
            found |= {part.name: part.of(full) for part in holding.parts if part.name == hf_name}
            if len(found) == len(holding.parts):
                parameter.copy_(holding.join([found[part.name] for part in holding.parts]))
                del pieces[name]
    assert not wanted, f"{model.path} has no {sorted(wanted)}"


@torch.no_grad()
def _fill_from_core(
    built: Built, model: ModelConfig, settings: MegatronConfig, *, head: str, field: str
) -> None:
    path, shape = settings.dist_checkpointing_path, built.names.shape
    assert path is not None, "compose/rules.py requires it"
    key = f"{section_of(field)}.megatron.dist_checkpointing_path"
    weights = open_weights(path, shape, head=head, key=key, model=field, model_path=str(model.path))
    for parameter, holding in built.tensors(copies=True).values():
        parameter.copy_(holding.join([read_part(part, weights) for part in holding.parts]))
