"""The keys of verl 0.9.1 and their defaults, taken from its public YAML files.

In: `verl_data/defaults_*.yaml`. Out: `leaves()`: dotted key -> default; `...` if it follows another key in
verl. Left out on purpose: the keys of main_generation and main_eval.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from hydraflow.compose.verl_table import read
from hydraflow.schema import PPOConfig, SFTConfig

VERSION = "0.9.1"
_FILES: dict[type, tuple[str, ...]] = {
    PPOConfig: ("defaults_ppo", "defaults_ppo_megatron"),
    SFTConfig: ("defaults_sft",),
}


@cache
def leaves(schema: type, *, megatron: bool = True) -> dict[str, Any]:
    """Key -> default of verl's command; `megatron` adds those of `model_engine=megatron`.

    >>> ppo = leaves(PPOConfig)
    >>> ppo["trainer.total_epochs"], ppo["actor_rollout_ref.ref.strategy"]
    (30, Ellipsis)
    """
    files = _FILES.get(schema, ())
    return {key: default for file in (files if megatron else files[:1]) for key, default in _leaves(file)}


def _leaves(file: str) -> Iterator[tuple[str, Any]]:
    for paragraph in read(file):
        defaults = paragraph["defaults"]
        if "like" in paragraph:
            whole, like = leaves(PPOConfig, megatron=False), f"{paragraph['like']}."
            shared = {key.removeprefix(like): whole[key] for key in whole if key.startswith(like)}
            defaults = shared | defaults
        for name, default in defaults.items():
            value = ... if default == "..." else default
            yield from ((f"{section}.{name}", value) for section in paragraph["sections"])
