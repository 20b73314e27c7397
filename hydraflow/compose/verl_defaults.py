"""The keys of verl 0.9.1 and their defaults, taken from its public YAML files.

In: `verl_data/defaults.yaml` and `defaults_megatron.yaml`. Out: `leaves()`: dotted key -> default; `...` if
it follows another key in verl.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from hydraflow.compose.verl_table import read

VERSION = "0.9.1"


@cache
def leaves(*, megatron: bool = True) -> dict[str, Any]:
    """Key -> default of `verl.trainer.main_ppo`; `megatron` adds those of `model_engine=megatron`.

    >>> leaves()["trainer.total_epochs"], leaves()["actor_rollout_ref.ref.strategy"]
    (30, Ellipsis)
    """
    return dict(_leaves("defaults")) | (dict(_leaves("defaults_megatron")) if megatron else {})


def _leaves(file: str) -> Iterator[tuple[str, Any]]:
    for paragraph in read(file):
        for name, default in paragraph["defaults"].items():
            value = ... if default == "..." else default
            yield from ((f"{section}.{name}", value) for section in paragraph["sections"])
