"""Which keys shape training: a run goes on only with the same values for them.

In: a configuration and its plan. Out: values by key, their hash, and the differences from those that a
checkpoint carries. Every key shapes training unless `FREE` or `SIZES` lists it, so a new key is safe until
someone says otherwise. Left out on purpose: what the files behind the paths hold; the data loader knows how
many rows there were.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from hydraflow.batch_plan.parts import RolePlan
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.engine.config import OptimConfig
from hydraflow.errors import Problem
from hydraflow.redact import fingerprinted, public
from hydraflow.schema import PPOConfig, SFTConfig

TOTAL = "trainer.total_training_steps"
SHAPING_TRAINER_KEYS = ("trainer.seed", "trainer.critic_warmup")
FREE = (
    # how the run is started, watched, judged and kept
    *("strict", "debug", "log.*", "global_profiler.*"),
    *("trainer.*", "ray_init.*", "cluster.*", "recipe.cache_dir", "*.checkpoint.*", "checkpoint.*"),
    # what limits a reward function: a run that ended for a limit goes on with another one
    *("reward.num_workers", "reward.timeout", "reward.max_memory", "reward.max_failed_share"),
    *("data.val_*", "*.val_kwargs.*", "*.probs_diff_limit"),
    # where it runs and how the model lies on the devices: another number of ranks gives the same gradients
    # but for rounding
    *(
        "*.device_mapping",
        "*.nnodes",
        "*.n_gpus_per_node",
        "*parallel_size",
        "*.agent.num_workers",
        "*.enable_resource_pool",
    ),
    *(
        "*fsdp_config.reshard_after_forward",
        "*fsdp_config.*offload",
        "*fsdp_config.head_chunk_tokens",
        "*fsdp_config.wrap_policy.*",
    ),
    *(
        "*fsdp_config.fsdp_size",
        "*.megatron.*offload",
        "*.megatron.sequence_parallel",
        "*.megatron.use_distributed_optimizer",
    ),
    # how a mini-batch is cut into forward passes, and what is recomputed
    *(
        "*micro_batch_size_per_gpu",
        "*use_dynamic_bsz",
        "*max_token_len_per_gpu",
        "*.use_remove_padding",
        "model.use_remove_padding",
    ),
    *("*enable_gradient_checkpointing", "*trust_remote_code"),
    # how the generation engine uses its memory
    *(
        "*.rollout.max_num_seqs",
        "*.rollout.max_num_batched_tokens",
        "*.rollout.max_model_len",
        "*.rollout.gpu_memory_utilization",
    ),
    *("*.rollout.update_weights_bucket_megabytes", "*.rollout.engine_kwargs.*"),
)
"""Patterns of keys that may change when a run goes on."""
SIZES = (
    "batch.*",
    "*.ppo_mini_batch_size",
    "*.ppo_epochs",
    "*.shuffle",
    "*.rollout.n",
    "data.train_batch_size",
)
"""Patterns of keys that say what the plan says better: several of them can be written in several ways."""


@dataclass(frozen=True)
class Identity:
    """What shapes a run's training."""

    values: dict[str, Any]
    """Plain values by key; of a secret what tells it from another one (`redact.fingerprinted`)."""

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True, default=str).encode()).hexdigest()[:12]

    @property
    def knows_its_end(self) -> bool:
        """Whether the number of training steps shapes the run: its learning rate follows it."""
        return TOTAL in self.values

    def differences(self, stored: Mapping[str, Any], *, where: str) -> list[Problem]:
        """What this run has otherwise than the checkpoint `where`. Keys that only one of the two knows are of
        another version."""
        mine = json.loads(json.dumps(self.values, default=str))
        return [  # checkpoints of earlier versions have secrets as they were given
            _difference(key, mine[key], stored[key], where)
            for key in mine
            if key in stored and mine[key] != fingerprinted(stored[key], key)
        ]


def identity_of(config: PPOConfig | SFTConfig, plan: BatchPlan | SFTPlan) -> Identity:
    """The identity of a run. `config` is as the user gave it: what a recipe makes is known by the recipe's
    parameters."""
    values = {key: value for key, value in _flat(asdict(config)) if _shapes(key, plan)}
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


def _shapes(key: str, plan: BatchPlan | SFTPlan) -> bool:
    if key in SHAPING_TRAINER_KEYS or key == "data.shuffle":
        return True
    if isinstance(plan, BatchPlan) and (
        (plan.critic is None and key.startswith("critic."))
        or (plan.ref is None and key.startswith("actor_rollout_ref.ref."))
    ):
        return False
    return not any(fnmatchcase(key, pattern) for pattern in (*FREE, *SIZES))


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    assert not is_dataclass(section)
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(value: Any) -> str:
    """As one writes it on a command line."""
    return value if isinstance(value, str) else json.dumps(value)
