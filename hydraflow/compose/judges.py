"""What the batch plan and `runnable.py` say against a configuration, for the report that names every mistake at once.

In: a composed configuration and where its values come from. Out: problems. Standard library only, so that nothing waits for torch.
Left out on purpose: what needs files, models or devices; the jobs look at those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.batch_plan.sft import resolve_sft_plan
from hydraflow.compose.command import Command
from hydraflow.debugging import applied
from hydraflow.device import listed_gpus
from hydraflow.errors import ConfigError, Problem
from hydraflow.runnable import problems as not_runnable
from hydraflow.schema import PPOConfig, SFTConfig
from hydraflow.trainer.config import ClusterConfig, RunConfig

_CPU_PROCESSES = 2
"""Processes of a machine without GPUs, where the user names no number."""


def judge_ppo(config: PPOConfig, command: Command) -> Sequence[Problem]:
    """Broken rules of the batch plan, and what can be planned but not run yet."""
    config = applied(config)
    prompts = config.recipe.train_problems if config.recipe.name != "none" else None
    not_yet = not_runnable(config)
    here = replace(config, cluster=ClusterConfig())  # cluster.* is for python -m hydraflow.plan alone
    try:
        resolve_plan(here, prompts=prompts, devices_per_node=_devices(config.trainer), origins=command.origins)
    except ConfigError as error:
        return [*error.problems, *not_yet]
    return not_yet


def judge_sft(config: SFTConfig, command: Command) -> Sequence[Problem]:
    """Broken rules of the batch plan."""
    config = applied(config)
    try:
        resolve_sft_plan(config, conversations=None, devices_per_node=_devices(config.trainer), origins=command.origins)
    except ConfigError as error:
        return error.problems
    return []


def _devices(trainer: RunConfig) -> int:
    """Devices of this machine, as far as that is known without asking the driver."""
    return (0 if trainer.device == "cpu" else listed_gpus()) or _CPU_PROCESSES
