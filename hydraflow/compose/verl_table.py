"""How verl's keys that are not ours are handled: renamed, accepted without effect, or not supported yet.

In: `verl_data/keys.yaml`, read when a key of verl's is first looked up. Out: tables from patterns to rows.
In a pattern `{a,b}` matches either, `*` one name, `**` any names. The target is verl 0.9.1; rows
for names of other versions are those that `verl_defaults.py` does not have. A key of ours needs no row.
Left out on purpose: how rows are applied (`verl.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Alias:
    """Another name of a key of ours."""

    new: str
    """Our name, with the same braces as the pattern."""
    why: str = ""
    """A remark for the user; empty: none."""


@dataclass(frozen=True)
class Ignored:
    """A key that is accepted and has no effect."""

    why: str


@dataclass(frozen=True)
class Unsupported:
    """A key that is rejected, unless its value is verl's default or another that switches it off."""

    would: str
    """What it does in verl, as in "it would ..."."""
    harmless: tuple[object, ...] = ()
    """Values besides verl's default that have no effect."""
    instead: str = ""
    """Overrides of ours that do something similar."""


@dataclass(frozen=True)
class KeyTables:
    """Rows for keys of verl's that have no counterpart here, by pattern."""

    sections: dict[str, str]
    """Section of verl's -> the section whose keys it holds."""
    ignored: dict[str, Ignored]
    """Keys that verl itself ignores."""
    not_needed: dict[str, Ignored]
    """Keys without a counterpart that do not change what is learned."""
    unsupported: dict[str, Unsupported]
    """Keys that are not supported yet."""
    other_defaults: dict[str, object]
    """Defaults of other versions of verl's."""


OVER_ALL_RANKS = "rows over all data ranks, divided by their number"
"""Remark on a renamed key whose value must be divided."""
SEED = "trainer.seed governs all randomness here"

ALIASES: dict[str, Alias] = {
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.fsdp_config.mixed_precision.param_dtype": Alias(
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.fsdp_config.dtype"
    ),
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.fsdp_config.mixed_precision.reduce_dtype": Alias(
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.fsdp_config.reduce_dtype"
    ),
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.ulysses_sequence_parallel_size": Alias(
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "{actor_rollout_ref.actor,critic}.grad_clip": Alias(
        "{actor_rollout_ref.actor,critic}.optim.clip_grad", "verl 0.9.1 accepts this name and ignores it"
    ),
    "{actor_rollout_ref.actor,critic}.checkpoint.contents": Alias(
        "{actor_rollout_ref.actor,critic}.checkpoint.save_contents"
    ),
    "{actor_rollout_ref.actor,critic}.optim.grad_clip": Alias(
        "{actor_rollout_ref.actor,critic}.optim.clip_grad"
    ),
    "{actor_rollout_ref.actor,critic}.optim.{warmup_style,lr_decay_style}": Alias(
        "{actor_rollout_ref.actor,critic}.optim.{lr_scheduler_type,lr_scheduler_type}"
    ),
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.rollout_n": Alias("actor_rollout_ref.rollout.n"),
    "actor_rollout_ref.ref.strategy": Alias(
        "actor_rollout_ref.actor.strategy", "the reference runs on the actor's engine"
    ),
    "actor_rollout_ref.{actor,ref}.fsdp_config.strategy": Alias("actor_rollout_ref.actor.strategy"),
    "critic.fsdp_config.strategy": Alias("critic.strategy"),
    "actor_rollout_ref.actor.use_remove_padding": Alias("actor_rollout_ref.model.use_remove_padding"),
    "actor_rollout_ref.rollout.{prompt_length,response_length}": Alias(
        "data.{max_prompt_length,max_response_length}"
    ),
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": Alias(
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes"
    ),
    "data.seed": Alias("trainer.seed", SEED),
    "{ray_kwargs,ray_init}.timeline_json_file": Alias("{ray_init,ray_init}.timeline_file"),
    "trainer.profile_steps": Alias("global_profiler.steps"),
    "trainer.val_generations_to_log_to_wandb": Alias("trainer.log_val_generations"),
    "reward_model.num_workers": Alias("reward.num_workers"),
    "reward_model.{enable,enable_resource_pool,nnodes,n_gpus_per_node}": Alias(
        "reward.reward_model.{enable,enable_resource_pool,nnodes,n_gpus_per_node}"
    ),
    "reward_model.model.path": Alias("reward.reward_model.model_path"),
    "reward_model.micro_batch_size_per_gpu": Alias("reward.reward_model.micro_batch_size_per_gpu"),
    "reward_model.forward_max_token_len_per_gpu": Alias("reward.reward_model.max_token_len_per_gpu"),
    "reward.reward_model.rollout.tensor_model_parallel_size": Alias(
        "reward.reward_model.tensor_model_parallel_size"
    ),
    "model_engine": Alias("actor_rollout_ref.actor.strategy and critic.strategy"),
    "actor_rollout_ref.actor.ppo_micro_batch_size": Alias(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", OVER_ALL_RANKS
    ),
    "critic.ppo_micro_batch_size": Alias("critic.ppo_micro_batch_size_per_gpu", OVER_ALL_RANKS),
    "critic.forward_micro_batch_size": Alias("critic.forward_micro_batch_size_per_gpu", OVER_ALL_RANKS),
    "actor_rollout_ref.{ref,rollout}.log_prob_micro_batch_size": Alias(
        "actor_rollout_ref.{ref,rollout}.log_prob_micro_batch_size_per_gpu", OVER_ALL_RANKS
    ),
    "reward_model.micro_batch_size": Alias("reward.reward_model.micro_batch_size_per_gpu", OVER_ALL_RANKS),
}
"""Renamed keys. Those that count rows over all ranks are divided by the data ranks (`verl.py`)."""

