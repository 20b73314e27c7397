"""Finds the weights of a Hugging Face model among vLLM's parameters.

In: the Hugging Face model, for names and shapes, and vLLM's. Out: vLLM's tensors by Hugging Face name, and a
test pattern that proves the mapping right. Left out on purpose: gathering tensor-parallel shards
(`vllm_worker.py`, `vllm_experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hydraflow.generation.vllm_adapters import adapted_modules, held_adapter, without_wrapper
from hydraflow.generation.vllm_experts import name_of_experts, vllm_name
from hydraflow.generation.weights import Arrivals
from hydraflow.models.adapters import is_adapter, layer_and_side

PERIOD = 251
"""Period of the test pattern: a prime, so that it aligns with no shape or row, and small enough for exact
16-bit numbers."""


@dataclass(frozen=True)
class HFWeight:
    """A weight of the Hugging Face model."""

    shape: torch.Size
    transposed: bool = False
    """vLLM's loader transposes it."""
    tied_to: str | None = None
    """The first name of the same (tied) tensor."""


def wanted_weights(model: nn.Module, arrivals: Arrivals) -> dict[str, HFWeight]:
    """All weights of a Hugging Face model, by name."""
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    return {
        name: HFWeight(
            tensor.shape,
            transposed=name in transposed,
            tied_to=first if (first := arrivals.first_name(name)) != name else None,
        )
        for name, tensor in arrivals.known.items()
    }


def pattern(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values for each floating-point weight that distinguish its parts from each other and from those of
    other weights. They share memory.

    >>> pattern({"a": torch.empty(2), "b": torch.empty(3)})
    {'a': tensor([0., 1.]), 'b': tensor([1., 2., 3.])}
    """
    longest = max(weight.numel() for weight in weights.values())
    numbers = torch.arange(longest + PERIOD, dtype=torch.int32).remainder_(PERIOD)
    floating = {name: weight for name, weight in weights.items() if weight.is_floating_point()}
    of_type = {dtype: numbers.to(dtype) for dtype in {weight.dtype for weight in floating.values()}}
    return {
        name: of_type[weight.dtype][at % PERIOD :][: weight.numel()].view(weight.shape)
        for at, (name, weight) in enumerate(floating.items())
    }


Whole = Callable[[nn.Module, str, Tensor], Tensor]
"""(module, name in the module, tensor) -> the tensor of an undivided model."""


class HeldWeights(Mapping[str, Tensor]):
    """Maps each Hugging Face weight to vLLM's parameters: under its own name, as rows of a fused one, or
    under the name of the weight it is tied to. ValueError when a weight is not found.

    Tensor-parallel weights are gathered when they are read, by a collective: all processes of the engine must
    read the same ones in the same order.
    """

    def __init__(self, model: nn.Module, wanted: Mapping[str, HFWeight], whole: Whole):
        self._model, self._wanted, self._whole = model, wanted, whole
        held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        self._held = {name.replace(".base_layer.", "."): tensor for name, tensor in held.items()}
        self._fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._adapted: dict[str, nn.Module] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def __getitem__(self, name: str) -> Tensor:
        weight = self._wanted[name]
        if is_adapter(name):
            return self._adapter(name, weight.shape)
        known = vllm_name(self._model, name)
        own = next((held for held in (known, name_of_experts(known)) if held in self._held), None)
        tensor = self._rows_of_fused(name) if own is None else self._gathered(own)
        if tensor is None and weight.tied_to is not None:
            return self[weight.tied_to]
        if tensor is None:
            raise ValueError(f"weight {name} cannot be read back from {type(self._model).__name__}")
        if weight.transposed:
            tensor = tensor.t()
        return tensor[: weight.shape[0]] if weight.shape else tensor  # a vocabulary may be padded

    def _gathered(self, name: str) -> Tensor:
        path, _, kind = name.rpartition(".")
        return self._whole(without_wrapper(self._model.get_submodule(path)), kind, self._held[name])

    def _adapter(self, name: str, shape: torch.Size) -> Tensor:
        self._adapted = self._adapted or adapted_modules(self._model)
        tensor = held_adapter(self._adapted, self._fused, name, shape)
        if tensor is None:
            layer, model = layer_and_side(name)[0], type(self._model).__name__
            raise ValueError(f"{model} has no place for the adapter of {layer}")
        return tensor

    def _rows_of_fused(self, name: str) -> Tensor | None:
        """The rows of this weight in a fused parameter (q, k and v); None: there is none."""
        *before, module, kind = name.split(".") if "." in name else ("", "", name)
        for whole, parts in self._fused.items():
            fused = ".".join([*before, whole, kind])
            if module in parts and fused in self._held:
                sizes = [self._wanted[".".join([*before, part, kind])].shape[0] for part in parts]
                start = sum(sizes[: parts.index(module)])
                return self._gathered(fused)[start : start + sizes[parts.index(module)]]
        return None
