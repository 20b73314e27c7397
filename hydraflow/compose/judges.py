"""Each command's checks of its configuration, for the one report of all mistakes.

In: a composed configuration and the origins of its values. Out: broken rules of the batch plan and features
that cannot run yet (`runnable.py`); separately, files and folders that are missing on this machine. Standard
library only, so that errors are reported before torch is imported. Left out on purpose: the contents of
files, models and devices, which the jobs check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hydraflow.batch_plan.generate import resolve_generate_plan
from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.batch_plan.roles import missing_checkpoints, needs_critic
from hydraflow.batch_plan.settings import value_at
from hydraflow.batch_plan.sft import resolve_sft_plan
from hydraflow.compose.command import Command
from hydraflow.compose.debugging import applied
from hydraflow.compose.own_functions import REWARD, own_problems
from hydraflow.compose.runnable import problems as not_runnable
from hydraflow.device import planned_devices
from hydraflow.errors import Faults, Problem
from hydraflow.schema import EvalConfig, GenerateConfig, JobConfig, PPOConfig, SupervisedConfig
from hydraflow.system.paths import file_problems, model_problems
from hydraflow.trainer.config import ClusterConfig

REWARD_MODEL = "reward.reward_model.model_path"


def judge(config: JobConfig, command: Command) -> list[Problem]:
    """Broken rules of the batch plan, and features that can be planned but not run yet.

    The plan is resolved only to check it, before torch or Ray is imported. A job resolves its own for the
    devices and prompts that it finds.
    """
    config, faults = applied(config), Faults()
    devices = planned_devices(config.trainer.device)
    known: dict[str, Any] = {"devices_per_node": devices, "origins": command.origins}
    if isinstance(config, PPOConfig):
        prompts = config.recipe.train_problems if config.recipe.name != "none" else None
        here = replace(config, cluster=ClusterConfig())  # cluster.* is for python -m hydraflow.plan alone
        faults.passes(partial(resolve_plan, here, prompts=prompts, **known))
    elif isinstance(config, SupervisedConfig):
        faults.passes(partial(resolve_sft_plan, config, conversations=None, **known))
    else:
        faults.passes(partial(resolve_generate_plan, config, prompts=None, **known))
    return [*faults.problems, *not_runnable(config)]


def missing(config: JobConfig | EvalConfig, command: Command) -> Iterator[Problem]:
    """Models and files that the command reads but that are not on this machine."""
    if isinstance(config, PPOConfig):
        yield from own_problems(config)
        yield from missing_checkpoints(config)
    for key in _input_keys(config):
        named = value_at(config, key)
        if key.endswith(("model.path", "model_path")):
            yield from model_problems(str(named), key) if named else ()
        elif named is not None:
            yield from file_problems(named, key)


def _input_keys(config: JobConfig | EvalConfig) -> list[str]:
    """Keys that name the models and files that the command reads."""
    if isinstance(config, EvalConfig):
        return ["data.path", REWARD]
    if isinstance(config, GenerateConfig):
        return ["model.path", "data.path"]
    if isinstance(config, SupervisedConfig):
        return ["model.path", "data.train_files", "data.val_files"]
    rewards = [REWARD, *([REWARD_MODEL] if config.reward.reward_model.enable else [])]
    if config.recipe.name != "none":
        return rewards
    models = ["actor_rollout_ref.model.path", *(["critic.model.path"] if needs_critic(config) else [])]
    files = ["data.val_files"] if config.trainer.val_only else ["data.train_files", "data.val_files"]
    return [*rewards, *models, *files]
