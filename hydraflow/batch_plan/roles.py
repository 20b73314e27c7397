"""Which roles a run has. Standard library and the schema only.

In: the configuration. Out: yes or no. Left out on purpose: where they run (`batch_plan/topology.py`).
"""

from __future__ import annotations

from hydraflow.algorithms.config import ESTIMATORS
from hydraflow.schema import PPOConfig


def needs_critic(config: PPOConfig) -> bool:
    """Whether the run trains a value model."""
    if config.critic.enable is not None:
        return config.critic.enable
    chosen = ESTIMATORS.get(config.algorithm.adv_estimator)
    return chosen is not None and chosen.critic


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


def needs_reference(config: PPOConfig) -> bool:
    """Whether any KL term measures from the reference policy."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def own_reference(config: PPOConfig) -> bool:
    """Whether the reference has weights of its own: with adapters it is the actor with its adapters off."""
    return needs_reference(config) and config.actor_rollout_ref.model.lora_rank == 0
