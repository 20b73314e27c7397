"""Low-rank adapters in vLLM: its arguments for them, and one adapter after the other under new numbers.

In: the tensors of an adapter. Out: vLLM's layers that hold them. vLLM names an adapter by a number, and takes
one whose number it knows for the one that it has: every adapter gets a new number, and the one before is
removed first. Nothing is read from a file. Left out on purpose: several adapters at a time, adapters divided
among devices, and adapters of embeddings, output matrices and experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor, nn

from hydraflow.models.adapters import SIDES, AdapterLayers, adapted_layers, adapter_name, layer_and_side

STACKED = dict(zip(SIDES, ("lora_a_stacked", "lora_b_stacked"), strict=True))
"""Attributes of vLLM's layers, a tensor (adapters, 1, out, in) for each of the layers that one is made of."""


def arguments(layers: AdapterLayers, hf: nn.Module) -> dict[str, Any]:
    """vLLM's arguments. ValueError: it has no room for the rank."""
    from vllm.config.lora import MaxLoRARanks

    known = sorted(get_args(MaxLoRARanks))
    if layers.rank > known[-1]:
        raise ValueError(f"it has adapters up to rank {known[-1]}, the model's have rank {layers.rank}")
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(rank for rank in known if rank >= layers.rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted_layers(layers, hf)}),
    }


def request_of(number: int) -> Any:
    """What a request of vLLM's names its adapter with."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(str(number), number, "sent by the actor")


def replace_adapter(manager: Any, number: int, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Loads an adapter in the place of the one before, for all requests that name its number.

    manager: `lora_manager` of a model runner. tensors: A and B of each layer, by the names with which they
    are sent. RuntimeError: the number is known, so that vLLM would go on with the old adapter.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    if number in manager.list_adapters():
        raise RuntimeError(f"vLLM has an adapter {number} already, and would go on with it")
    manager.remove_all_adapters()
    found = {}
    for layer in dict.fromkeys(layer_and_side(name)[0] for name in tensors):
        a, b = (tensors[adapter_name(layer, side)] for side in SIDES)
        found[layer] = LoRALayerWeights(layer, rank, rank, a, b)  # scaled by rank / rank: B holds the scale
    of_model = manager._adapter_manager
    of_model.add_adapter(LoRAModel(number, rank, found))
    of_model.activate_adapter(number)


def without_wrapper(module: nn.Module) -> nn.Module:
    """The layer itself, where vLLM has put one around it that adds an adapter."""
    from vllm.lora.layers import BaseLayerWithLoRA

    return module.base_layer if isinstance(module, BaseLayerWithLoRA) else module


def held_adapter(model: nn.Module, fused: Mapping[str, list[str]], name: str, shape: Any) -> Tensor | None:
    """A or B of a layer, as vLLM computes with it; None: the layer has no adapter there.

    fused: layers of vLLM's, and those of which they are made. shape: of the tensor; vLLM's are larger.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    layer, side = layer_and_side(name)
    before, _, own = layer.rpartition(".")
    places = {own: 0} | {whole: parts.index(own) for whole, parts in fused.items() if own in parts}
    modules = dict(model.named_modules())
    for last, place in places.items():
        module = modules.get(f"{before}.{last}")
        if isinstance(module, BaseLayerWithLoRA):
            stacked: Tensor = getattr(module, STACKED[side])[place]
            return stacked[0, 0, : shape[0], : shape[1]]
    return None
