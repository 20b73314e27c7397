"""Values that a type cannot judge: choices, ranges, and fields that depend on each other.

In: a composed configuration. Out: every problem at once. `FIELD_RULES` says per dataclass what one field may
hold, `CROSS_RULES` what fields must hold together. Left out on purpose: batch sizes, which `batch_plan/`
judges against each other, and anything that needs a file or a device.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from hydraflow.algorithms.config import AlgorithmConfig, FilterGroupsConfig, KLControlConfig, PolicyLossConfig
from hydraflow.data.config import DataConfig, GenerateDataConfig, PromptConfig, SFTDataConfig
from hydraflow.device import DEVICES
from hydraflow.dispatch.config import LogConfig, ProfilerConfig, RayInitConfig, RuntimeEnvConfig
from hydraflow.engine.config import FSDPConfig, MegatronConfig, OptimConfig, WrapPolicyConfig
from hydraflow.errors import Problem, shown
from hydraflow.generation.config import RolloutConfig, SamplingConfig, ValSamplingConfig
from hydraflow.models.config import ModelConfig
from hydraflow.recipes.config import RecipeConfig
from hydraflow.rewards.config import RewardConfig
from hydraflow.schema import EvalConfig, GenerateConfig, PPOConfig, SFTConfig
from hydraflow.system.durations import seconds_of
from hydraflow.trainer.config import (
    AsyncTrainingConfig,
    ClusterConfig,
    LoopConfig,
    RunConfig,
    SFTTrainerConfig,
    TrainerConfig,
)
from hydraflow.workers.config import ActorConfig, CheckpointConfig, CriticConfig


@dataclass(frozen=True)
class Rule:
    """What one field must hold, in words and as a test."""

    text: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    """Of which the report names the nearest."""
    example: str = ""
    """What the report names where no choice is near; else the field's default."""


def one_of(*choices: str) -> Rule:
    """One of these names."""
    return Rule(f"must be {_listed(choices)}", lambda value: value in choices, choices)


def at_least(least: float) -> Rule:
    """A number not below `least`."""
    return Rule(f"must be at least {least}", lambda value: value >= least)


def within(low: float, high: float) -> Rule:
    """A number from `low` to `high`, both allowed."""
    return Rule(f"must be from {low} to {high}", lambda value: low <= value <= high)


def saved_of(*more: str) -> Rule:
    """What a checkpoint may hold, the weights among it."""
    parts = ("model", "optimizer", "extra", *more)
    return Rule(
        f"must list model, and may list {', '.join(parts[1:])}",
        lambda value: {"model"} <= set(value) <= set(parts),
    )


