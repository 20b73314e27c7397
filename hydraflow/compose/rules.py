"""Checks of values beyond their types: choices and limits, and rules across keys.

In: a composed configuration. Out: every problem at once. The legal values of one key are declared beside its
field (`options.py`); `CROSS_RULES` has the rules across keys. Left out on purpose: batch sizes, which
`batch_plan/` checks against each other, and anything that needs a file or a device.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from math import inf, isfinite
from types import MappingProxyType
from typing import Any, TypeVar

from hydraflow.batch_plan.roles import needs_critic
from hydraflow.batch_plan.settings import value_at
from hydraflow.batch_plan.topology import ROLLOUT
from hydraflow.compose.algorithm_rules import ALGORITHM_RULES
from hydraflow.compose.effects import without_effect
from hydraflow.compose.keys import known_keys, without_quotes
from hydraflow.compose.verl_values import meant_choice
from hydraflow.engine.config import FSDPConfig, engine_config
from hydraflow.errors import Problem, shown
from hydraflow.generation.config import GENERATION_ENGINES, RolloutConfig, SamplingConfig, engine_dtype
from hydraflow.options import Leaf, Rule, walk
from hydraflow.schema import EvalConfig, GenerateConfig, JobConfig, PPOConfig, SupervisedConfig, entry_for
from hydraflow.workers.config import ActorConfig, CheckpointConfig

Section = TypeVar("Section")
_SHORTEST, _SIMILAR = 4, 0.8
"""The shortest name that is compared with choices, and the least difflib similarity for a suggestion."""


def problems(
    config: object, *, planning: bool = False, usual: Mapping[str, Any] = MappingProxyType({})
) -> list[Problem]:
    """All problems of the values of a composed configuration.

    `planning`: models and data may be unset. `usual`: key -> a value that is better to suggest than the
    default.

    >>> config = SupervisedConfig()
    >>> config.model.path, config.data.train_files = "model", "data.parquet"
    >>> config.optim.lr_scheduler_type = "cosin"
    >>> print(*problems(config))
    optim.lr_scheduler_type=cosin: must be constant, linear or cosine
          -> optim.lr_scheduler_type=cosine
    """
    across = (problem for rule in entry_for(CROSS_RULES, type(config)) or () for problem in rule(config))
    values = [*_value_problems(config, usual), *_problems_beside(config)]
    return [*values, *across, *(() if planning else _missing(config))]


def _value_problems(config: Any, usual: Mapping[str, Any]) -> Iterator[Problem]:
    """Values outside of a key's choices or limits."""
    keys = known_keys(config.__class__)
    for leaf in walk(config):
        rule, known = leaf.option.rule, keys[leaf.key]
        if rule is None or leaf.value is None or rule.holds(leaf.value):
            continue
        meant = without_quotes(leaf.value) if known.hint is Any else None
        if meant is not None and rule.holds(meant):
            quoted, text = shown(f"'{leaf.value}'", leaf.key), f"{rule.text}, and the quotes make it text"
            yield Problem(leaf.key, quoted, text, f"{leaf.key}={shown(meant)}")
            continue
        remedy = _remedy(leaf, rule, [usual[leaf.key]] if leaf.key in usual else [], known.default)
        only_finite = isinstance(leaf.value, float) and not (isfinite(leaf.value) or rule.holds(inf))
        yield Problem(leaf.key, leaf.value, "must be finite" if only_finite else rule.text, remedy)


def _remedy(leaf: Leaf, rule: Rule, in_files: list[Any], default: Any) -> str:
    """The override that was probably meant, else a legal one; `in_files`: the value of a file, if any."""
    given = leaf.value if isinstance(leaf.value, list) else [leaf.value]
    near = [_near_choices(leaf.key, rule, str(one)) for one in given]
    if isinstance(leaf.value, list) and any(near):
        return f"{leaf.key}={shown(list(dict.fromkeys(close[0] for close in near if close)))}"
    if any(near):
        return f"{leaf.key}={' or '.join(near[0])}"
    if rule.example:
        return f"{leaf.key}={rule.example}"
    if rule.choices or (leaf.option.size and default is not None and not in_files):
        # a choice would be a guess, and the default of a size may not fit the others
        return f"leave out {leaf.key}"
    legal = [value for value in (*in_files, default) if value is None or rule.holds(value)]
    return f"{leaf.key}={shown(legal[0])}" if legal else ""


