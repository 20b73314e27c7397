"""Which keys of a config.json its type reads.

In: a configuration of transformers or of a model's own code. Out: whether a key counts. A config.json may
have keys that its type ignores, for example after a conversion from Mistral to Llama.
"""

from __future__ import annotations

from typing import Any


def is_transformers(config: Any) -> bool:
    """Whether the configuration's type is one of transformers', not of a model's own code."""
    return type(config).__module__.startswith("transformers.models.")


def is_read(config: Any, key: str) -> bool:
    """Whether the configuration's type has the key. Of a model's own code this is not known: True."""
    kind = type(config)
    return not is_transformers(config) or hasattr(kind, key) or key in kind.attribute_map