OTHER_ALIASES: dict[str, dict[str, str]] = {
    "SFTConfig": {
        "optim.warmup_style": "optim.lr_scheduler_type",
        "optim.lr_decay_style": "optim.lr_scheduler_type",
        "optim.grad_clip": "optim.clip_grad",
    },
    "GenerateConfig": {
        "data.n_samples": "rollout.n",
        "data.output_path": "output.path",
        "rollout.prompt_length": "data.max_prompt_length",
        "rollout.response_length": "data.max_response_length",
    },
}
"""Schema of another entry point -> key of verl's -> ours."""

MEGATRON_FOLLOWS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "param_offload",
    "override_transformer_config",
)
ULYSSES = "fsdp_config.ulysses_sequence_parallel_size"
FOLLOWS: dict[str, str] = {
    **{
        f"actor_rollout_ref.ref.megatron.{name}": f"actor_rollout_ref.actor.megatron.{name}"
        for name in MEGATRON_FOLLOWS
    },
    f"actor_rollout_ref.ref.{ULYSSES}": f"actor_rollout_ref.actor.{ULYSSES}",
    **{
        f"{role}.checkpoint.load_contents": f"{role}.checkpoint.save_contents"
        for role in ("actor_rollout_ref.actor", "critic")
    },
    "critic.loss_agg_mode": "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.rollout.n_gpus_per_node": "trainer.n_gpus_per_node",
}
"""Keys of ours that, if unset, have the value of another, as in verl."""

DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
}
STRATEGIES = {"fsdp": "fsdp2"}
ENGINES = {"hf": "native"}
FILTER_METRICS = {"reward": "score", "seq_final_reward": "seq_reward"}
UNBUILT_ENGINES = ("sglang", "trtllm")
UNBUILT_STRATEGIES = ("fsdp_turbo", "veomni", "torchtitan", "automodel", "mindspeed")
"""Engines of verl that do not exist here."""
VERL_TRACKERS = ("vemlp_wandb", "clearml", "trackio", "rl_insight")
"""Trackers of verl that do not exist here; metrics.jsonl is always written."""


@cache
def tables() -> KeyTables:
    """The tables of `verl_data/keys.yaml`.

    >>> tables().ignored["trainer.esi_redundant_time"].why
    "verl's trainer never reads it"
    """
    content = read("keys")
    names = content["names"]
    unsupported = {
        _pattern(pattern, names): Unsupported(
            row["would"], tuple(row.get("harmless", ())), row.get("instead", "")
        )
        for row in content["unsupported"]
        for pattern in row["keys"]
    }
    ignored, not_needed = (
        {_pattern(pattern, names): Ignored(row["why"]) for row in content[name] for pattern in row["keys"]}
        for name in ("ignored", "not_needed")
    )
    others = {_pattern(pattern, names): default for pattern, default in content["other_defaults"].items()}
    return KeyTables(content["sections"], ignored, not_needed, unsupported, others)


def read(file: str) -> Any:
    """The content of a file of `verl_data`, without its ending."""
    text = Path(__file__).with_name("verl_data").joinpath(f"{file}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _pattern(text: str, names: dict[str, str]) -> str:
    """A pattern of the file with its `<name>`s replaced and the spaces of its line breaks removed."""
    whole = re.sub(r"<(\w+)>", lambda name: names[name[1]], text)
    return re.sub(r"\s", "", whole)