def _near_choices(key: str, rule: Rule, given: str) -> list[str]:
    """The choices of a key that a name probably stands for: the same in another case, our name for verl's
    value, those that begin with it or have its letters in another order, or the most similar one. Short names
    are too alike to be compared."""
    named = {choice.lower(): choice for choice in rule.choices}
    name = given.lower()
    if name in named:
        return [named[name]]
    meant = meant_choice(key, name)
    if rule.choices and meant is not None and rule.holds(meant):
        return [meant]
    if len(name) < _SHORTEST:
        return []
    found = [choice for choice in rule.choices if choice.lower().startswith(name)]
    found = found or [named[other] for other in named if sorted(other) == sorted(name)]  # letters swapped
    return found or [named[close] for close in difflib.get_close_matches(name, named, 1, _SIMILAR)]


def _problems_beside(config: object) -> Iterator[Problem]:
    """Values that do not fit other keys of their section."""
    for leaf in walk(config):
        section, _, own = leaf.key.rpartition(".")
        beside, rule = leaf.option.beside, leaf.option.rule
        if beside is None or beside.holds(leaf.value, leaf.section):
            continue
        is_legal = leaf.value is None or rule is None or rule.holds(leaf.value)
        if is_legal and without_effect(config, leaf.key) is None:
            named = vars(leaf.section) | {"s": section, "own": own}
            texts = beside.text.format_map(named), beside.remedy.format_map(named)
            yield Problem(leaf.key, shown(leaf.value), *texts)


def unknown_choices(config: object) -> set[str]:
    """The keys whose value is not one of their choices, so that tables have no entry for it."""
    rules = ((leaf, leaf.option.rule) for leaf in walk(config) if leaf.value is not None)
    return {leaf.key for leaf, rule in rules if rule and rule.choices and not rule.holds(leaf.value)}


def _missing(config: object) -> Iterator[Problem]:
    needed, besides = entry_for(NEEDED, type(config)) or (), ""
    if isinstance(config, PPOConfig):
        files = "data.val_files" if config.trainer.val_only else "data.train_files"
        needed = ("actor_rollout_ref.model.path", files) if config.recipe.name == "none" else ()
        besides = "; or recipe=arithmetic, which makes its own model and data"
    for key in needed:
        if value_at(config, key) is None:
            yield Problem(key, "null", "must be given", f"{key}=...{besides}")


def _recipe_makes_model_and_data(config: PPOConfig) -> Iterator[Problem]:
    rule = f"recipe={config.recipe.name} makes its own model and data, so this would not be used"
    for key in ("actor_rollout_ref.model.path", "data.train_files", "data.val_files"):
        if config.recipe.name != "none" and (given := value_at(config, key)) is not None:
            yield Problem(key, given, rule, f"recipe=none, or leave out {key}")


def _warmup_has_a_critic(config: PPOConfig) -> Iterator[Problem]:
    if config.trainer.critic_warmup > 1 and not needs_critic(config):
        rule = "there is no critic to warm up, so these steps would train no model"
        yield Problem("trainer.critic_warmup", config.trainer.critic_warmup, rule, "trainer.critic_warmup=0")


