"""Low-rank adapters: added to the weights that they change, block by block, or exported for peft.

In: a weight and its adapter's matrices A (rank, in) and B (out, rank). Out: W + scale * B A, by the same
operations as in the training engine (`engine/fsdp/lora.py`), so that the bits agree; or peft's
adapter_config.json. Left out on purpose: adapters on embeddings, several adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from hydraflow.engine.stored.pieces import StoredTensor, whole
from hydraflow.errors import ConfigError

PEFT = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight."""

    weight: str
    """Name of the weight."""
    a: StoredTensor
    """(rank, in)"""
    b: StoredTensor
    """(out, rank)"""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def module(self) -> str:
        """Name of the module whose weight it changes."""
        return self.weight.removesuffix(".weight")


@dataclass(frozen=True)
class MergedTensor(StoredTensor):
    """A weight whose blocks have its adapter added."""

    adapter: Adapter
    scale: float
    transposed: bool
    """The weight is (in, out), as in GPT-2."""

    def blocks(self) -> Iterator[torch.Tensor]:
        """Blocks of W + scale * B A."""
        a, b, at = whole(self.adapter.a), whole(self.adapter.b), 0
        for block in super().blocks():
            rows = slice(at, at + len(block))
            product = (b @ a[:, rows]).T if self.transposed else b[rows] @ a
            at += len(block)
            yield product.mul_(self.scale).add_(block)


def merged(
    plain: Mapping[str, StoredTensor], adapters: Mapping[str, Adapter], alpha: float, known: Set[str] | None
) -> dict[str, MergedTensor]:
    """The weights that have adapters, with the adapters added. `known`: weights that are (in, out); None: the
    model has no class that tells."""
    layouts = {name: _layout(plain[name], adapter) for name, adapter in adapters.items()}
    if known is None:  # a square weight is oriented as the others of its model
        transposed = ("in, out", "") if "in, out" in layouts.values() else ()
        known = {name for name, layout in layouts.items() if layout in transposed}
    found = {}
    for name, adapter in adapters.items():
        scale, flipped = alpha / adapter.rank, name in known
        found[name] = MergedTensor(**vars(plain[name]), adapter=adapter, scale=scale, transposed=flipped)
    return found


def require_alpha(alpha: float | None, where: str) -> float:
    """Raises ConfigError when the adapters' scale is unknown: a wrong guess would be a wrong model."""
    if alpha is None:
        rule = f"{where} has adapters but does not say their lora_alpha"
        remedy = "--lora-alpha <actor_rollout_ref.model.lora_alpha of the run>"
        raise ConfigError.one("--lora-alpha", None, rule, remedy)
    return alpha


def peft_names(adapters: Iterable[Adapter]) -> dict[str, StoredTensor]:
    """The matrices by the names of peft's files."""
    found = {}
    for adapter in adapters:
        found[f"{PEFT}{adapter.module}.lora_A.weight"] = adapter.a
        found[f"{PEFT}{adapter.module}.lora_B.weight"] = adapter.b
    return found


def peft_config(
    adapted: Collection[MergedTensor], names: Collection[str], *, alpha: float, head: str
) -> dict[str, Any]:
    """adapter_config.json. `names`: all tensors of the model, to find the shortest list of target modules.
    Raises ConfigError when ranks differ."""
    ranks = sorted({weight.adapter.rank for weight in adapted})
    if len(ranks) > 1:
        rule = f"the adapters have different ranks: {ranks}"
        raise ConfigError.one("--lora", "adapter", rule, "--lora merged")
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if head == "value" else "CAUSAL_LM",
        "r": ranks[0],
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(weight.transposed for weight in adapted),
        "target_modules": _target_modules({weight.adapter.module for weight in adapted}, names),
        "inference_mode": True,
    }


def _target_modules(modules: Collection[str], names: Collection[str]) -> list[str]:
    """The last parts of the modules' names if they match these modules alone, else the whole names."""
    short = {module.rpartition(".")[2] for module in modules}
    weights = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    meant = {name for name in weights if name.rpartition(".")[2] in short}
    return sorted(short if meant == set(modules) else modules)


def _layout(weight: StoredTensor, adapter: Adapter) -> str:
    """The weight's orientation: "out, in", "in, out", or "" for a square weight, which leaves it open."""
    into, out = adapter.a.shape[1], adapter.b.shape[0]
    if adapter.b.shape[1] != adapter.rank or weight.shape not in ((out, into), (into, out)):
        shapes = f"{list(weight.shape)}, {list(adapter.a.shape)} and {list(adapter.b.shape)}"
        raise ConfigError.one(adapter.weight, None, f"weight, A and B do not fit together: {shapes}")
    if into == out:
        return ""
    return "out, in" if weight.shape == (out, into) else "in, out"
