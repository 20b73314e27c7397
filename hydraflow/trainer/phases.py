"""The phases of a training step: the worker of each, the columns that it reads and those that it adds.

In: the configuration. Out: the phases of its step, in order. `ppo.py` takes from here which columns it passes
on, the plan its account of a step, and the README its table. Standard library and the schema only: a plan
does without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hydraflow.algorithms.config import OldFrom, is_corrected
from hydraflow.batch_plan.plans import BatchPlan
from hydraflow.batch_plan.roles import needs_critic, needs_reference, own_reference
from hydraflow.engine.config import engine_config
from hydraflow.generation.config import engine_dtype
from hydraflow.schema import PPOConfig


@dataclass(frozen=True)
class StepPhase:
    """One phase of a step."""

    name: str
    worker: str
    """Worker class, and the folder of the code that it uses."""
    reads: tuple[str, ...]
    adds: tuple[str, ...] = ()
    """Columns; empty: the phase changes weights."""


MODEL_INPUTS = ("prompts", "responses", "response_mask")
SAMPLED = (
    "responses",
    "response_mask",
    "rollout_log_probs",
    "lengths",
    "versions",
    "replica",
    "finish_reason",
)
TRAJECTORY = ("prompts", "group", "sample", *SAMPLED)
"""Columns of a trajectory before it is scored."""
SCORES = ("score", "acc", "failed")


def step_phases(config: PPOConfig) -> tuple[StepPhase, ...]:
    """The phases of a step in the order in which they start, without those that the run does not need."""
    critic, reference = needs_critic(config), needs_reference(config)
    in_reward = ("old_log_probs", "ref_log_prob") if config.algorithm.use_kl_in_reward else ()
    in_loss = ("ref_log_prob",) if config.actor_rollout_ref.actor.use_kl_loss else ()
    if is_corrected(config.algorithm.rollout_correction):
        in_loss = (*in_loss, "rollout_log_probs")
    values = ("values",) if critic else ()
    phases = (
        StepPhase(
            "prompts",
            "data/",
            (),
            ("prompts", "group", "sample", "data_source", "reward_model", "extra_info"),
        ),
        StepPhase(
            "generate",
            "RolloutWorker, generation/",
            ("prompts",),
            SAMPLED,
        ),
        StepPhase(
            "score",
            "RewardWorker, rewards/",
            ("responses", "data_source", "reward_model", "extra_info"),
            SCORES,
        ),
        StepPhase("log-probs", "ActorWorker, engine/", MODEL_INPUTS, ("old_log_probs",)),
        StepPhase("reference", reference_worker(config), MODEL_INPUTS, ("ref_log_prob",)),
        StepPhase("values", "CriticWorker, engine/", MODEL_INPUTS, ("values",)),
        StepPhase(
            "advantages",
            "AdvantageWorker, algorithms/",
            ("prompts", "response_mask", "group", "sample", "finish_reason", *values, *in_reward),
            ("token_level_rewards", "advantages", "returns"),
        ),
        StepPhase("critic", "CriticWorker, engine/", (*MODEL_INPUTS, "values", "returns", "lengths")),
        StepPhase(
            "actor",
            "ActorWorker, engine/",
            (*MODEL_INPUTS, "old_log_probs", "advantages", *in_loss, "lengths"),
        ),
        StepPhase("sync", "RolloutWorker, generation/", ()),
    )
    left_out = set() if critic else {"values", "critic"}
    left_out |= set() if reference else {"reference"}
    return tuple(phase for phase in phases if phase.name not in left_out)


def reference_worker(config: PPOConfig) -> str:
    """The worker of the reference's log-probabilities: with LoRA the actor, with its adapters disabled."""
    return f"{'ReferenceWorker' if own_reference(config) else 'ActorWorker'}, engine/"


def old_from(config: PPOConfig, plan: BatchPlan, *, exact: bool, mini_batches: int = 1) -> OldFrom:
    """The choice for one batch. `exact`: the generation engine's own are the trainer's to the last bits, and
    of the newest weights. `mini_batches`: of the batch."""
    correction = config.algorithm.rollout_correction
    if exact or correction.bypass_mode:
        return OldFrom.ROLLOUT
    before = (
        config.algorithm.use_kl_in_reward
        or correction.rollout_rs is not None
        or (correction.rollout_is is not None and correction.rollout_is_batch_normalize)
    )
    once = plan.actor.optimizer_steps_per_step == mini_batches == 1
    return OldFrom.FIRST_PASS if once and not before else OldFrom.RECOMPUTE


def rollout_is_exact(config: PPOConfig, bytes_of: Callable[[str], int]) -> bool:
    """Whether the generation engine's log-probabilities are the trainer's: same computation, same
    dtype. `bytes_of`: bytes per number of a configured dtype.

    In 16 bits, summing in another order changes a ratio near 1 too much, so there they are never taken as
    equal.
    """
    policy = config.actor_rollout_ref
    trainer = engine_config(policy.actor.strategy, policy.actor)
    computed = trainer.compute_dtype
    names = (engine_dtype(policy.rollout.dtype, computed), computed, trainer.model_dtype)
    sizes = {bytes_of(name) for name in names}
    return policy.rollout.name == "native" and len(sizes) == 1 and sizes <= {4, 8}
