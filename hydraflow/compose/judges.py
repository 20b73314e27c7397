"""Each command's own checks of its configuration, for the report that lists every mistake at once.

In: a composed configuration and the origins of its values. Out: broken rules of the batch plan and features
that cannot run yet (`runnable.py`); separately, files and folders that are missing on this machine. Standard
library only, so that errors are reported before torch is imported. Left out on purpose: the contents of
files, models and devices, which the jobs check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.batch_plan.roles import needs_critic
from hydraflow.batch_plan.sft import resolve_sft_plan
from hydraflow.compose.command import Command
from hydraflow.compose.debugging import applied
from hydraflow.compose.runnable import problems as not_runnable
from hydraflow.device import planned_devices
from hydraflow.errors import Faults, Problem
from hydraflow.models.config import ModelSourceConfig
from hydraflow.rewards.config import RewardConfig
from hydraflow.schema import EvalConfig, GenerateConfig, PPOConfig, SFTConfig
from hydraflow.system.paths import file_problems, model_problems
from hydraflow.trainer.config import ClusterConfig


def judge_ppo(config: PPOConfig, command: Command) -> Sequence[Problem]:
    """Broken rules of the batch plan, and features that can be planned but not run yet."""
    config, faults = applied(config), Faults()
    prompts = config.recipe.train_problems if config.recipe.name != "none" else None
    here = replace(config, cluster=ClusterConfig())  # cluster.* is for python -m hydraflow.plan alone
    devices, origins = planned_devices(config.trainer.device), command.origins
    faults.passes(lambda: resolve_plan(here, prompts=prompts, devices_per_node=devices, origins=origins))
    return [*faults.problems, *not_runnable(config)]


def judge_sft(config: SFTConfig, command: Command) -> Sequence[Problem]:
    """Broken rules of the batch plan, and features that can be planned but not run yet."""
    config, faults = applied(config), Faults()
    devices, origins = planned_devices(config.trainer.device), command.origins
    faults.passes(
        lambda: resolve_sft_plan(config, conversations=None, devices_per_node=devices, origins=origins)
    )
    return [*faults.problems, *not_runnable(config)]


def judge_generate(config: GenerateConfig, command: Command) -> Sequence[Problem]:
    """Features that can be planned but not run yet."""
    return not_runnable(applied(config))


def missing_for_ppo(config: PPOConfig, command: Command) -> Iterator[Problem]:
    """Missing files of `main_ppo`."""
    config = applied(config)
    yield from _missing_reward(config.reward)
    if config.recipe.name != "none":
        return
    yield from _missing_model(config.actor_rollout_ref.model, "actor_rollout_ref.model")
    if needs_critic(config):
        yield from _missing_model(config.critic.model, "critic.model")
    files = {"data.val_files": config.data.val_files}
    yield from _missing(
        files if config.trainer.val_only else {"data.train_files": config.data.train_files, **files}
    )


def missing_for_sft(config: SFTConfig, command: Command) -> Iterator[Problem]:
    """Missing files of a `main_sft` run."""
    yield from _missing_model(config.model, "model")
    yield from _missing(
        {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
    )


def missing_for_generate(config: GenerateConfig, command: Command) -> Iterator[Problem]:
    """Missing files of a `main_generate` run."""
    yield from _missing_model(config.model, "model")
    yield from _missing({"data.path": config.data.path})


def missing_for_eval(config: EvalConfig, command: Command) -> Iterator[Problem]:
    """Missing files of a `main_eval` run."""
    yield from _missing({"data.path": config.data.path})
    yield from _missing_reward(config.reward)


def _missing_model(model: ModelSourceConfig, field: str) -> Iterator[Problem]:
    if model.path:
        yield from model_problems(model.path, f"{field}.path")


def _missing_reward(reward: RewardConfig) -> Iterator[Problem]:
    yield from _missing({"reward.custom_reward_function.path": reward.custom_reward_function.path})


def _missing(files: dict[str, object]) -> Iterator[Problem]:
    for key, named in files.items():
        if named is not None:
            yield from file_problems(named, key)