def _listed(choices: tuple[str, ...]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _is_text_or_list(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return (
        isinstance(names, list)
        and bool(names)
        and all(isinstance(name, str) and bool(name.strip()) for name in names)
    )


def _are_variables(value: Mapping[Any, Any]) -> bool:
    named = all(isinstance(name, str) and name and not set("=\0") & set(name) for name in value)
    return named and all(
        isinstance(one, str | int | float) and not isinstance(one, bool) for one in value.values()
    )


POSITIVE = Rule("must be above 0", lambda value: value > 0)
FINITE = Rule("must be finite", math.isfinite)
SECONDS = Rule("must be a number of seconds above 0", lambda value: 0 < value < math.inf)
UNLIMITED_OR_COUNT = Rule("must be -1 (no limit) or at least 1", lambda value: value == -1 or value >= 1)
NEVER_OR_COUNT = Rule("must be -1 or at least 1", lambda value: value == -1 or value >= 1)
PROBABILITY_MASS = Rule("must be above 0 and at most 1", lambda value: 0 < value <= 1)
TIME = Rule(
    "must be a positive time: seconds, or 90s, 8m, 1h30m",
    lambda value: seconds_of(value) is not None,
    example="8m",
)
NOT_NEGATIVE = Rule("must be at least 0 and finite", lambda value: 0 <= value < math.inf)
SIZE = Rule("must be above 0 and finite", lambda value: 0 < value < math.inf)
GIBIBYTES = Rule("must be above 0 and at most a million", lambda value: 0 < value <= 10**6)
FILES = Rule("must be a file or a list of files", _is_text_or_list, example="/path/to/file.parquet")
DECAYS = Rule(
    "must be two numbers from 0 to below 1",
    lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
)
VARIABLES = Rule(
    "must be names with text or numbers, true and false in quotes",
    _are_variables,
    example="{A: INFO, B: 1, C: 'true'}",
)
LOG_LEVELS = ("debug", "info", "warning", "error")
LOGGERS = ("console", "file", "tensorboard", "wandb", "mlflow", "swanlab")
KNOWN_LOGGERS = Rule(f"may list {', '.join(LOGGERS)}", lambda value: set(value) <= set(LOGGERS))
PROXY = Rule(
    "must be the address of a proxy, http://host:port",
    lambda value: re.fullmatch(r"https?://([^/\s@]+@)?[^/\s@:]+:\d{1,5}/?", value) is not None,
    example="http://host:3128",
)
KEPT_DTYPE = one_of("fp32", "bf16", "fp16", "fp64")
COMPUTE_DTYPE = one_of("auto", "fp32", "bf16", "fp16", "fp64")
ENGINES = one_of("fsdp2", "megatron")
AGGREGATION = one_of(
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
)
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")

FIELD_RULES: dict[type, dict[str, Rule]] = {
    AlgorithmConfig: {
        "adv_estimator": one_of("gae", "grpo", "rloo", "reinforce_plus_plus"),
        "gamma": within(0, 1),
        "lam": within(0, 1),
        "kl_penalty": one_of(*KL_ESTIMATORS),
    },
    KLControlConfig: {
        "type": one_of("fixed", "adaptive"),
        "kl_coef": NOT_NEGATIVE,
        "horizon": at_least(1),
        "target_kl": SIZE,
    },
    FilterGroupsConfig: {"metric": one_of("acc", "score", "seq_reward"), "max_num_gen_batches": at_least(0)},
    PolicyLossConfig: {"loss_mode": one_of("vanilla")},
    ActorConfig: {
        "strategy": ENGINES,
        "clip_ratio": POSITIVE,
        "clip_ratio_low": POSITIVE,
        "clip_ratio_high": POSITIVE,
        "clip_ratio_c": Rule("must be above 1", lambda value: value > 1),
        "loss_agg_mode": AGGREGATION,
        "loss_scale_factor": POSITIVE,
        "kl_loss_coef": NOT_NEGATIVE,
        "kl_loss_type": one_of(*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)),
    },
    CriticConfig: {"strategy": ENGINES, "cliprange_value": POSITIVE, "loss_agg_mode": AGGREGATION},
    OptimConfig: {
        "lr": NOT_NEGATIVE,
        "betas": DECAYS,
        "eps": SIZE,
        "weight_decay": NOT_NEGATIVE,
        "clip_grad": POSITIVE,
        "lr_scheduler_type": one_of("constant", "linear", "cosine"),
        "lr_warmup_steps": at_least(-1),
        "lr_warmup_steps_ratio": within(0, 1),
        "min_lr_ratio": within(0, 1),
    },
    FSDPConfig: {
        "model_dtype": KEPT_DTYPE,
        "dtype": COMPUTE_DTYPE,
        "reduce_dtype": KEPT_DTYPE,
        "head_chunk_tokens": at_least(1),
    },
    MegatronConfig: {"dtype": one_of("auto", "fp32", "bf16", "fp16")},
    WrapPolicyConfig: {"min_num_params": at_least(0)},
    SamplingConfig: {
        "name": one_of("native", "vllm"),
        "n": at_least(1),
        "temperature": NOT_NEGATIVE,
        "top_k": UNLIMITED_OR_COUNT,
        "top_p": PROBABILITY_MASS,
        "max_num_seqs": at_least(1),
        "dtype": COMPUTE_DTYPE,
    },
    RolloutConfig: {
        "probs_diff_limit": POSITIVE,
        "gpu_memory_utilization": Rule("must be above 0 and below 1", lambda value: 0 < value < 1),
        "update_weights_bucket_megabytes": at_least(1),
        "nnodes": at_least(0),
    },
    ValSamplingConfig: {"temperature": NOT_NEGATIVE, "top_k": UNLIMITED_OR_COUNT, "top_p": PROBABILITY_MASS},
    ModelConfig: {
        "lora_rank": at_least(0),
        "lora_alpha": at_least(1),
        "target_modules": Rule("must be all-linear or a list of module names", _is_text_or_list),
    },
    PromptConfig: {
        "max_prompt_length": at_least(1),
        "max_response_length": at_least(1),
        "truncation": one_of("error", "left", "right", "middle"),
    },
    GenerateDataConfig: {"path": FILES, "max_samples": UNLIMITED_OR_COUNT},
    DataConfig: {
        "train_files": FILES,
        "val_files": FILES,
        "train_max_samples": UNLIMITED_OR_COUNT,
        "val_max_samples": UNLIMITED_OR_COUNT,
    },
    SFTDataConfig: {
        "train_files": FILES,
        "val_files": FILES,
        "max_length": at_least(1),
        "truncation": one_of("error", "left", "right"),
        "train_max_samples": UNLIMITED_OR_COUNT,
    },
    RewardConfig: {
        "num_workers": at_least(0),
        "timeout": SECONDS,
        "max_memory": GIBIBYTES,
        "failure_score": FINITE,
        "max_failed_share": within(0, 1),
    },
    AsyncTrainingConfig: {"staleness_threshold": within(0, 1000)},
    ClusterConfig: {"device_memory_gib": GIBIBYTES, "host_memory_gib": GIBIBYTES},
    RunConfig: {
        "nnodes": at_least(1),
        "n_gpus_per_node": at_least(1),
        "threads_per_process": at_least(1),
        "device": one_of(*DEVICES),
        "seed": within(0, 2**63 - 1),
        "rpc_timeout": POSITIVE,
        "start_timeout": POSITIVE,
    },
    LoopConfig: {
        "total_epochs": at_least(1),
        "total_training_steps": at_least(1),
        "max_wall_time": TIME,
        "test_freq": NEVER_OR_COUNT,
        "logger": KNOWN_LOGGERS,
        "wandb_proxy": PROXY,
        "save_freq": NEVER_OR_COUNT,
        "resume_mode": one_of("auto", "disable", "resume_path"),
        "max_skipped_steps": at_least(1),
        "max_restarts": at_least(0),
        "restart_backoff": Rule(
            "must be a number of seconds, at least 0", lambda value: 0 <= value < math.inf
        ),
    },
    TrainerConfig: {
        "critic_warmup": at_least(0),
        "log_val_generations": at_least(0),
        "max_actor_ckpt_to_keep": at_least(1),
        "max_critic_ckpt_to_keep": at_least(1),
    },
    SFTTrainerConfig: {"max_ckpt_to_keep": at_least(1)},
    CheckpointConfig: {"save_contents": saved_of("hf_model"), "load_contents": saved_of()},
    RayInitConfig: {"num_cpus": at_least(1)},
    RuntimeEnvConfig: {"env_vars": VARIABLES},
    LogConfig: {
        "level": one_of(*LOG_LEVELS),
        "console": one_of(*LOG_LEVELS),
        "max_megabytes": Rule("must be from 0.001 to 100000", lambda value: 0.001 <= value <= 100_000),
        "keep": within(0, 1000),
    },
    ProfilerConfig: {
        "tool": one_of("torch", "torch_memory", "nsys"),
        "steps": Rule(
            "must list training steps, the first of which is 1",
            lambda value: all(step >= 1 for step in value),
        ),
        "ranks": Rule(
            "must list ranks, the first of which is 0",
            lambda value: bool(value) and all(rank >= 0 for rank in value),
        ),
    },
    RecipeConfig: {
        "name": one_of("none", "arithmetic"),
        "warm_start_steps": at_least(0),
        "warm_start_accuracy": within(0, 1),
        "train_problems": at_least(1),
        "val_problems": at_least(1),
    },
}


def problems(config: object, *, planning: bool = False) -> list[Problem]:
    """Everything that is wrong with the values of a composed configuration; `planning`: models and data need
    not be named.

    >>> config = SFTConfig()
    >>> config.model.path, config.data.train_files, config.optim.lr_scheduler_type = "model", "data.parquet", "cosin"
    >>> print(*problems(config))
    optim.lr_scheduler_type=cosin: must be constant, linear or cosine
          -> optim.lr_scheduler_type=cosine
    """
    across = [*CROSS_RULES.get(type(config), ()), *(() if planning else NEEDED.get(type(config), ()))]
    return [
        *_field_problems(config, type(config)(), ""),
        *(problem for rule in across for problem in rule(config)),
    ]


def _field_problems(section: object, default: object, prefix: str) -> Iterator[Problem]:
    assert is_dataclass(section)
    rules = {
        name: rule
        for owner in inspect.getmro(type(section))
        for name, rule in FIELD_RULES.get(owner, {}).items()
    }
    for field in fields(section):
        key, value = prefix + field.name, getattr(section, field.name)
        if is_dataclass(value):
            yield from _field_problems(value, getattr(default, field.name), f"{key}.")
        elif (rule := rules.get(field.name)) and value is not None and not rule.holds(value):
            close = difflib.get_close_matches(str(value), rule.choices, n=1)
            yield Problem(
                key,
                value,
                rule.text,
                f"{key}={close[0]}" if close else _example(key, rule, getattr(default, field.name)),
            )


def _example(key: str, rule: Rule, default: Any) -> str:
    """An override that is legal: the rule's own, or the one that gives the field its default back."""
    if rule.example:
        return f"{key}={rule.example}"
    return f"{key}={shown(default)}" if default is None or rule.holds(default) else ""


def _ppo_has_data(config: PPOConfig) -> Iterator[Problem]:
    if config.recipe.name != "none":
        return
    needed: dict[str, object] = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    files = "data.val_files" if config.trainer.val_only else "data.train_files"
    needed[files] = config.data.val_files if config.trainer.val_only else config.data.train_files
    yield from _missing(needed, "; or recipe=arithmetic, which makes its own model and data")


def _recipe_makes_model_and_data(config: PPOConfig) -> Iterator[Problem]:
    if config.recipe.name == "none":
        return
    given = {
        "actor_rollout_ref.model.path": config.actor_rollout_ref.model.path,
        "data.train_files": config.data.train_files,
        "data.val_files": config.data.val_files,
    }
    rule = f"recipe={config.recipe.name} makes its own model and data, so this would not be used"
    for key, value in given.items():
        if value is not None:
            yield Problem(key, value, rule, f"recipe=none, or leave out {key}")


def _sft_has_data(config: SFTConfig) -> Iterator[Problem]:
    yield from _missing({"model.path": config.model.path, "data.train_files": config.data.train_files})


def _generate_has_files(config: GenerateConfig) -> Iterator[Problem]:
    yield from _missing(
        {"model.path": config.model.path, "data.path": config.data.path, "output.path": config.output.path}
    )


def _eval_has_data(config: EvalConfig) -> Iterator[Problem]:
    yield from _missing({"data.path": config.data.path})


def _missing(needed: Mapping[str, object], besides: str = "") -> Iterator[Problem]:
    for key, value in needed.items():
        if value is None:
            yield Problem(key, "null", "must be given", f"{key}=...{besides}")


def _training_samples(config: PPOConfig) -> Iterator[Problem]:
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature == 0 and not config.trainer.val_only:
        key = "actor_rollout_ref.rollout.temperature"
        yield Problem(
            key,
            temperature,
            "must be above 0 for training: greedy responses carry no policy gradient",
            f"{key}=1.0",
        )


def _gae_has_a_critic(config: PPOConfig) -> Iterator[Problem]:
    if config.algorithm.adv_estimator == "gae" and config.critic.enable is False:
        rule = "algorithm.adv_estimator=gae needs values"
        yield Problem("critic.enable", "false", rule, "critic.enable=null or algorithm.adv_estimator=grpo")


def _warmup_has_a_critic(config: PPOConfig) -> Iterator[Problem]:
    trained = (
        config.critic.enable if config.critic.enable is not None else config.algorithm.adv_estimator == "gae"
    )
    if config.trainer.critic_warmup > 0 and not trained:
        rule = "there is no critic that could warm up, so these steps would train nothing"
        yield Problem("trainer.critic_warmup", config.trainer.critic_warmup, rule, "trainer.critic_warmup=0")


def _validation_samples(config: PPOConfig) -> Iterator[Problem]:
    sampling, key = config.actor_rollout_ref.rollout.val_kwargs, "actor_rollout_ref.rollout.val_kwargs"
    if sampling.do_sample and sampling.temperature == 0:
        remedy = f"{key}.temperature=1.0 or {key}.do_sample=false"
        yield Problem(
            f"{key}.temperature", sampling.temperature, "must be above 0 when do_sample=true", remedy
        )


def _native_has_whole_models(config: PPOConfig) -> Iterator[Problem]:
    rollout, section = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    sizes = {
        "tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "data_parallel_size": rollout.data_parallel_size,
        "pipeline_model_parallel_size": rollout.pipeline_model_parallel_size,
    }
    for name, size in sizes.items() if rollout.name == "native" else ():
        if size > 1:
            rule = f"{section}.name=native holds the whole model on each device"
            yield Problem(f"{section}.{name}", size, rule, f"{section}.{name}=1 or {section}.name=vllm")


def _ulysses_packs(config: PPOConfig) -> Iterator[Problem]:
    policy = config.actor_rollout_ref
    roles = {
        "actor_rollout_ref.actor": (
            policy.actor.strategy,
            policy.actor.fsdp_config,
            "actor_rollout_ref.model",
            policy.model,
        )
    }
    roles["critic"] = (config.critic.strategy, config.critic.fsdp_config, "critic.model", config.critic.model)
    for section, (strategy, fsdp, key, model) in roles.items():
        if (
            strategy != "megatron"
            and fsdp.ulysses_sequence_parallel_size > 1
            and not model.use_remove_padding
        ):
            size = f"{section}.fsdp_config.ulysses_sequence_parallel_size"
            rule = f"{size}={fsdp.ulysses_sequence_parallel_size} divides packed rows"
            yield Problem(
                f"{key}.use_remove_padding", "false", rule, f"{key}.use_remove_padding=true or {size}=1"
            )


def _reward_model_has_a_path(config: PPOConfig) -> Iterator[Problem]:
    reward = config.reward.reward_model
    if reward.enable and reward.model_path is None:
        key = "reward.reward_model"
        yield Problem(
            f"{key}.model_path",
            "null",
            f"must be given: {key}.enable=true scores with it",
            f"{key}.model_path=...",
        )


def _partial_rollout_is_stale(config: PPOConfig) -> Iterator[Problem]:
    training, key = config.async_training, "async_training"
    if training.partial_rollout and training.staleness_threshold == 0:
        rule = f"{key}.staleness_threshold=0 lets no response live through a weight update"
        yield Problem(
            f"{key}.partial_rollout",
            "true",
            rule,
            f"{key}.partial_rollout=false or {key}.staleness_threshold=0.5",
        )


def _resume_path_is_given(config: PPOConfig | SFTConfig) -> Iterator[Problem]:
    trainer, key = config.trainer, "trainer.resume_from_path"
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield Problem(
            key,
            "null",
            "trainer.resume_mode=resume_path needs a checkpoint",
            f"{key}=.../global_step_N or trainer.resume_mode=auto",
        )


def _loads_what_was_saved(config: PPOConfig | SFTConfig) -> Iterator[Problem]:
    if isinstance(config, SFTConfig):
        sections = {"checkpoint": config.checkpoint}
    else:
        sections = {
            "actor_rollout_ref.actor.checkpoint": config.actor_rollout_ref.actor.checkpoint,
            "critic.checkpoint": config.critic.checkpoint,
        }
    for key, section in sections.items():
        if not all(
            rule.holds(getattr(section, name)) for name, rule in FIELD_RULES[CheckpointConfig].items()
        ):
            continue
        if lacking := [part for part in section.load_contents if part not in section.save_contents]:
            loaded = [part for part in section.load_contents if part not in lacking]
            rule = (
                f"{', '.join(lacking)} would not be in the checkpoints:"
                f" {key}.save_contents=[{','.join(section.save_contents)}]"
            )
            yield Problem(
                f"{key}.load_contents",
                f"[{','.join(section.load_contents)}]",
                rule,
                f"{key}.load_contents=[{','.join(loaded)}]",
            )


def _best_is_measured(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.keep_best is not None and config.data.val_files is None and config.recipe.name == "none":
        rule = "nothing is validated without data.val_files, so no checkpoint is the best"
        yield Problem(
            "trainer.keep_best", trainer.keep_best, rule, "data.val_files=... or trainer.keep_best=null"
        )


def _is_same_place(one: str, other: str | None) -> bool:
    """Whether two paths name the same folder, however they are written, made yet or not."""
    return other is not None and os.path.realpath(os.path.expanduser(one)) == os.path.realpath(
        os.path.expanduser(other)
    )


def _dumps_lie_apart(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.rollout_data_dir is not None and _is_same_place(
        trainer.rollout_data_dir, trainer.validation_data_dir
    ):
        rule = "trainer.rollout_data_dir is the same folder, and both write <step>.jsonl"
        yield Problem(
            "trainer.validation_data_dir",
            trainer.validation_data_dir,
            rule,
            f"trainer.validation_data_dir={trainer.rollout_data_dir}-val",
        )


def _one_process_is_debugged(config: PPOConfig | SFTConfig | GenerateConfig) -> Iterator[Problem]:
    trainer, asked = config.trainer, "debug" if config.debug else "trainer.debug.local"
    if not (config.debug or trainer.debug.local):
        return
    for name, count in {"nnodes": trainer.nnodes, "n_gpus_per_node": trainer.n_gpus_per_node or 1}.items():
        if count > 1:
            yield Problem(
                f"trainer.{name}",
                count,
                f"{asked}=true has one process per role",
                f"trainer.{name}=1 or {asked}=false",
            )
    if config.debug and trainer.debug.local:
        rule = (
            "trainer.debug.local=true runs without Ray, so Ray's debugger has nothing to do: breakpoint()"
            " opens pdb"
        )
        yield Problem("debug", "true", rule, "debug=false or trainer.debug.local=false")


def _profiled_steps_are_named(config: PPOConfig | SFTConfig) -> Iterator[Problem]:
    profiler, trainer = config.global_profiler, config.trainer
    if profiler.tool is not None and not profiler.steps:
        yield Problem(
            "global_profiler.steps",
            shown(profiler.steps),
            f"must be given: tool={profiler.tool}",
            "global_profiler.steps=[2]",
        )
    if profiler.tool == "nsys" and trainer.debug.local:
        rule = "Nsight Systems starts the processes that it watches; trainer.debug.local=true has none"
        yield Problem(
            "global_profiler.tool", "nsys", rule, "global_profiler.tool=torch or trainer.debug.local=false"
        )


def _parts_of_a_run(config: PPOConfig) -> Iterator[Problem]:
    trainer, debug, key = config.trainer, config.trainer.debug, "trainer.debug"
    if debug.train_only and debug.load_rollouts is None:
        yield Problem(
            f"{key}.load_rollouts",
            "null",
            f"must be given: {key}.train_only=true samples nothing",
            f"{key}.load_rollouts=...",
        )
    if debug.rollout_only and debug.train_only:
        yield Problem(
            f"{key}.rollout_only",
            "true",
            f"{key}.train_only=true is the other half of a step",
            f"{key}.rollout_only=false",
        )
    if debug.rollout_only and debug.load_rollouts is not None:
        rule = f"{key}.rollout_only=true samples, and does nothing with trajectories that there are"
        yield Problem(f"{key}.load_rollouts", debug.load_rollouts, rule, f"{key}.load_rollouts=null")
    if trainer.val_only and (
        debug.rollout_only or debug.train_only or debug.load_rollouts or debug.save_rollouts
    ):
        yield Problem(
            "trainer.val_only",
            "true",
            f"there are no steps that {key}.* could change",
            "trainer.val_only=false",
        )
    if debug.save_rollouts is not None and _is_same_place(debug.save_rollouts, debug.load_rollouts):
        rule = f"{key}.load_rollouts reads that folder"
        yield Problem(f"{key}.save_rollouts", debug.save_rollouts, rule, f"{key}.save_rollouts=null")
    if trainer.keep_best is not None and (debug.rollout_only or debug.train_only):
        part = "rollout_only" if debug.rollout_only else "train_only"
        rule = f"with {key}.{part}=true no checkpoint is judged by a validation"
        yield Problem("trainer.keep_best", trainer.keep_best, rule, "trainer.keep_best=null")


CROSS_RULES: dict[type, tuple[Callable[[Any], Iterator[Problem]], ...]] = {
    PPOConfig: (
        _recipe_makes_model_and_data,
        _training_samples,
        _gae_has_a_critic,
        _warmup_has_a_critic,
        _validation_samples,
        _native_has_whole_models,
        _ulysses_packs,
        _reward_model_has_a_path,
        _partial_rollout_is_stale,
        _resume_path_is_given,
        _loads_what_was_saved,
        _best_is_measured,
        _dumps_lie_apart,
        _one_process_is_debugged,
        _profiled_steps_are_named,
        _parts_of_a_run,
    ),
    SFTConfig: (
        _resume_path_is_given,
        _loads_what_was_saved,
        _one_process_is_debugged,
        _profiled_steps_are_named,
    ),
    GenerateConfig: (_one_process_is_debugged,),
}
"""What fields must hold together."""
NEEDED: dict[type, tuple[Callable[[Any], Iterator[Problem]], ...]] = {
    PPOConfig: (_ppo_has_data,),
    SFTConfig: (_sft_has_data,),
    GenerateConfig: (_generate_has_files,),
    EvalConfig: (_eval_has_data,),
}
"""What must be named before something can run."""
