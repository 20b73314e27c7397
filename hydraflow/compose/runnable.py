"""Features that the planner accepts but `main_ppo` does not implement yet.

In: a configuration. Out: one problem per key, which says what the key would do. This is declared beside the
key's field (`options.py`), and removed when the feature is implemented; here are the rules across keys. Left
out on purpose: whether the batch sizes fit together (`batch_plan/`), and which values are legal (`rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hydraflow.errors import Problem, shown
from hydraflow.options import Leaf, walk
from hydraflow.schema import PPOConfig


def problems(config: PPOConfig) -> list[Problem]:
    """One problem for each key that asks for an unimplemented feature.

    >>> config = PPOConfig()
    >>> config.actor_rollout_ref.rollout.name = "vllm"
    >>> print(*problems(config))
    actor_rollout_ref.rollout.name=vllm: is not implemented yet, only planned: it would sample with vLLM
          -> actor_rollout_ref.rollout.name=native
    """
    defaults = {leaf.key: leaf.value for leaf in walk(PPOConfig())}
    found = []
    for leaf in walk(config):
        for what in _asked(leaf, config):
            rule = f"is not implemented yet, only planned: it would {what}"
            found.append(
                Problem(leaf.key, shown(leaf.value), rule, f"{leaf.key}={shown(defaults[leaf.key])}")
            )
    return found


def _asked(leaf: Leaf, config: PPOConfig) -> Iterator[str]:
    if leaf.value is None:
        return
    for planned in leaf.option.planned:
        if planned.values(leaf.value):
            yield planned.what.format(**vars(leaf.section), value=leaf.value)
    if leaf.key.endswith(".fsdp_size") and leaf.value not in (-1, _devices(config)):
        yield f"shard each copy of the model among {leaf.value} devices"


def _devices(config: PPOConfig) -> int | None:
    """Number of training devices, if the configuration sets it."""
    per_node = config.trainer.n_gpus_per_node
    return per_node and per_node * config.trainer.nnodes
