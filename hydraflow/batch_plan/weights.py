"""Where the weights of a run's models come from: the directory of `model.path`, or a checkpoint of
Megatron-Core. Standard library and the schema only.

In: the configuration. Out: the checkpoint of each role, and whether weights in a model's directory are read.
Left out on purpose: reading either.
"""

from __future__ import annotations

from hydraflow.batch_plan.roles import needs_critic, own_reference
from hydraflow.batch_plan.stages import megatron_sections
from hydraflow.errors import Problem
from hydraflow.schema import PPOConfig
from hydraflow.system.paths import core_checkpoint_problems

PATH = "megatron.dist_checkpointing_path"
"""In the section of a role."""


def dist_checkpoints(config: PPOConfig) -> dict[str, str]:
    """Section of a role -> the checkpoint of Megatron-Core that its weights come from. A run that only
    samples reads none."""
    if config.trainer.debug.rollout_only:
        return {}
    return {
        section: str(settings.dist_checkpointing_path)
        for section, settings in megatron_sections(config)
        if settings.use_dist_checkpointing and settings.dist_checkpointing_path
    }


def missing_checkpoints(config: PPOConfig) -> list[Problem]:
    """Problems of checkpoints that are not on this machine, or are none of Megatron-Core's."""
    found = dist_checkpoints(config).items()
    return [one for section, path in found for one in core_checkpoint_problems(path, f"{section}.{PATH}")]


def reads_policy_files(config: PPOConfig) -> bool:
    """Whether a role starts from the weights in the directory of `actor_rollout_ref.model`."""
    roles = ["actor_rollout_ref.actor"]
    roles += ["actor_rollout_ref.ref"] if own_reference(config) else []
    roles += ["critic"] if needs_critic(config) and not config.critic.model.path else []
    return not dist_checkpoints(config).keys() >= set(roles)


def reads_critic_files(config: PPOConfig) -> bool:
    """Whether the critic starts from the weights in the directory of `critic.model`, or of the policy's."""
    return needs_critic(config) and "critic" not in dist_checkpoints(config)
