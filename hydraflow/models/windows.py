"""Sliding windows of attention, as a model's configuration gives them.

In: a configuration of transformers or of a model's own code. Out: a layer's window, and the configuration as
caches and other engines must see it. Left out on purpose: windows that only a model's code knows.

Transformers' caches, vLLM and SGLang obey these keys even if the model's type ignores them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hydraflow.models.chunks import POST_PROCESSING
from hydraflow.models.config_keys import is_read, is_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OF_CACHES = ("sliding_window", "attention_chunk_size", "layer_types")
"""Keys from which transformers' caches derive how many tokens a layer keeps."""
WINDOWED = ("sliding_attention", "chunked_attention")


def layer_types(config: Any) -> Sequence[str] | None:
    """What mixes tokens in each layer; None if the type does not say so."""
    return getattr(config, "layer_types", None) if is_read(config, "layer_types") else None


def without_ignored(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy without the keys of `OF_CACHES` and `POST_PROCESSING` that the text model's type ignores."""
    copied = copy.deepcopy(config)
    text = copied.get_text_config(decoder=True)
    for key in (*OF_CACHES, *POST_PROCESSING):
        # ModernBERT derives the window itself, beside its types of layers
        derived = key == "sliding_window" and is_read(text, "layer_types")
        if not is_read(text, key) and not derived:
            vars(text).pop(key, None)
    return copied


def for_cache(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text model's configuration as transformers' caches must see it, copied. Code outside transformers
    may ignore windows too, so its caches keep all tokens, which is right whatever its masks hide."""
    text = without_ignored(config).get_text_config(decoder=True)
    if not is_transformers(text):
        kinds = layer_types(text)
        full = kinds and ["full_attention" if kind in WINDOWED else kind for kind in kinds]
        for key, value in {"sliding_window": None, "attention_chunk_size": None, "layer_types": full}.items():
            with suppress(AttributeError):  # a property
                setattr(text, key, value)
    return text


def window_of(config: Any, layer: int | None) -> int | None:
    """How many keys a query of that layer sees at most, its own included; None: all earlier ones. layer:
    None if it is not known, which only configurations with `layer_types` need.

    >>> from transformers import MistralConfig, Qwen2Config
    >>> window_of(MistralConfig(sliding_window=8), None), window_of(MistralConfig(sliding_window=None), None)
    (8, None)
    >>> mixed = Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    >>> window_of(mixed, 0), window_of(mixed, 1)
    (None, 8)
    """
    window: int | None = getattr(config, "sliding_window", None)
    if not window or window >= (getattr(config, "max_position_embeddings", None) or math.inf):
        return None
    if kinds := layer_types(config):
        slides = layer is not None and kinds[layer] == "sliding_attention"
    elif is_transformers(config):
        slides = is_read(config, "sliding_window")
    else:
        slides = getattr(config, "use_sliding_window", True) is not False
    return window if slides else None
