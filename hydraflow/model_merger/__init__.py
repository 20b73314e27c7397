"""Sharded checkpoints to Hugging Face directories and back: `python -m hydraflow.model_merger
merge|test|info|split`.

As a library: `hydraflow.model_merger.load_state_dict(CHECKPOINT)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def load_state_dict(
    checkpoint: str | Path, *, dtype: str = "auto", trust_remote_code: bool = False
) -> dict[str, torch.Tensor]:
    """All weights by the names that `model.load_state_dict` knows; see `library.load_state_dict`."""
    from hydraflow.model_merger import library

    return library.load_state_dict(checkpoint, dtype=dtype, trust_remote_code=trust_remote_code)
