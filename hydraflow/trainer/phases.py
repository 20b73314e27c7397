"""The phases of a training step: the worker of each, the columns that it reads and those that it adds.

In: the configuration. Out: the phases of its step, in order. `ppo.py` takes the columns that it passes on
from here, the plan its description of a step, and the README its table. Standard library and the schema only,
because planning works without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hydraflow.algorithms.config import OldFrom, estimator_of, is_corrected
from hydraflow.batch_plan.plans import BatchPlan
from hydraflow.batch_plan.roles import (
    keeps_groups,
    needs_critic,
    needs_reference,
    own_reference,
    policy_loss,
)
from hydraflow.engine.config import engine_config
from hydraflow.generation.config import GENERATION_ENGINES, engine_dtype
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
LENGTHS = ("lengths", "prompt_lengths")
"""Columns that the controller reads to cut mini-batches. A source other than the run's own generation may
lack `prompt_lengths`."""
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
"""Columns of a trajectory before it is scored, besides `sampled_too`."""
SCORES = ("score", "acc", "failed")


def _more_columns(config: PPOConfig) -> tuple[Iterable[str], Sequence[str], Sequence[str]]:
    """Columns that only some runs have, in three groups: the phase `advantages` reads them, the actor's loss
    reads them, the phase `log-probs` adds them."""
    actor, in_reward, in_loss, measured = config.actor_rollout_ref.actor, [], [], []
    if config.algorithm.use_kl_in_reward:
        in_reward += ["old_log_probs", "ref_log_prob"]
    if actor.use_kl_loss:
        in_loss.append("ref_log_prob")
    if is_corrected(config.algorithm.rollout_correction):
        in_loss.append("rollout_log_probs")
    loss = policy_loss(config)
    in_loss += loss.columns
    if loss.chooses:
        in_loss += ["group", "sample"]
    if config.distillation.enabled:
        in_advantages = config.distillation.distillation_loss.use_policy_gradient
        in_reward += ["old_log_probs", "teacher_log_probs"] if in_advantages else []
        in_loss += [] if in_advantages else teacher_columns(config)
    if estimator_of(config.algorithm.adv_estimator).sum_pi_squared:
        measured.append("sum_pi_squared")
        in_reward += ["old_log_probs", "sum_pi_squared"]
    if actor.router_replay.by_actor:
        measured.append("routed_experts")
        in_loss.append("routed_experts")
    return dict.fromkeys(in_reward), (*in_loss, *sampled_too(config)), measured


def sampled_too(config: PPOConfig) -> tuple[str, ...]:
    """Columns of this run's trajectories besides `TRAJECTORY`."""
    return ("routed_experts",) if config.actor_rollout_ref.actor.router_replay.by_rollout else ()


def step_phases(config: PPOConfig) -> tuple[StepPhase, ...]:
    """The phases of a step in the order in which they start, without those that the run does not need."""
    skipped = set() if needs_critic(config) else {"values", "critic"}
    skipped |= set() if needs_reference(config) else {"reference"}
    skipped |= set() if config.distillation.enabled else {"teachers"}
    return tuple(phase for phase in _all_phases(config) if phase.name not in skipped)