def _engines_that_hold_whole_models(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    engine = GENERATION_ENGINES.get(rollout.name)
    if engine is None or engine.divides_models:
        return
    other = next(name for name, one in GENERATION_ENGINES.items() if one.divides_models)
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        if (size := getattr(rollout, name)) > 1:
            rule = f"{ROLLOUT}.name={rollout.name} holds the whole model on each device"
            yield Problem(f"{ROLLOUT}.{name}", size, rule, f"{ROLLOUT}.{name}=1 or {ROLLOUT}.name={other}")


def _engine_arguments_are_not_set_elsewhere(config: PPOConfig | GenerateConfig) -> Iterator[Problem]:
    key, rollout = _rollout_of(config)
    known = {leaf.key for leaf in walk(config)}
    for engine in fields(rollout.engine_kwargs):
        sets_it = GENERATION_ENGINES[engine.name].set_elsewhere
        for name, value in getattr(rollout.engine_kwargs, engine.name).items():
            if name not in sets_it:
                continue
            what = f"{key}.engine_kwargs.{engine.name}.{name}"
            section = sets_it[name].replace("actor_rollout_ref.", key.removesuffix("rollout"))
            if " " not in section and section not in known:
                section = "this command, which uses one device per replica"
            remedy = f"{section}=..." if section in known else f"leave out {what}"
            yield Problem(what, shown(value), f"is set by {section}", remedy)


def _engine_supports_the_sampling(config: PPOConfig | GenerateConfig) -> Iterator[Problem]:
    key, rollout = _rollout_of(config)
    engine = GENERATION_ENGINES.get(rollout.name)
    if engine is None:
        return
    library = f"the {rollout.name} engine" if engine.needs is None else engine.needs.name
    least = engine.least_temperature
    sampled = {f"{key}.temperature": rollout.temperature}
    if isinstance(rollout, RolloutConfig) and rollout.val_kwargs.do_sample:
        sampled[f"{key}.val_kwargs.temperature"] = rollout.val_kwargs.temperature
    for name, value in sampled.items():
        if 0 < value < least:
            rule = f"{library} samples at {least} or above"
            yield Problem(name, value, rule, f"{name}={least}, or 0 for greedy")
    actor = config.actor_rollout_ref.actor if isinstance(config, PPOConfig) else ActorConfig()
    dtype = engine_dtype(rollout.dtype, engine_config(actor.strategy, actor).compute_dtype)
    if dtype == "fp64" and not engine.computes_fp64:
        rule = f"{library} computes in 32 or 16 bits"
        rule += ", and auto is the actor's fp64" if rollout.dtype == "auto" else ""
        yield Problem(f"{key}.dtype", rollout.dtype, rule, f"{key}.dtype=fp32")


def _rollout_of(config: PPOConfig | GenerateConfig) -> tuple[str, SamplingConfig]:
    """The section `rollout`, and its dotted path."""
    if isinstance(config, PPOConfig):
        return ROLLOUT, config.actor_rollout_ref.rollout
    return "rollout", config.rollout


def _engine_has_a_process(config: PPOConfig) -> Iterator[Problem]:
    engine = GENERATION_ENGINES.get(config.actor_rollout_ref.rollout.name)
    if config.trainer.debug.local and engine is not None and engine.own_process:
        name = config.actor_rollout_ref.rollout.name
        rule = "trainer.debug.local=true runs all roles in one process, and this engine needs its own"
        yield Problem(f"{ROLLOUT}.name", name, rule, f"{ROLLOUT}.name=native or trainer.debug.local=false")


def _sections(config: object, kind: type[Section]) -> dict[str, Section]:
    """Every section of this class, by its dotted path."""
    leaves = (leaf for leaf in walk(config) if isinstance(leaf.section, kind))
    return {leaf.key.rpartition(".")[0]: leaf.section for leaf in leaves}


def _fp16_does_not_train(config: PPOConfig | SupervisedConfig) -> Iterator[Problem]:
    if isinstance(config, PPOConfig) and config.trainer.val_only:
        return
    for section, fsdp in _sections(config, FSDPConfig).items():
        if section.startswith("actor_rollout_ref.ref."):
            continue  # the reference is not trained
        for name in ("model_dtype", "dtype", "reduce_dtype"):
            key = f"{section}.{name}"
            if getattr(fsdp, name) == "fp16" and without_effect(config, key) is None:
                rule = "cannot train: gradients below 6e-8 become 0, and losses are not scaled up"
                yield Problem(key, "fp16", rule, f"{key}={'bf16' if name == 'dtype' else 'fp32'}")


def _ulysses_packs(config: PPOConfig | SupervisedConfig) -> Iterator[Problem]:
    models = {"fsdp_config": "model", "critic.fsdp_config": "critic.model"}
    for section, fsdp in _sections(config, FSDPConfig).items():
        size, ways = f"{section}.ulysses_sequence_parallel_size", fsdp.ulysses_sequence_parallel_size
        packs = f"{models.get(section, 'actor_rollout_ref.model')}.use_remove_padding"
        if ways > 1 and not value_at(config, packs) and without_effect(config, size) is None:
            yield Problem(packs, "false", f"{size}={ways} needs packed rows", f"{packs}=true or {size}=1")


def _megatron_trains_all_weights(config: PPOConfig) -> Iterator[Problem]:
    policy, critic = config.actor_rollout_ref, config.critic
    for section, strategy, key, model in (
        ("actor_rollout_ref.actor", policy.actor.strategy, "actor_rollout_ref.model", policy.model),
        ("critic", critic.strategy, "critic.model", critic.model),
    ):
        rank = f"{key}.lora_rank"
        if strategy == "megatron" and model.lora_rank > 0 and without_effect(config, rank) is None:
            rule = f"{section}.strategy=megatron has no adapters"
            yield Problem(rank, model.lora_rank, rule, f"{rank}=0 or {section}.strategy=fsdp2")


def _adapters_are_loaded(config: PPOConfig) -> Iterator[Problem]:
    policy, key = config.actor_rollout_ref, "actor_rollout_ref.model.lora.merge"
    engine = GENERATION_ENGINES.get(policy.rollout.name)
    if policy.model.lora.merge or without_effect(config, key) is not None or engine is None:
        return
    if not engine.loads_adapters:
        others = " or ".join(name for name, one in GENERATION_ENGINES.items() if one.loads_adapters)
        rule = f"{ROLLOUT}.name={policy.rollout.name} samples from merged weights only"
        yield Problem(key, "false", rule, f"{key}=true or {ROLLOUT}.name={others}")
    elif policy.rollout.tensor_model_parallel_size > 1:
        size = f"{ROLLOUT}.tensor_model_parallel_size"
        rule = f"adapters are not sharded, but {size}={policy.rollout.tensor_model_parallel_size} shards"
        yield Problem(key, "false", f"{rule} the weights", f"{key}=true or {size}=1")


def _experts_are_replayed(config: PPOConfig) -> Iterator[Problem]:
    actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor.router_replay.mode"
    mode, bypass = actor.router_replay.mode, "algorithm.rollout_correction.bypass_mode"
    if mode == "disabled":
        return
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        rule = f"records experts in the pass of the old log-probabilities, which {bypass}=true leaves out"
        yield Problem(key, mode, rule, f"{bypass}=false or {key}=disabled")
    rollout = config.actor_rollout_ref.rollout
    engine = GENERATION_ENGINES.get(rollout.name)
    if mode == "R3" and engine is not None and not engine.reports_experts:
        names = [name for name, one in GENERATION_ENGINES.items() if one.reports_experts]
        rule = f"replays the experts of the generation engine, which {rollout.name} does not report"
        yield Problem(key, mode, rule, f"{key}=R2 or {ROLLOUT}.name={' or '.join(names)}")
    if actor.strategy != "megatron":
        return
    overrides = "actor_rollout_ref.actor.megatron.override_transformer_config"
    given = actor.megatron.override_transformer_config
    if given.get("moe_router_fusion"):
        name = f"{overrides}.moe_router_fusion"
        rule = f"this kernel chooses experts itself, but router_replay.mode={mode} prescribes them"
        yield Problem(name, True, rule, f"leave out {name}")
    if "moe" in actor.megatron.recomputed_parts:
        name = f"{overrides}.recompute_modules"
        rule = f"recomputing only the experts would not replay the choices of router_replay.mode={mode}"
        yield Problem(
            name, shown(given["recompute_modules"]), rule, f"leave out {name}, to recompute whole layers"
        )


def _teachers_are_named(config: PPOConfig) -> Iterator[Problem]:
    asked, key = config.distillation, "distillation.teachers"
    if not asked.enabled:
        return
    if not asked.teachers:
        rule = "must name a model: distillation.enabled=true learns from it"
        yield Problem(key, "{}", rule, f"+{key}.default=path")
    for name, path in asked.teachers.items():
        if not isinstance(path, str) or not path:
            yield Problem(f"{key}.{name}", shown(path), "must be the directory of a model")
    loss, key = asked.distillation_loss, "distillation.distillation_loss"
    if loss.over_vocabulary and loss.use_policy_gradient:
        rule = f"{loss.loss_mode} is not an estimate from the sampled token, so it cannot be its advantage"
        remedy = f"{key}.use_policy_gradient=false or {key}.loss_mode=k1"
        yield Problem(f"{key}.use_policy_gradient", "true", rule, remedy)


def _partial_rollout_is_stale(config: PPOConfig) -> Iterator[Problem]:
    training, key = config.async_training, "async_training"
    if training.partial_rollout and training.staleness_threshold == 0:
        rule = f"{key}.staleness_threshold=0 lets no response span a weight update"
        remedy = f"{key}.partial_rollout=false or {key}.staleness_threshold=0.5"
        yield Problem(f"{key}.partial_rollout", "true", rule, remedy)


def _loads_what_was_saved(config: PPOConfig | SupervisedConfig) -> Iterator[Problem]:
    for key, section in _sections(config, CheckpointConfig).items():
        if any(leaf.option.rule and not leaf.option.rule.holds(leaf.value) for leaf in walk(section)):
            continue
        if lacking := [part for part in section.load_contents if part not in section.save_contents]:
            loaded = [part for part in section.load_contents if part not in lacking]
            saved = f"{key}.save_contents={shown(section.save_contents)}"
            rule = f"{', '.join(lacking)} would not be in the checkpoints: {saved}"
            remedy = f"{key}.load_contents={shown(loaded)}"
            yield Problem(f"{key}.load_contents", shown(section.load_contents), rule, remedy)


def _best_is_measured(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.keep_best is not None and config.data.val_files is None and config.recipe.name == "none":
        rule = "there is no validation without data.val_files, so no checkpoint can be the best"
        remedy = "data.val_files=... or trainer.keep_best=null"
        yield Problem("trainer.keep_best", trainer.keep_best, rule, remedy)


def _is_same_place(one: str | None, other: str | None) -> bool:
    """Whether two paths name the same folder, which need not exist."""
    if one is None or other is None:
        return False
    return os.path.realpath(os.path.expanduser(one)) == os.path.realpath(os.path.expanduser(other))


def _dump_folders_differ(config: PPOConfig) -> Iterator[Problem]:
    key, given = "trainer.validation_data_dir", config.trainer.validation_data_dir
    if _is_same_place(config.trainer.rollout_data_dir, given):
        rule = "trainer.rollout_data_dir is the same folder, and both write <step>.jsonl"
        yield Problem(key, given, rule, f"{key}={config.trainer.rollout_data_dir}-val")


def _one_process_is_debugged(config: JobConfig) -> Iterator[Problem]:
    trainer, asked = config.trainer, "debug" if config.debug else "trainer.debug.local"
    if not (config.debug or trainer.debug.local):
        return
    for name, count in {"nnodes": trainer.nnodes, "n_gpus_per_node": trainer.n_gpus_per_node or 1}.items():
        if count > 1:
            rule, remedy = f"{asked}=true has one process per role", f"trainer.{name}=1 or {asked}=false"
            yield Problem(f"trainer.{name}", count, rule, remedy)
    if trainer.debug.local and isinstance(config, PPOConfig) and config.actor_rollout_ref.rollout.nnodes:
        key, count = "actor_rollout_ref.rollout.nnodes", config.actor_rollout_ref.rollout.nnodes
        rule, remedy = f"{asked}=true has one process on one device", f"{key}=0 or {asked}=false"
        yield Problem(key, count, rule, remedy)
    if config.debug and trainer.debug.local:
        rule = (
            "trainer.debug.local=true runs without Ray, so Ray's debugger has nothing to do: breakpoint()"
            " opens pdb"
        )
        yield Problem("debug", "true", rule, "debug=false or trainer.debug.local=false")


def _profiled_steps_are_named(config: PPOConfig | SupervisedConfig) -> Iterator[Problem]:
    profiler, trainer = config.global_profiler, config.trainer
    if profiler.tool is not None and not profiler.steps:
        key, rule = "global_profiler.steps", f"must be given: tool={profiler.tool}"
        yield Problem(key, shown(profiler.steps), rule, f"{key}=[2]")
    if profiler.tool == "nsys" and trainer.debug.local:
        rule = "Nsight Systems starts the processes that it profiles; trainer.debug.local=true has none"
        remedy = "global_profiler.tool=torch or trainer.debug.local=false"
        yield Problem("global_profiler.tool", "nsys", rule, remedy)


def _parts_of_a_run(config: PPOConfig) -> Iterator[Problem]:
    trainer, debug, key = config.trainer, config.trainer.debug, "trainer.debug"
    if debug.train_only and debug.load_rollouts is None:
        rule = f"must be given: {key}.train_only=true samples nothing"
        yield Problem(f"{key}.load_rollouts", "null", rule, f"{key}.load_rollouts=...")
    if debug.rollout_only and debug.train_only:
        rule = f"cannot be combined with {key}.train_only=true: each leaves out what the other does"
        yield Problem(f"{key}.rollout_only", "true", rule, f"{key}.rollout_only=false")
    if debug.rollout_only and debug.load_rollouts is not None:
        rule = f"{key}.rollout_only=true only samples, so it does not read trajectories"
        yield Problem(f"{key}.load_rollouts", debug.load_rollouts, rule, f"{key}.load_rollouts=null")
    if debug.rollout_only and trainer.resume_mode == "resume_path":
        rule = f"{key}.rollout_only=true samples with actor_rollout_ref.model.path, not with a checkpoint"
        remedy = "trainer.resume_mode=auto, and the checkpoint merged (python -m hydraflow.model_merger)"
        yield Problem("trainer.resume_mode", "resume_path", rule, f"{remedy} as actor_rollout_ref.model.path")
    given = debug.rollout_only or debug.train_only or debug.load_rollouts or debug.save_rollouts
    if trainer.val_only and given:
        rule = f"runs no steps, so it cannot be combined with {key}.*"
        yield Problem("trainer.val_only", "true", rule, "trainer.val_only=false")
    if _is_same_place(debug.save_rollouts, debug.load_rollouts):
        rule = f"{key}.load_rollouts reads that folder"
        yield Problem(f"{key}.save_rollouts", debug.save_rollouts, rule, f"{key}.save_rollouts=null")
    if trainer.keep_best is not None and (debug.rollout_only or debug.train_only):
        part = "rollout_only" if debug.rollout_only else "train_only"
        rule = f"with {key}.{part}=true there is no validation to compare checkpoints by"
        yield Problem("trainer.keep_best", trainer.keep_best, rule, "trainer.keep_best=null")


CROSS_RULES: dict[type, tuple[Callable[[Any], Iterator[Problem]], ...]] = {
    PPOConfig: (
        _recipe_makes_model_and_data,
        *ALGORITHM_RULES,
        _warmup_has_a_critic,
        _engines_that_hold_whole_models,
        _engine_arguments_are_not_set_elsewhere,
        _engine_supports_the_sampling,
        _engine_has_a_process,
        _fp16_does_not_train,
        _ulysses_packs,
        _megatron_trains_all_weights,
        _adapters_are_loaded,
        _experts_are_replayed,
        _teachers_are_named,
        _partial_rollout_is_stale,
        _loads_what_was_saved,
        _best_is_measured,
        _dump_folders_differ,
        _one_process_is_debugged,
        _profiled_steps_are_named,
        _parts_of_a_run,
    ),
    SupervisedConfig: (
        _fp16_does_not_train,
        _ulysses_packs,
        _loads_what_was_saved,
        _one_process_is_debugged,
        _profiled_steps_are_named,
    ),
    GenerateConfig: (
        _one_process_is_debugged,
        _engine_arguments_are_not_set_elsewhere,
        _engine_supports_the_sampling,
    ),
}
"""Schema -> its rules across keys."""
NEEDED: dict[type, tuple[str, ...]] = {
    SupervisedConfig: ("model.path", "data.train_files"),
    GenerateConfig: ("model.path", "data.path", "output.path"),
    EvalConfig: ("data.path",),
}
"""Keys that must be set before a run; those of PPOConfig depend on the recipe."""
