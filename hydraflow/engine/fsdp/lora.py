"""Training low-rank adapters: W + scale * B A, of which only A and B are trained.

In: an unsharded Hugging Face model and a `ModelConfig`. Out: the same model with adapters in it (peft's
layers), merged weights for sampling, and the model with its adapters disabled. Left out on purpose: adapters
on embeddings, several adapters at a time, peft's other methods.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hydraflow.errors import ConfigError, first_line
from hydraflow.models.adapters import (
    ALL_LINEAR,
    SIDES,
    UNCALLED,
    adapter_name,
    is_adapter,
    linear_layers,
    subclassed_linear_layers,
    target_names,
)
from hydraflow.models.config import ModelConfig
from hydraflow.models.fit import require_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ADAPTER = "default"

log = logging.getLogger(__name__)


def add_adapters(hf: nn.Module, model: ModelConfig, dtype: torch.dtype, *, field: str) -> None:
    """Adds adapters of type `dtype` to `hf` and freezes everything else. Experts that are one tensor per
    layer are not linear layers and get none.

    Raises ConfigError when target_modules names no linear layer; a list in which only some names match gives
    a warning. `hf` may be on the meta device, for checking.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = model.target_modules if isinstance(model.target_modules, str) else list(model.target_modules)
    key, linear, remedy = f"{field}.target_modules", linear_layers(hf), ALL_LINEAR
    if not target_names(ALL_LINEAR, hf):
        linear = subclassed_linear_layers(hf)
        if not linear:
            rule = "the model has no linear layer for adapters besides its output matrix"
            raise ConfigError.one(key, targets, rule, f"{field}.lora_rank=0")
        remedy = f"[{','.join(linear)}]"
        if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
            rule = "means layers of class nn.Linear itself, but this model's are of subclasses of it"
            raise ConfigError.one(key, targets, rule, f"{key}={remedy}")
    if lost := _unmatched(targets, hf):  # peft ignores such names if others match
        rule = f"the model has no module {' and no '.join(lost)}; its linear layers are {', '.join(linear)}"
        if len(lost) == len(targets):
            raise ConfigError.one(key, targets, rule, f"{key}={remedy}")
        log.warning("%s: %s", key, rule)
    try:
        config = LoraConfig(
            r=model.lora_rank,
            lora_alpha=model.lora_alpha,
            target_modules=target_names(targets, hf),
            lora_dropout=0.0,
            bias="none",
        )
        # wrapped, so that peft does not recognise the model: in a known mixture of experts it would take
        # `up_proj` to mean all experts
        inject_adapter_in_model(config, nn.ModuleDict({"model": hf}), adapter_name=ADAPTER)
    except (ValueError, re.error) as error:
        rule = f"names no linear layer of this model ({first_line(error)}); they are {', '.join(linear)}"
        raise ConfigError.one(key, targets, rule, f"{key}={remedy}") from error
    _refuse_layers(hf, targets, key, remedy)
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        parameter.data = parameter.data.to(dtype)


def _refuse_layers(hf: nn.Module, targets: str | list[str], key: str, remedy: str) -> None:
    """Raises ConfigError when a layer has an adapter that cannot be trained."""

    def without(layer: str) -> str:
        kept = [target for target in targets if not f".{layer}".endswith(f".{target}")]
        return f"{key}=[{','.join(kept)}]" if kept and not isinstance(targets, str) else f"{key}={remedy}"

    if any(".lora_embedding_" in name for name, _ in hf.named_parameters()):
        raise ConfigError.one(key, targets, "embeddings cannot have adapters", f"{key}={remedy}")
    layers = [name.removesuffix(".weight") for name in adapted(hf)]
    if uncalled := [name for name in layers if name.endswith(UNCALLED)]:
        rule = f"{uncalled[0]} cannot have an adapter: the model's code reads its weight without calling it"
        raise ConfigError.one(key, targets, rule, without(uncalled[0]))
    if (head := _tied_head(hf)) is not None:
        rule = f"an adapter of {head} cannot be kept apart from the embeddings, which share its weight"
        raise ConfigError.one(key, targets, rule, without(head))


def require_targets(model: ModelConfig, config: PreTrainedConfig, *, head: str, field: str) -> None:
    """Raises ConfigError when `target_modules` cannot be satisfied."""
    module = require_model(model, config, head=head, field=field)
    if module is not None:
        add_adapters(module.hf, model, torch.float32, field=field)


def _tied_head(hf: Any) -> str | None:
    """The name of the output matrix, if it has an adapter and shares its weight with the embeddings."""
    from peft.tuners.lora import LoraLayer

    head = hf.get_output_embeddings() if hasattr(hf, "get_output_embeddings") else None
    if not isinstance(head, LoraLayer) or not hf.config.get_text_config().tie_word_embeddings:
        return None
    return next(name for name, module in hf.named_modules() if module is head)


def _unmatched(targets: str | list[str], hf: nn.Module) -> list[str]:
    """Entries of a list that match no module; patterns are checked by `target_names`."""
    if isinstance(targets, str):
        return []
    names = [f".{name}" for name, _ in hf.named_modules()]
    return [target for target in targets if not any(name.endswith(f".{target}") for name in names)]


def initial_value(name: str, shape: torch.Size, dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    """Initial value of an adapter: A uniform as in a linear layer, B zero, so that the model starts unchanged
    (Hu et al. 2021)."""
    if ".lora_B." in name:
        return torch.zeros(shape, dtype=dtype)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=draw).to(dtype)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Disables the adapters inside the block."""
    layers = adapted(module).values()
    try:
        for layer in layers:
            # peft's enable_adapters() also flips requires_grad, which sharded parameters must keep
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapted(module: nn.Module) -> dict[str, Any]:
    """peft's layers, by the names that their weights had before adapters were added."""
    if "peft" not in sys.modules:
        return {}  # no adapters without peft, and importing it takes half a second
    from peft.tuners.lora import LoraLayer

    return {f"{name}.weight": layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


def sent_name(name: str) -> str:
    """The transfer name of an adapter's weight.

    >>> sent_name("layers.0.q_proj.lora_A.default.weight")
    'layers.0.q_proj.lora_A.weight'
    """
    layer, side, _, _ = name.rsplit(".", 3)
    return adapter_name(layer, side)


def scaled(name: str, weight: torch.Tensor, layers: Mapping[str, Any]) -> torch.Tensor:
    """An adapter's weight as it is sent: B includes the scale, so that W + B A is the merged weight.

    layers: from `adapted`.
    """
    layer, side, _, _ = name.rsplit(".", 3)
    return weight * layers[f"{layer}.weight"].scaling[ADAPTER] if side == SIDES[1] else weight


def add_product(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layer: Any) -> torch.Tensor:
    """The merged weight as a new tensor. weight (out, in), a (rank, in), b (out, rank)."""
    product = b @ a
    return weight + (product.T if layer.fan_in_fan_out else product) * layer.scaling[ADAPTER]