def _all_phases(config: PPOConfig) -> tuple[StepPhase, ...]:
    in_reward, in_loss, measured = _more_columns(config)
    sampled, values = sampled_too(config), ("values",) if needs_critic(config) else ()
    inputs = MODEL_INPUTS + (("group",) if keeps_groups(config) else ())
    # with LoRA the reference is the actor with its adapters disabled
    reference = "ReferenceWorker" if own_reference(config) else "ActorWorker"
    return (
        StepPhase(
            "prompts",
            "data/",
            (),
            ("prompts", "group", "sample", "data_source", "reward_model", "extra_info"),
        ),
        StepPhase(
            "generate", "RolloutWorker, generation/", ("prompts",), (*SAMPLED, "prompt_lengths", *sampled)
        ),
        StepPhase(
            "score",
            "RewardWorker, rewards/",
            ("responses", "data_source", "reward_model", "extra_info"),
            score_columns(config),
        ),
        StepPhase(
            "log-probs",
            "ActorWorker, engine/",
            (*inputs, *sampled),
            ("old_log_probs", *measured),
        ),
        StepPhase("reference", f"{reference}, engine/", inputs, ("ref_log_prob",)),
        StepPhase("teachers", "TeacherWorker, engine/", inputs, teacher_columns(config)),
        StepPhase("values", "CriticWorker, engine/", inputs, ("values",)),
        StepPhase(
            "advantages",
            "AdvantageWorker, algorithms/",
            ("prompts", "response_mask", "group", "sample", "finish_reason", *values, *in_reward),
            ("token_level_rewards", "advantages", "returns"),
        ),
        StepPhase("critic", "CriticWorker, engine/", (*inputs, "values", "returns", *LENGTHS)),
        StepPhase(
            "actor",
            "ActorWorker, engine/",
            tuple(dict.fromkeys((*inputs, "old_log_probs", "advantages", *in_loss, *LENGTHS))),
        ),
        StepPhase("sync", "RolloutWorker, generation/", ()),
    )


def score_columns(config: PPOConfig) -> tuple[str, ...]:
    """The columns of a step's scores: `SCORES`, and those that the estimator needs."""
    estimator = estimator_of(config.algorithm.adv_estimator)
    baselines = ["reward_baselines"] if estimator.greedy_baseline else []
    return (*SCORES, *baselines, *(["reward_parts"] if estimator.several_rewards else []))


def teacher_columns(config: PPOConfig) -> tuple[str, ...]:
    """The columns that teachers add."""
    if config.distillation.distillation_loss.over_vocabulary:
        return "target_tokens", "teacher_top_log_probs"
    return ("teacher_log_probs",)


def old_from(config: PPOConfig, plan: BatchPlan, *, exact: bool, mini_batches: int = 1) -> OldFrom:
    """The source of the old log-probabilities for one batch. `exact`: the generation engine's are
    bit-identical to the trainer's, and sampled with the newest weights. `mini_batches`: number in the
    batch."""
    correction = config.algorithm.rollout_correction
    measures = config.actor_rollout_ref.actor.adaptive_entropy.enabled
    records = config.actor_rollout_ref.actor.router_replay.by_actor
    if records or estimator_of(config.algorithm.adv_estimator).sum_pi_squared:
        return OldFrom.RECOMPUTE  # the pass that measures them
    if correction.bypass_mode or (exact and not measures):
        return OldFrom.ROLLOUT
    needed_before_update = (
        measures
        or config.algorithm.use_kl_in_reward
        or (config.distillation.enabled and config.distillation.distillation_loss.use_policy_gradient)
        or correction.rollout_rs is not None
        or (correction.rollout_is is not None and correction.rollout_is_batch_normalize)
    )
    once = plan.actor.optimizer_steps_per_step == mini_batches == 1
    return OldFrom.FIRST_PASS if once and not needed_before_update else OldFrom.RECOMPUTE


def rollout_is_exact(config: PPOConfig, bytes_of: Callable[[str], int]) -> bool:
    """Whether the generation engine's log-probabilities are the trainer's: same computation, same
    dtype. `bytes_of`: bytes per number of a configured dtype.

    In 16 bits, summing in another order changes a ratio near 1 too much, so there they are never taken as
    equal.
    """
    policy = config.actor_rollout_ref
    trainer = engine_config(policy.actor.strategy, policy.actor)
    computed = trainer.compute_dtype
    names = (
        engine_dtype(policy.rollout.dtype, computed),
        computed,
        trainer.product_dtype,
        trainer.model_dtype,
    )
    sizes = {bytes_of(name) for name in names}
    same = GENERATION_ENGINES[policy.rollout.name].computes_as_trainer
    return same and len(sizes) == 1 and sizes <= {4, 8}
