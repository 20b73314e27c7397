"""Which roles a run has, where their weights come from, and whether their routers can be replayed. Standard
library and the schema only.

In: the configuration. Out: yes or no, checkpoints, problems. Left out on purpose: where roles run
(`batch_plan/topology.py`), and reading weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from hydraflow.algorithms.config import BYPASS_LOSSES, POLICY_LOSSES, Loss, estimator_of
from hydraflow.engine.config import MegatronConfig
from hydraflow.errors import Problem
from hydraflow.schema import PPOConfig
from hydraflow.system.paths import core_checkpoint_problems
from hydraflow.workers.config import ActorConfig

PATH = "megatron.dist_checkpointing_path"
"""The key of a checkpoint of Megatron-Core, in the section of a role."""


def needs_critic(config: PPOConfig) -> bool:
    """Whether the run trains a value model."""
    if config.critic.enable is not None:
        return config.critic.enable
    return estimator_of(config.algorithm.adv_estimator).critic


def fills_by_tokens(config: PPOConfig, role: str) -> bool:
    """Whether a role's micro-batches are filled by tokens (dynamic batch size): those of the actor's or the
    critic's update, or of the rollout's or the reference's log-probability pass. Null follows the actor."""
    policy = config.actor_rollout_ref
    own = {
        "actor": policy.actor.use_dynamic_bsz,
        "critic": config.critic.use_dynamic_bsz,
        "rollout": policy.rollout.log_prob_use_dynamic_bsz,
        "ref": policy.ref.log_prob_use_dynamic_bsz,
    }[role]
    return policy.actor.use_dynamic_bsz if own is None else own


def keeps_groups(config: PPOConfig) -> bool:
    """Whether the responses to a prompt stay together, which only packed rows gain by."""
    return config.trainer.keep_groups and config.actor_rollout_ref.model.use_remove_padding


def policy_loss(config: PPOConfig) -> Loss:
    """The policy loss: in bypass mode `rollout_correction.loss_type` may replace the configured one."""
    correction = config.algorithm.rollout_correction
    instead = BYPASS_LOSSES.get(correction.loss_type, Loss()) if correction.bypass_mode else Loss()
    if instead.where:
        return instead
    # an unknown name is reported elsewhere
    return POLICY_LOSSES.get(config.actor_rollout_ref.actor.policy_loss.loss_mode, Loss())


def needs_reference(config: PPOConfig) -> bool:
    """Whether a KL term or the policy loss is relative to the reference policy."""
    in_loss = config.actor_rollout_ref.actor.use_kl_loss or "ref_log_prob" in policy_loss(config).columns
    return in_loss or config.algorithm.use_kl_in_reward


def own_reference(config: PPOConfig) -> bool:
    """Whether the reference has weights of its own: with adapters it is the actor with its adapters off."""
    return needs_reference(config) and config.actor_rollout_ref.model.lora_rank == 0


def megatron_sections(config: PPOConfig) -> Iterator[tuple[str, MegatronConfig]]:
    """Sections of the roles that use Megatron-Core."""
    policy = config.actor_rollout_ref
    if policy.actor.strategy == "megatron":
        yield "actor_rollout_ref.actor", policy.actor.megatron
        if own_reference(config):
            yield "actor_rollout_ref.ref", policy.ref.megatron
    if needs_critic(config) and config.critic.strategy == "megatron":
        yield "critic", config.critic.megatron


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
    """Problems of checkpoint paths that are missing on this machine or hold no Megatron-Core checkpoint."""
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


def replay_problems(actor: ActorConfig, *, has_routers: bool) -> list[Problem]:
    """A problem if routing replay is on but the model has nothing to replay. Called by the plan if
    config.json is on this machine, by a job before it starts, and by the worker for models with remote code.

    >>> actor = ActorConfig()
    >>> actor.router_replay.mode = "R2"
    >>> print(*replay_problems(actor, has_routers=False))
    actor_rollout_ref.actor.router_replay.mode=R2: the model has no experts that can be replayed
          -> actor_rollout_ref.actor.router_replay.mode=disabled
    """
    key, mode = "actor_rollout_ref.actor.router_replay.mode", actor.router_replay.mode
    if has_routers or mode == "disabled":
        return []
    return [Problem(key, mode, "the model has no experts that can be replayed", f"{key}=disabled")]
