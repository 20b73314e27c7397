"""Builds a sharded model: shape on the meta device, adapters, fully_shard, then weights from rank 0, tensor
by tensor.

In: a `ModelConfig` and an `FSDPConfig`. Out: a `PolicyModel` or `ValueModel` whose parameters are DTensors.
Only rank 0 reads files, and no rank ever holds more than its shard and one full tensor on its device.
Left out on purpose: tensor parallelism.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from hydraflow.device import resolve_dtype
from hydraflow.engine.config import FSDPConfig
from hydraflow.engine.fsdp import lora
from hydraflow.engine.fsdp.groups import RankGroups
from hydraflow.engine.fsdp.parity import must_pad_rows
from hydraflow.engine.fsdp.ulysses import require_shareable
from hydraflow.engine.process_group import from_first_rank, on_first_rank
from hydraflow.engine.token_exchange import Ulysses
from hydraflow.models import loading
from hydraflow.models.adapters import is_adapter
from hydraflow.models.config import ModelConfig
from hydraflow.models.experts import one_of_few, pad_experts
from hydraflow.models.gated import replace_gates
from hydraflow.models.heads import PolicyModel, ValueModel
from hydraflow.models.linear import speed_up_linears
from hydraflow.models.norms import replace_norms
from hydraflow.models.rotary import replace_rotations
from hydraflow.models.rounded import require_rounded_layers, round_products

log = logging.getLogger(__name__)
FEW_SIZES = "hydraflow_few_sizes"
"""Experts whose numbers of rows are `one_of_few`, in transformers' table."""


def build_model(
    model: ModelConfig,
    fsdp: FSDPConfig,
    *,
    head: str,
    groups: RankGroups,
    device: torch.device,
    trained: bool,
    field: str,
    seed: int,
) -> tuple[PolicyModel | ValueModel, bool]:
    """The sharded model with its weights, and whether its rows must be padded. Raises ConfigError on every
    rank alike."""
    config = loading.load_config(model, field=field)
    model_class = loading.causal_class(config, model, field=field)
    require_shareable(config, model, groups.sharers, field=field)
    attention, padded = loading.choose_attention(config, model, model_class)
    dtype = resolve_dtype(fsdp.model_dtype, device.type)
    module = loading.empty_model(
        config, model, head=head, dtype=dtype, attention=attention, chunk_tokens=fsdp.head_chunk_tokens
    )
    replace_norms(module, compile=fsdp.use_torch_compile)
    replace_rotations(module, compile=fsdp.use_torch_compile)
    # on a CPU without torch.compile, transformers' own SwiGLU is as fast
    if fsdp.use_torch_compile or device.type != "cpu":
        replace_gates(module, compile=fsdp.use_torch_compile)
    rounded = require_rounded_layers(module) if fsdp.product_dtype != fsdp.compute_dtype else []
    if not trained:
        module.requires_grad_(False)
    elif model.lora_rank > 0:
        lora.add_adapters(module.hf, model, dtype, field=field)
    speed_up_linears(module)
    computed = resolve_dtype(fsdp.compute_dtype, device.type)
    if device.type == "cpu" and computed == torch.bfloat16:
        pad_experts(module, FEW_SIZES, one_of_few)
    if trained and model.enable_gradient_checkpointing:
        _checkpoint_activations(module, config.model_type)
    shard(module, fsdp, groups.shards, device)
    module.to_empty(device="cpu" if fsdp.offload_policy else device)
    read = partial(loading.read_weights, config, model, head=head, dtype=dtype, field=field, tables=True)
    source = on_first_rank(read) or {}
    _fill_parameters(module, source, device, torch.Generator().manual_seed(seed))
    _fill_buffers(module, source, device)
    padded = must_pad_rows(
        module,
        padded=padded,
        ulysses=None if groups.sequence is None else Ulysses(groups.sequence),
        own_attention=loading.own_attention(config, model_class),
        device=device,
        dtype=computed,
        field=field,
        path=model.path,
    )
    round_products(rounded)  # after the check, which expects float32's precision
    return module, padded


def _checkpoint_activations(module: PolicyModel | ValueModel, model_type: str) -> None:
    """Turns on gradient checkpointing, if the model supports it."""
    if not module.hf.supports_gradient_checkpointing:
        log.warning("a %s model does not support gradient checkpointing: it trains without it", model_type)
        return
    module.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # only reentrant checkpointing needs inputs with gradients; frozen embeddings would compute them for
    # nothing
    module.hf.disable_input_require_grads()


def shard(module: PolicyModel | ValueModel, fsdp: FSDPConfig, mesh: DeviceMesh, device: torch.device) -> None:
    """Applies fully_shard to every layer that is large enough and to the root. Gradients are summed over
    ranks, not averaged."""
    policy: dict[str, Any] = dict(
        mesh=mesh,
        mp_policy=_precision(fsdp, device),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=device.type != "cpu") if fsdp.offload_policy else OffloadPolicy()
        ),
        reshard_after_forward=fsdp.reshard_after_forward,
    )
    least = fsdp.wrap_policy.least(mesh.size(), device.type, offloaded=fsdp.offload_policy)
    for layer in _layers(module.hf):
        if sum(parameter.numel() for parameter in layer.parameters()) >= least:
            fully_shard(layer, **policy)
    # the backward pass starts with the root's weights, so freeing them after the forward pass would only
    # gather them again
    fully_shard(module, **{**policy, "reshard_after_forward": False})
    if mesh.size() == 1:
        return  # FSDP would divide all gradients by 1
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum in float32


def hf_name(module: PolicyModel | ValueModel, name: str) -> str:
    """A parameter's name in Hugging Face's files."""
    return name.removeprefix(module.prefix).replace(".base_layer.", ".")


def _layers(hf: nn.Module) -> list[nn.Module]:
    """The decoder's layers: the longest list of modules in it."""
    lists = [list(part) for part in hf.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=len) if lists else []


def _precision(fsdp: FSDPConfig, device: torch.device) -> MixedPrecisionPolicy:
    kept, compute, reduce = (
        resolve_dtype(name, device.type) for name in (fsdp.model_dtype, fsdp.compute_dtype, fsdp.reduce_dtype)
    )
    if compute == torch.float64:
        reduce = compute  # a reduction in less would lose the precision that fp64 is chosen for
    return MixedPrecisionPolicy(
        param_dtype=None if compute == kept else compute, reduce_dtype=None if reduce == compute else reduce
    )


@torch.no_grad()
def _fill_parameters(
    module: PolicyModel | ValueModel,
    source: dict[str, torch.Tensor],
    device: torch.device,
    draw: torch.Generator,
) -> None:
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        shape, dtype = parameter.shape, parameter.dtype
        if is_adapter(name):
            find = partial(lora.initial_value, name, shape, dtype, draw)
        else:
            find = partial(source.__getitem__, hf_name(module, name))
        full = from_first_rank(find, shape, dtype, device)
        piece = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(piece.to_local())


@torch.no_grad()
def _fill_buffers(
    module: PolicyModel | ValueModel, source: dict[str, torch.Tensor], device: torch.device
) -> None:
    """Rotary tables and similar buffers: they are in no file, so rank 0 computes and broadcasts them. They
    stay on the device."""
    for name, buffer in list(module.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        full = from_first_rank(
            partial(source.__getitem__, hf_name(module, name)), buffer.shape, buffer.dtype, device
        )
        part = module.get_submodule(owner)
        part.register_buffer(leaf, full, persistent=leaf not in part._non_persistent_buffers_set)
