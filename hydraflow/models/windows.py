"""Sliding windows of attention, as a model's configuration gives them.

In: a configuration of transformers or of a model's own code. Out: a layer's window. Left out on purpose:
windows that only a model's code knows.
"""

from __future__ import annotations

import math
from typing import Any

from hydraflow.models.config_keys import is_read, is_transformers, read


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
    if kinds := read(config, "layer_types"):
        slides = layer is not None and kinds[layer] == "sliding_attention"
    elif is_transformers(config):
        slides = is_read(config, "sliding_window")
    else:
        slides = getattr(config, "use_sliding_window", True) is not False
    return window if slides else None
