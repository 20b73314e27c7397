"""Low-rank adapters of a Hugging Face model, W + B A: which layers have one, the names of its tensors, and
how they are sent.

In: a model, and its target modules. Out: names and shapes. Left out on purpose: peft's layers and their
training (`engine/fsdp/lora.py`), sampling with them (`generation/vllm_adapters.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from hydraflow.models.linear import is_plain

ALL_LINEAR = "all-linear"
SIDES = ("lora_A", "lora_B")
"""The two modules of an adapter, with weights A (rank, in) and B (out, rank)."""

UNCALLED = (".mixer.dt_proj", ".mamba.dt_proj", ".router.classifier")
"""Linear layers whose weight their model's code reads without calling them (Mamba, Falcon Mamba, Jamba,
LongCat): an adapter there would not be trained."""


class Form(Enum):
    """How the weights of a model with adapters are sent."""

    MERGED = "merged"
    """Weights with the adapters' product added."""
    APART = "apart"
    """The base weights, then the adapters."""
    ADAPTERS = "adapters"
    """The adapters alone."""


@dataclass(frozen=True)
class AdapterLayers:
    """The adapters of a model."""

    rank: int
    targets: str | tuple[str, ...]
    """`model.target_modules`."""


def is_adapter(name: str) -> bool:
    """Whether a weight belongs to an adapter.

    >>> is_adapter("layers.0.q_proj.lora_A.weight"), is_adapter("layers.0.q_proj.weight")
    (True, False)
    """
    return any(f".{side}." in name for side in SIDES)


def adapter_name(layer: str, side: str) -> str:
    """The transfer name of a layer's adapter weight.

    >>> adapter_name("layers.0.q_proj", "lora_A")
    'layers.0.q_proj.lora_A.weight'
    """
    return f"{layer}.{side}.weight"


def layer_and_side(name: str) -> tuple[str, str]:
    """The inverse of `adapter_name`.

    >>> layer_and_side("layers.0.q_proj.lora_A.weight")
    ('layers.0.q_proj', 'lora_A')
    """
    layer, side, _ = name.rsplit(".", 2)
    return layer, side


def linear_layers(hf: nn.Module) -> list[str]:
    """Last name components of the linear layers, without duplicates.

    >>> blocks = {name: nn.ModuleDict({"up": nn.Linear(1, 1)}) for name in ("a", "b")}
    >>> linear_layers(nn.ModuleDict(blocks))
    ['up']
    """
    return list(dict.fromkeys(name.rpartition(".")[2] for name, _ in _adaptable(hf)))


def _adaptable(hf: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that can have an adapter, by name."""
    for name, part in hf.named_modules():
        if is_linear(part) and not name.endswith(UNCALLED):
            yield name, part


def subclassed_linear_layers(hf: nn.Module) -> list[str]:
    """The same for layers whose class is derived from nn.Linear, without the output matrix: all-linear leaves
    them out, but a list may name them."""
    head = hf.get_output_embeddings()  # type: ignore[operator]
    parts = [(name, part) for name, part in hf.named_modules() if isinstance(part, nn.Linear)]
    return list(
        dict.fromkeys(
            name.rpartition(".")[2] for name, part in parts if not is_linear(part) and part is not head
        )
    )


def target_names(targets: str | list[str], hf: nn.Module) -> list[str]:
    """Resolves `targets` to names: a list is returned as is, a pattern gives its matches, all-linear gives
    all linear layers except the output matrix. ValueError when a pattern matches none."""
    if not isinstance(targets, str):
        return targets
    if targets.lower() == ALL_LINEAR:
        head = hf.get_output_embeddings()  # type: ignore[operator]
        return [name for name, part in _adaptable(hf) if part is not head]
    if found := [name for name, _ in hf.named_modules() if name and re.fullmatch(targets, name)]:
        return found
    raise ValueError(f"no module matches {targets}")


def adapted_layers(layers: AdapterLayers, hf: nn.Module) -> dict[str, nn.Module]:
    """Full names of the linear layers that get an adapter; as in peft, a list may name suffixes."""
    targets = layers.targets if isinstance(layers.targets, str) else list(layers.targets)
    ends = tuple(f".{name}" for name in target_names(targets, hf))
    return {name: part for name, part in _adaptable(hf) if f".{name}".endswith(ends)}


def add_shapes(layers: AdapterLayers, hf: nn.Module) -> None:
    """Adds unused weights with the names and shapes of the adapters to a model on the meta device."""
    for part in adapted_layers(layers, hf).values():
        weight = part.get_parameter("weight")
        rows, columns = weight.shape
        outputs, inputs = (rows, columns) if isinstance(part, nn.Linear) else (columns, rows)
        for side, shape in zip(SIDES, ((layers.rank, inputs), (outputs, layers.rank)), strict=True):
            held = nn.Module()
            held.weight = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device="meta"))
            part.add_module(side, held)


def is_linear(part: nn.Module) -> bool:
    """Whether a layer is a linear one that returns a tensor."""
    from transformers.pytorch_utils import Conv1D

    # not isinstance: a router that is a subclass of Linear returns more than a tensor
    return is_plain(part) or type(part) is Conv1D
