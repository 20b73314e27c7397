"""What ranks do in the tests of the merger with the Megatron engine; in a file of its own so that spawned
processes can import it."""

from __future__ import annotations

from pathlib import Path

from engine import megatron_jobs, megatron_models, rank_jobs

CASES = {
    "tied": ("qwen2", "policy", "fp32"),
    "untied": ("qwen3", "policy", "fp32"),
    "bf16": ("qwen3", "policy", "bf16"),
    "value": ("qwen3", "value", "fp32"),
}
"""Case -> family, head and type."""


def save_all(models: str, folder: str) -> None:
    """A checkpoint of each case as training saves it, by two tensor-parallel ranks on each of two stages; and
    beside it what the engine itself exports."""
    for case, (family, head, dtype) in CASES.items():
        options = {"megatron": megatron_models.sizes(2, 2, dtype=dtype), "head": head}
        engine = megatron_jobs.make_engine(f"{models}/{family}", options)
        engine.snapshot(rank_jobs.CONTENTS).write(Path(folder) / case / "actor")
        engine.save_hf(Path(folder) / case / "exported")
