"""Which model paths are names on the Hugging Face hub, and where such a model's files lie on this machine.

In: a path as the user wrote it. Out: a folder. Standard library and huggingface_hub, which is imported only where a name is looked up.
Left out on purpose: downloads.
"""

from __future__ import annotations

from pathlib import Path


def is_hub_name(path: str) -> bool:
    """Whether a model's path is no folder of this machine, and can be none.

    >>> is_hub_name("Qwen/Qwen3-8B"), is_hub_name("/models/qwen"), is_hub_name("models/qwen/8b")
    (True, False, False)
    """
    return path.count("/") <= 1 and not path.startswith(("/", ".", "~")) and not Path(path).exists()


def cached_snapshot(name: str) -> Path | None:
    """The folder in the hub's cache that an earlier run has downloaded a model to; None: there is none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
