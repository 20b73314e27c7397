"""Checks that ranks can share a model's rows (Ulysses sequence parallelism).

In: a model's configuration. Out: an error that names the sizes that fit. Left out on purpose: how rows are
shared (`engine/token_exchange.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraflow.batch_plan.parts import divisors
from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import causal_class, packable
from hydraflow.options import listed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY = "fsdp_config.ulysses_sequence_parallel_size"
"""Key of the size, within a role's section."""


def require_shareable(
    config: PreTrainedConfig, model: ModelConfig, size: int, *, field: str, key: str = KEY
) -> None:
    """Raises ConfigError for a model whose rows `size` ranks cannot share. `field`: the key of `model`;
    `key`: that of the size."""
    if size == 1:
        return
    if not model.use_remove_padding:
        packs, rule = f"{field}.use_remove_padding", f"{key}={size} needs packed rows"
        raise ConfigError.one(packs, "false", rule, f"{packs}=true or {key}=1")
    if not packable(config, causal_class(config, model, field=field)):
        raise not_shareable(config, size, "more than plain attention mixes their tokens", key=key)
    heads = config.get_text_config().num_attention_heads
    if heads % size:
        legal = divisors(heads)
        rule = f"must divide the {heads} attention heads of the model: {listed(list(map(str, legal)))}"
        raise ConfigError.one(key, size, rule, f"{key}={max(n for n in legal if n < size)}")


def not_shareable(config: PreTrainedConfig, size: int, why: str, *, key: str = KEY) -> ConfigError:
    """The error for a model whose rows cannot be packed."""
    rule = f"needs packed rows, and those of a {config.model_type} model cannot be packed: {why}"
    return ConfigError.one(key, size, rule, f"{key}=1")
