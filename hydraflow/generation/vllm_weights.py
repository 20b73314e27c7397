"""Where vLLM holds the weights of a Hugging Face model.

In: the Hugging Face model, for names and shapes, and vLLM's. Out: vLLM's tensors by Hugging Face name, and a
pattern whose return proves that they are the right ones. Left out on purpose: experts of a mixture. vLLM
holds them as `w13_weight` and `w2_weight`, in the order in which they are loaded, but its kernels have
repacked that memory by then: what is loaded again reads back right and computes wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hydraflow.generation.weights import Arrivals

PERIOD = 251
"""Of the pattern: a prime, so that neither shapes nor rows repeat with it, and small enough that 16 bits hold
its numbers exactly."""


@dataclass(frozen=True)
class HFWeight:
    """A weight of the Hugging Face model that vLLM holds under that name or another."""

    shape: torch.Size
    transposed: bool = False
    """vLLM's loader transposes it."""
    tied_to: str | None = None
    """The name of the same tensor that comes first."""


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
    """Numbers for each floating-point weight, by which its parts can be told from each other and from
    neighbours. They share memory.

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


def read_back(model: nn.Module, wanted: Mapping[str, HFWeight]) -> dict[str, Tensor]:
    """Finds each Hugging Face weight among vLLM's parameters: under its own name, as rows of a fused one, or
    under the name of the weight it is tied to. ValueError: it is nowhere."""
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found: dict[str, Tensor] = {}
    for name, weight in wanted.items():
        tensor = _rows_of_fused(model, held, name, wanted) if name not in held else held[name]
        if tensor is None and weight.tied_to is not None:
            tensor = found[weight.tied_to]
        if tensor is None:
            raise ValueError(f"weight {name} cannot be read back from {type(model).__name__}")
        if weight.transposed:
            tensor = tensor.t()
        found[name] = tensor[: weight.shape[0]] if weight.shape else tensor  # a vocabulary may be padded
    return found


def _rows_of_fused(
    model: nn.Module, held: Mapping[str, Tensor], name: str, wanted: Mapping[str, HFWeight]
) -> Tensor | None:
    """The rows that are this weight in a parameter made of several (q, k and v); None: there is none."""
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    *before, module, kind = name.split(".") if "." in name else ("", "", name)
    for whole, parts in fused.items():
        found = held.get(".".join([*before, whole, kind]))
        if module in parts and found is not None:
            sizes = [wanted[".".join([*before, part, kind])].shape[0] for part in parts]
            start = sum(sizes[: parts.index(module)])
            return found[start : start + sizes[parts.index(module)]]
    return None
