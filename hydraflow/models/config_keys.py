"""Which keys of a config.json its type reads.

In: a configuration of transformers or of a model's own code. Out: whether a key counts, its value, and copies
without the keys that do not. A config.json may have keys that its type ignores, for example after a
conversion from Mistral to Llama; transformers' caches, vLLM and SGLang obey them even so.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hydraflow.models.chunks import POST_PROCESSING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OF_CACHES = ("sliding_window", "attention_chunk_size", "layer_types")
"""Keys from which transformers' caches derive how many tokens a layer keeps."""
WINDOWED = ("sliding_attention", "chunked_attention")


def is_transformers(config: Any) -> bool:
    """Whether the configuration's type is one of transformers', not of a model's own code."""
    return type(config).__module__.startswith("transformers.models.")


def is_read(config: Any, key: str) -> bool:
    """Whether the configuration's type has the key. Of a model's own code this is not known: True."""
    kind = type(config)
    return not is_transformers(config) or hasattr(kind, key) or key in kind.attribute_map


def read(config: Any, key: str) -> Any:
    """The key's value; None if there is none, or the configuration's type ignores it."""
    return getattr(config, key, None) if is_read(config, key) else None


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
        kinds = read(text, "layer_types")
        full = kinds and ["full_attention" if kind in WINDOWED else kind for kind in kinds]
        for key, value in {"sliding_window": None, "attention_chunk_size": None, "layer_types": full}.items():
            with suppress(AttributeError):  # a property
                setattr(text, key, value)
    return text
