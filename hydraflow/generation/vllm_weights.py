"""Finds the weights of a Hugging Face model among vLLM's parameters.

In: the Hugging Face model, for names and shapes, and vLLM's. Out: vLLM's tensors by Hugging Face name, also
those of other pipeline stages, and a test pattern that proves the mapping right. Left out on purpose:
gathering tensor-parallel shards (`vllm_worker.py`, `vllm_experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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


Place = tuple[str, slice | None]
"""Where a weight is: vLLM's parameter, and the rows of a fused one; None: all of it."""
Whole = Callable[[nn.Module, str, Tensor], Tensor]
"""(module, name in the module, tensor) -> the tensor of an undivided model."""


class HeldWeights(Mapping[str, Tensor]):
    """The weights of a Hugging Face model in vLLM's parameters: under their own names, as rows of fused ones,
    or under the name of the weight that they are tied to. Each is broadcast by the pipeline stages that hold
    it (an embedding is held by the first one and, if it is tied, by the last). ValueError when no stage holds
    it, or two hold different numbers.

    Reading is a collective, and tensor-parallel weights are gathered: all processes of the engine must read
    the same ones in the same order.
    """

    def __init__(self, model: nn.Module, wanted: Mapping[str, HFWeight], whole: Whole, stages: Any):
        """stages: vLLM's group of the processes that hold the same parts of different layers."""
        self._model, self._wanted, self._whole, self._stages = model, wanted, whole, stages
        held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        self._held = {name.replace(".base_layer.", "."): tensor for name, tensor in held.items()}
        self._fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._adapted: dict[str, nn.Module] = {}
        here = {one for one in wanted if self._adapter(one) is not None or self._place(one) is not None}
        self._found = [stages.broadcast_object(here, src=stage) for stage in range(stages.world_size)]
        """The names of the weights that each stage holds."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def __getitem__(self, name: str) -> Tensor:
        holders = [stage for stage, found in enumerate(self._found) if name in found]
        if not holders:
            model = type(self._model).__name__
            if is_adapter(name):
                raise ValueError(f"{model} has no place for the adapter of {layer_and_side(name)[0]}")
            raise ValueError(f"weight {name} cannot be read back from {model}")
        first, *others = holders
        tensor = self._from(first, name)
        for other in others:
            if not torch.equal(tensor, self._from(other, name)):
                raise ValueError(f"stages {first} and {other} hold different numbers for {name}")
        return tensor

    def _from(self, stage: int, name: str) -> Tensor:
        """A weight that this stage holds, on all stages."""
        if self._stages.world_size == 1:
            return self._here(name)
        tensor: Tensor | None = None
        trouble: ValueError | None = None
        if stage == self._stages.rank_in_group:
            try:
                tensor = self._here(name).contiguous()
            except ValueError as error:  # the other stages wait for the tensor
                trouble = error
        mine = (trouble, None, None) if tensor is None else (None, tensor.shape, tensor.dtype)
        theirs, shape, dtype = self._stages.broadcast_object(mine, src=stage)
        if theirs is not None:
            raise trouble or theirs
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype, device=self._stages.device)
        return self._stages.broadcast(tensor, src=stage)

    def _here(self, name: str) -> Tensor:
        """A weight that this process's stage holds."""
        if (adapter := self._adapter(name)) is not None:
            return adapter
        place = self._place(name)
        assert place is not None, "the stage holds it"
        weight, (parameter, rows) = self._wanted[name], place
        path, _, kind = parameter.rpartition(".")
        module = without_wrapper(self._model.get_submodule(path))
        tensor = self._whole(module, kind, self._held[parameter])
        if rows is not None:
            tensor = tensor[rows]
        if weight.transposed:
            tensor = tensor.t()
        return tensor[: weight.shape[0]] if weight.shape else tensor  # a vocabulary may be padded

    def _place(self, name: str) -> Place | None:
        known = vllm_name(self._model, name)
        for held in (known, name_of_experts(known)):
            if held in self._held:
                return held, None
        if (fused := self._rows_of_fused(name)) is not None:
            return fused
        tied_to = self._wanted[name].tied_to
        return None if tied_to is None else self._place(tied_to)

    def _adapter(self, name: str) -> Tensor | None:
        if not is_adapter(name):
            return None
        self._adapted = self._adapted or adapted_modules(self._model)
        return held_adapter(self._adapted, self._fused, name, self._wanted[name].shape)

    def _rows_of_fused(self, name: str) -> Place | None:
        """The rows of this weight in a fused parameter (q, k and v); None: there is none."""
        *before, module, kind = name.split(".") if "." in name else ("", "", name)
        for whole, parts in self._fused.items():
            fused = ".".join([*before, whole, kind])
            if module in parts and fused in self._held:
                sizes = [self._wanted[".".join([*before, part, kind])].shape[0] for part in parts]
                start = sum(sizes[: parts.index(module)])
                return fused, slice(start, start + sizes[parts.index(module)])
        return None
