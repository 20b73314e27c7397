"""Which keys shape training: a run resumes only with the same values for them.

In: a configuration and its plan. Out: values by key, their hash, and the differences from those in a
checkpoint. Every key shapes training unless its field says otherwise (`free`, `in_plan=True` of
`options.py`), so a new key is safe. Left out on purpose: the contents of the files that keys name; the data
loader compares only the number of rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
from hydraflow.tracking.base import flat

TOTAL = "trainer.total_training_steps"


@dataclass(frozen=True)
class Identity:
    """What shapes a run's training."""

    values: dict[str, Any]
    """Plain values by key; secrets as fingerprints (`redact.fingerprinted`)."""
    mappings: tuple[str, ...] = ()
    """Keys whose value is a mapping, empty or not; its entries are in `values` one by one."""

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
        belong to another version and are ignored, except entries of a mapping that both have."""
        mine = json.loads(json.dumps(self.values, default=str))
        differing = [  # checkpoints of earlier versions contain secrets verbatim
            key for key in mine if key in stored and mine[key] != fingerprinted(stored[key], key)
        ]
        for mapping in self.mappings:
            prefix = f"{mapping}."
            ours = {key for key in mine if f"{key}.".startswith(prefix)}
            theirs = {key for key in stored if f"{key}.".startswith(prefix)}
            differing += sorted((ours ^ theirs) - {mapping}) if theirs else []
        return [_difference(key, mine, stored, where) for key in differing]


def identity_of(config: PPOConfig | SupervisedConfig, plan: BatchPlan | SFTPlan) -> Identity:
    """The identity of a run. `config` is as the user gave it, because a recipe's assets are identified by its
    parameters."""
    absent = []
    if isinstance(plan, BatchPlan):
        roles = {"critic.": plan.critic, "actor_rollout_ref.ref.": plan.ref}
        absent = [section for section, role in roles.items() if role is None]
    leaves = (leaf for leaf in walk(config) if not leaf.key.startswith(tuple(absent)))
    shaping = [leaf for leaf in leaves if _shapes(leaf)]
    values: dict[str, Any] = dict(flat({leaf.key: leaf.value for leaf in shaping}))
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
    mappings = tuple(leaf.key for leaf in shaping if leaf.value is None or isinstance(leaf.value, dict))
    return Identity({key: fingerprinted(value, key) for key, value in values.items()}, mappings)


def _difference(key: str, mine: Mapping[str, Any], stored: Mapping[str, Any], where: str) -> Problem:
    """The problem of one key. An entry of a mapping may be in only one of the two."""
    value = _shown(public(mine[key], key)) if key in mine else None
    if key not in stored:
        return Problem(key, value, f"{where} was trained without it", f"leave out {key}")
    known, remedy = public(stored[key], key), key if key in mine else f"+{key}"
    if known != stored[key]:
        rule = f"{where} was trained with another value, which is hidden"
        return Problem(key, value, rule, f"{remedy}=<the earlier value>")
    return Problem(key, value, f"{where} was trained with {_shown(known)}", f"{remedy}={_shown(known)}")


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
    """Whether the learning rate of a step depends on the total number of steps."""
    return optim.lr_scheduler_type != "constant" or (
        optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    )


def _shapes(leaf: Leaf) -> bool:
    """Whether a key shapes training: as its field says, else as the nearest section above that says it."""
    nearest_first = [leaf.option, *(section.option for section in reversed(leaf.above))]
    if any(option.in_plan for option in nearest_first):
        return False
    given = [option.shapes_training for option in nearest_first if option.shapes_training is not None]
    return given[0] if given else True


def _shown(value: Any) -> str:
    """In command-line syntax."""
    return value if isinstance(value, str) else json.dumps(value)
