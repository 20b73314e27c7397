"""Which keys shape training: a run resumes only with the same values for them.

In: a configuration and its plan. Out: values by key, their hash, and the differences from those that a
checkpoint carries. Every key shapes training unless its field says otherwise (`shapes_training=False`,
`in_plan=True` of `options.py`), so a new key is safe. Left out on purpose: what the files behind the paths
hold; the data loader knows how many rows there were.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydraflow.batch_plan.parts import RolePlan
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.engine.config import OptimConfig
from hydraflow.errors import Problem
from hydraflow.options import Leaf, walk
from hydraflow.redact import fingerprinted, public
from hydraflow.schema import PPOConfig, SupervisedConfig

TOTAL = "trainer.total_training_steps"


@dataclass(frozen=True)
class Identity:
    """What shapes a run's training."""

    values: dict[str, Any]
    """Plain values by key; secrets as fingerprints (`redact.fingerprinted`)."""

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True, default=str).encode()).hexdigest()[:12]

    @property
    def knows_its_end(self) -> bool:
        """Whether the number of training steps shapes the run, because its learning rate depends on it."""
        return TOTAL in self.values

    def differences(self, stored: Mapping[str, Any], *, where: str) -> list[Problem]:
        """Problems where this run differs from the checkpoint `where`. Keys that only one of the two has
        belong to another version and are ignored."""
        mine = json.loads(json.dumps(self.values, default=str))
        return [  # checkpoints of earlier versions contain secrets verbatim
            _difference(key, mine[key], stored[key], where)
            for key in mine
            if key in stored and mine[key] != fingerprinted(stored[key], key)
        ]


def identity_of(config: PPOConfig | SupervisedConfig, plan: BatchPlan | SFTPlan) -> Identity:
    """The identity of a run. `config` is as the user gave it: a recipe's assets are identified by its
    parameters."""
    values = dict(_shaping(config, plan))
    if isinstance(config, PPOConfig):
        assert isinstance(plan, BatchPlan)
        values |= _ppo_sizes(plan)
        rates = [config.actor_rollout_ref.actor.optim, *([config.critic.optim] if plan.critic else [])]
    else:
        assert isinstance(plan, SFTPlan)
        values["data.train_batch_size"] = plan.conversations_per_step
        values["data.shuffle"] = config.data.shuffle
        rates = [config.optim]
    if any(map(_follows_the_total, rates)):
        values[TOTAL] = plan.total_steps
    return Identity({key: fingerprinted(value, key) for key, value in values.items()})


def _difference(key: str, mine: Any, stored: Any, where: str) -> Problem:
    known = public(stored, key)
    if known != stored:
        return Problem(
            key,
            _shown(public(mine, key)),
            f"{where} was trained with another value, which is hidden",
            f"{key}=<its value then>",
        )
    return Problem(key, _shown(mine), f"{where} was trained with {_shown(stored)}", f"{key}={_shown(stored)}")


def _ppo_sizes(plan: BatchPlan) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "data.train_batch_size": plan.prompts_per_step,
        "actor_rollout_ref.rollout.n": plan.samples_per_prompt,
    }
    roles: dict[str, RolePlan | None] = {"actor_rollout_ref.actor": plan.actor, "critic": plan.critic}
    for prefix, role in roles.items():
        if role is not None:
            sizes[f"{prefix}.ppo_mini_batch_size"] = role.mini_batch_prompts
            sizes[f"{prefix}.ppo_epochs"] = role.epochs
            sizes[f"{prefix}.shuffle"] = role.shuffle
    return sizes


def _follows_the_total(optim: OptimConfig) -> bool:
    """Whether the learning rate of a step depends on how many steps there will be."""
    return optim.lr_scheduler_type != "constant" or (
        optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    )


def _shaping(config: PPOConfig | SupervisedConfig, plan: BatchPlan | SFTPlan) -> Iterator[tuple[str, Any]]:
    """The keys that shape training, and their values; entries of mappings one by one."""
    for leaf in walk(config):
        if _shapes(leaf) and not (isinstance(plan, BatchPlan) and _has_no_role(leaf.key, plan)):
            yield from _entries(leaf.key, leaf.value)


def _shapes(leaf: Leaf) -> bool:
    """As the field says; else as the nearest section above it that says something."""
    on_the_way = [leaf.option, *(section.option for section in reversed(leaf.above))]
    if any(option.in_plan for option in on_the_way):
        return False
    given = [option.shapes_training for option in on_the_way if option.shapes_training is not None]
    return given[0] if given else True


def _has_no_role(key: str, plan: BatchPlan) -> bool:
    return (plan.critic is None and key.startswith("critic.")) or (
        plan.ref is None and key.startswith("actor_rollout_ref.ref.")
    )


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _entries(f"{key}.{name}", item)
    else:
        yield key, value


def _shown(value: Any) -> str:
    """In command-line syntax."""
    return value if isinstance(value, str) else json.dumps(value)
