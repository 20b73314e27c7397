"""LoRA in vLLM: its arguments, and replacing the adapter after each weight update.

In: the tensors of an adapter. Out: vLLM's layers that hold them. vLLM identifies an adapter by an integer id
and never reloads a known one, so every update gets a new id, and the previous adapter is removed first.
Nothing is read from files. Left out on purpose: several adapters at a time, tensor parallelism, and adapters
of embeddings, output matrices and experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor, nn

from hydraflow.models.adapters import SIDES, AdapterLayers, adapted_layers, adapter_name, layer_and_side

STACKED = dict(zip(SIDES, ("lora_a_stacked", "lora_b_stacked"), strict=True))
"""Attributes of vLLM's layers: one tensor (adapters, 1, out, in) for each layer that is fused into one."""


def arguments(layers: AdapterLayers, hf: nn.Module) -> dict[str, Any]:
    """vLLM's arguments. ValueError when it does not support the rank."""
    from vllm.config.lora import MaxLoRARanks

    known = sorted(get_args(MaxLoRARanks))
    if layers.rank > known[-1]:
        raise ValueError(f"it supports adapters up to rank {known[-1]}, the model's have rank {layers.rank}")
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(rank for rank in known if rank >= layers.rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted_layers(layers, hf)}),
    }


def request_of(number: int) -> Any:
    """vLLM's reference to an adapter in a request."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(str(number), number, "sent by the actor")


def replace_adapter(manager: Any, number: int, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Replaces the loaded adapter by this one, for all requests with its id.

    manager: `lora_manager` of a model runner. tensors: A and B of each layer, by the names with which they
    are sent. RuntimeError when the id is known, because vLLM would keep the old adapter.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    if number in manager.list_adapters():
        raise RuntimeError(f"vLLM already has an adapter {number} and would keep it")
    manager.remove_all_adapters()
    found = {}
    for layer in dict.fromkeys(layer_and_side(name)[0] for name in tensors):
        a, b = (tensors[adapter_name(layer, side)] for side in SIDES)
        found[layer] = LoRALayerWeights(layer, rank, rank, a, b)  # alpha = rank, because B includes the scale
    of_model = manager._adapter_manager
    of_model.add_adapter(LoRAModel(number, rank, found))
    of_model.activate_adapter(number)


def without_wrapper(module: nn.Module) -> nn.Module:
    """The layer without vLLM's LoRA wrapper, if it has one."""
    from vllm.lora.layers import BaseLayerWithLoRA

    return module.base_layer if isinstance(module, BaseLayerWithLoRA) else module


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """vLLM's layers with adapters, by name."""
    from vllm.lora.layers import BaseLayerWithLoRA

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseLayerWithLoRA)}


def held_adapter(
    modules: Mapping[str, nn.Module], fused: Mapping[str, list[str]], name: str, shape: Any
) -> Tensor | None:
    """A or B of a layer, as vLLM computes with it; None: the layer has no adapter there.

    modules: as of `adapted_modules`. fused: vLLM's fused layers -> their parts. shape: of the tensor; vLLM's
    are padded.
    """
    layer, side = layer_and_side(name)
    before, _, own = layer.rpartition(".")
    for last, parts in {own: [own], **fused}.items():
        module = modules.get(f"{before}.{last}")
        if module is not None and own in parts:
            stacked: Tensor = getattr(module, STACKED[side])[parts.index(own)]
            return stacked[0, 0, : shape[0], : shape[1]]
    return None
