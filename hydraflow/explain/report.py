"""Everything that `python -m hydraflow.plan` reports about a command line.

In: a configuration and where its values come from. Out: one `Report`, or one `ConfigError` with every broken
rule. Missing files and models are notes, because a plan may be for another machine; unusable ones are
problems. Left out on purpose: how it looks (`show.py`, `svg.py`), and torch, Ray and transformers: a plan is
made within a second, anywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hydraflow.batch_plan.generate import GeneratePlan, resolve_generate_plan
from hydraflow.batch_plan.resolve import BatchPlan, resolve_plan
from hydraflow.batch_plan.roles import PATH, dist_checkpoints, missing_checkpoints, replay_problems
from hydraflow.batch_plan.sft import SFTPlan, noun_of, resolve_sft_plan
from hydraflow.batch_plan.stages import stage_problems
from hydraflow.compose import runnable
from hydraflow.compose.command import Command, KeyCounts
from hydraflow.compose.own_functions import own_choices, own_problems
from hydraflow.device import planned_devices
from hydraflow.errors import ConfigError, Faults, Problem
from hydraflow.explain.counts import RowCount, count_rows, notes_on
from hydraflow.explain.models import Models, find_models, find_shape, numbers
from hydraflow.explain.picture import picture
from hydraflow.explain.svg import StepPicture, ppo_step, sft_step
from hydraflow.explain.words import Phase, generate_phases, ppo_phases, sft_phases
from hydraflow.generation.config import GENERATION_ENGINES
from hydraflow.memory.estimate import estimate
from hydraflow.memory.limits import limits_of
from hydraflow.memory.report import MemoryReport
from hydraflow.memory.shape import FAMILIES, ModelShape
from hydraflow.rewards.selection import problems as reward_problems
from hydraflow.schema import GenerateConfig, JobConfig, PPOConfig, SupervisedConfig
from hydraflow.system.paths import expanded, is_hub_name
from hydraflow.trainer.phases import rollout_is_exact


@dataclass(frozen=True)
class Report:
    """A plan with everything that explains it."""

    job: str
    """ppo, sft, dpo, rm or generate."""
    plan: BatchPlan | SFTPlan | GeneratePlan
    phases: tuple[Phase, ...]
    """What one step does."""
    memory: MemoryReport | None
    """None: the shape of the model is not known, or the job is not ppo."""
    notes: tuple[str, ...]
    """Notes to print: keys without effect, renamed or ignored ones, missing files."""
    not_yet: tuple[Problem, ...]
    """Features that main_ppo does not implement yet."""
    counts: KeyCounts
    """How the keys of the command line were handled."""
    step: StepPicture | None
    """The picture from prompts to optimizer steps; None: there are none."""

    @property
    def placement(self) -> str:
        """colocated, disaggregated, overlapping or partial; a single role is colocated."""
        return self.plan.placement if isinstance(self.plan, BatchPlan) else "colocated"

    @property
    def picture(self) -> list[str]:
        """The devices × roles table, as lines of text."""
        return picture(self.plan.layouts, self.plan.cluster)

    def to_json(self) -> str:
        """The report as one JSON object, with numbers as in `plan.json`."""
        content: dict[str, Any] = {
            "job": self.job,
            "plan": json.loads(self.plan.to_json()),
            "placement": self.placement,
            "picture": self.picture,
            "step": [asdict(phase) for phase in self.phases],
            "memory": self.memory.to_json() if self.memory else None,
            "notes": self.notes,
            "not_runnable_yet": [
                {"field": one.field, "value": one.value, "rule": one.rule} for one in self.not_yet
            ],
            "keys": asdict(self.counts),
        }
        return json.dumps(content, indent=2, ensure_ascii=False)


def make_report(config: JobConfig, command: Command) -> Report:
    """The report on a composed configuration. Raises ConfigError with every broken rule."""
    if isinstance(config, PPOConfig):
        return _ppo_report(config, command)
    if isinstance(config, SupervisedConfig):
        return _sft_report(config, command)
    return _generate_report(config, command)


def _ppo_report(config: PPOConfig, command: Command) -> Report:
    faults = Faults()
    prompts, held_out = _prompt_counts(config)
    faults.add([*held_out.problems, *prompts.problems])
    models = faults.result(lambda: find_models(config)) or Models(None)
    layers = None if models.policy is None else models.policy.layers
    of_critic = layers if models.critic is None else models.critic.layers
    faults.add(stage_problems(config, policy=layers, critic=of_critic))
    faults.add([*_replay_problems(config, models.policy), *reward_problems(config.reward)])
    own_files = {choice.key: choice.function.path for choice in own_choices(config)}
    faults.add([one for one in own_problems(config) if os.path.exists(own_files[one.field])])
    faults.add([one for one in missing_checkpoints(config) if os.path.exists(expanded(str(one.value)))])
    limits = limits_of(config)
    plan = faults.result(
        lambda: resolve_plan(
            config,
            prompts=prompts.rows,
            devices_per_node=limits.devices_per_node,
            origins=command.origins,
            shape=numbers(models.policy),
            critic_shape=numbers(models.critic),
        )
    )
    if plan is None or faults.problems:
        raise ConfigError(faults.problems)
    memory = None
    if models.policy:
        memory = estimate(plan, config, models.policy, limits=limits, critic_shape=models.critic)
    phases = ppo_phases(plan, config, exact=rollout_is_exact(config, limits.bytes_of))
    notes = [*_file_notes(config, prompts, held_out), *models.notes, *_turn_notes(config, plan)]
    return _report(config, command, plan, phases, notes, ppo_step(plan), memory)


def _replay_problems(config: PPOConfig, policy: ModelShape | None) -> list[Problem]:
    """Problems of routing replay. Unknown model types are not checked: their config.json may name experts
    differently."""
    if policy is None or policy.model_type not in FAMILIES:
        return []
    return replay_problems(config.actor_rollout_ref.actor, has_routers=policy.experts > 0)


def _turn_notes(config: PPOConfig, plan: BatchPlan) -> Iterator[str]:
    """A note on a generation engine that has its own processes but shares devices with training roles."""
    name, own = config.actor_rollout_ref.rollout.name, plan.layouts["rollout"].devices
    others = {role: layout.devices for role, layout in plan.layouts.items() if role != "rollout"}
    beside = [role for role, devices in others.items() if devices & own]
    if GENERATION_ENGINES[name].own_process and beside:
        yield (
            f"{name} runs in its own processes; on the devices that it shares with {' and '.join(beside)}"
            " they take turns, and it releases its memory while they run"
        )


def _sft_report(config: SupervisedConfig, command: Command) -> Report:
    faults, data = Faults(), config.data
    rows = count_rows(data.train_files, key="data.train_files", limit=data.train_max_samples)
    faults.add(rows.problems)
    shape = faults.result(lambda: find_shape(config.model, field="model"))
    plan = faults.result(
        lambda: resolve_sft_plan(
            config,
            conversations=rows.rows,
            devices_per_node=planned_devices(config.trainer.device),
            origins=command.origins,
            shape=numbers(shape),
        )
    )
    if plan is None or faults.problems:
        raise ConfigError(faults.problems)
    notes = notes_on("data.train_files", rows, data.max_length)
    step = sft_step(plan, noun_of(config))
    return _report(config, command, plan, sft_phases(plan, config), notes, step)


def _generate_report(config: GenerateConfig, command: Command) -> Report:
    faults, data = Faults(), config.data
    filtered = data.filter_overlong_prompts
    rows = count_rows(data.path, key="data.path", limit=data.max_samples, filtered=filtered)
    faults.add(rows.problems)
    plan = faults.result(
        lambda: resolve_generate_plan(
            config,
            prompts=rows.rows,
            devices_per_node=planned_devices(config.trainer.device),
            origins=command.origins,
        )
    )
    if plan is None or faults.problems:
        raise ConfigError(faults.problems)
    notes = notes_on("data.path", rows, data.max_prompt_length)
    return _report(config, command, plan, generate_phases(plan, config), notes)


def _report(
    config: JobConfig,
    command: Command,
    plan: BatchPlan | SFTPlan | GeneratePlan,
    phases: Iterable[Phase],
    notes: Iterable[str],
    step: StepPicture | None = None,
    memory: MemoryReport | None = None,
) -> Report:
    return Report(
        job=command.config_name,
        plan=plan,
        phases=tuple(phases),
        memory=memory,
        notes=(*command.notes, *plan.notes, *notes),
        not_yet=tuple(runnable.problems(config)),
        counts=command.counts,
        step=step,
    )


def _prompt_counts(config: PPOConfig) -> tuple[RowCount, RowCount]:
    """Training and held-out prompts."""
    data, recipe = config.data, config.recipe
    if recipe.name != "none":
        return RowCount(recipe.train_problems), RowCount(recipe.val_problems)
    count = partial(count_rows, filtered=data.filter_overlong_prompts)
    held_out = count(data.val_files, key="data.val_files", limit=data.val_max_samples)
    if config.trainer.val_only:
        return RowCount(None), held_out
    return count(data.train_files, key="data.train_files", limit=data.train_max_samples), held_out


def _file_notes(config: PPOConfig, prompts: RowCount, held_out: RowCount) -> Iterator[str]:
    for key, count in (("data.train_files", prompts), ("data.val_files", held_out)):
        yield from notes_on(key, count, config.data.max_prompt_length)
    reward = config.reward
    own = {"reward.custom_reward_function.path": reward.custom_reward_function.path}
    own |= {f"{section}.{PATH}": path for section, path in dist_checkpoints(config).items()}
    if reward.reward_model.enable:
        own["reward.reward_model.model_path"] = reward.reward_model.model_path
    if config.trainer.resume_mode == "resume_path":
        own["trainer.resume_from_path"] = config.trainer.resume_from_path
    tokenizer = config.actor_rollout_ref.model.tokenizer_path
    if tokenizer and not is_hub_name(tokenizer):
        own["actor_rollout_ref.model.tokenizer_path"] = tokenizer
    for key, path in own.items():
        if path and not os.path.exists(expanded(path)):
            yield f"{key}: {path} is not on this machine; a run would refuse to start"
    for choice in own_choices(config):
        if not os.path.exists(choice.function.path):
            unknown = (
                "so it is not known whether it needs a critic or a reference; a run would refuse to start"
            )
            yield f"{choice.key}: {choice.function.path} is not on this machine, {unknown}"
    if config.recipe.name == "none" and config.data.train_files is None and not config.trainer.val_only:
        yield "data.train_files is not given: prompts are not counted; a run would refuse to start"
