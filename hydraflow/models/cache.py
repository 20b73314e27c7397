"""Where the files of a model on the Hugging Face hub lie on this machine.

In: a name on the hub. Out: a folder. Standard library and huggingface_hub, which is imported only where a
name is looked up. Left out on purpose: downloads, and which paths are such names (`system/paths.py`).
"""

from __future__ import annotations

from pathlib import Path


def cached_snapshot(name: str) -> Path | None:
    """The folder in the hub's cache that an earlier run has downloaded a model to; None: there is none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
