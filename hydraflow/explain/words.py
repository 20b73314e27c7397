"""Describes one step in words and numbers, phase by phase.

In: the plan and the configuration it was made from. Out: `Phase`s. Left out on purpose: arithmetic on keys;
all numbers are the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hydraflow.algorithms.config import OldFrom, estimator_of
from hydraflow.batch_plan.generate import GeneratePlan
from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.sft import SFTPlan, noun_of
from hydraflow.schema import DPOConfig, GenerateConfig, PPOConfig, SupervisedConfig
from hydraflow.system.printing import count
from hydraflow.trainer.phases import old_from, step_phases


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: str
    text: str


def ppo_phases(plan: BatchPlan, config: PPOConfig, *, exact: bool = False) -> Iterator[Phase]:
    """A step of reinforcement learning. `exact`: see `rollout_is_exact`."""
    for phase in step_phases(config):
        yield Phase(phase.name, _TEXTS[phase.name](plan, config, exact))
    yield _run(plan.steps_per_epoch, plan.total_steps, plan.actor, "prompts", plan.prompts_per_step)


def sft_phases(plan: SFTPlan, config: SupervisedConfig) -> Iterator[Phase]:
    """A step of supervised training, which is one optimizer step."""
    batch, role, noun = plan.conversations_per_step, plan.role, noun_of(config)
    longest = count(config.data.max_length, "token")
    yield Phase(
        "data",
        f"{count(batch, noun)} of at most {longest}{' per conversation' if noun == 'pair' else ''} are drawn",
    )
    if isinstance(config, DPOConfig):
        yield Phase("reference", "the reference computes log-probabilities of both responses")
    yield Phase("update", f"1 optimizer step: {_on_ranks(role, 'row' if noun == 'pair' else noun)}")
    yield _run(plan.steps_per_epoch, plan.total_steps, role, f"{noun}s", batch)


def generate_phases(plan: GeneratePlan, config: GenerateConfig) -> Iterator[Phase]:
    """What one call and the whole run of `generate` do."""
    n, length = plan.samples_per_prompt, config.data.max_response_length
    answers = f"{count(n, 'response')} of at most {count(length, 'token')} to each prompt"
    yield Phase("call", f"{count(plan.prompts_per_call, 'prompt')} together: {answers}")
    each = count(plan.concurrent_sequences, "sequence")
    yield Phase("sample", f"{count(plan.replicas, 'replica')} decode at most {each} each at a time")
    if plan.prompts is not None:
        calls = count(-(-plan.prompts // plan.prompts_per_call), "call")
        responses = count(plan.prompts * n, "response")
        yield Phase("run", f"{count(plan.prompts, 'prompt')} in {calls}: {responses}")


def forwards(micro: MicroPlan, rows: int) -> str:
    """How a data rank's rows pass through the model.

    >>> forwards(MicroPlan(rows=8, max_tokens=None), 32), forwards(MicroPlan(rows=None, max_tokens=2000), 32)
    ('in 4 forwards of 8 rows', 'in forwards of at most 2,000 tokens')
    """
    if micro.max_tokens is not None:
        return f"in forwards of at most {micro.max_tokens:,} tokens"
    assert micro.rows is not None
    passes, left = divmod(rows, micro.rows)
    if passes + bool(left) == 1:
        return "in 1 forward"
    rows_each = f"{'at most ' if left else ''}{count(micro.rows, 'row')}"
    return f"in {count(passes + bool(left), 'forward')} of {rows_each}"


def _prompts(plan: BatchPlan, config: PPOConfig) -> str:
    longest = count(config.data.max_prompt_length, "token")
    drawn = f"{count(plan.prompts_per_step, 'prompt')} of at most {longest} are drawn"
    if not plan.filter:
        return drawn
    call, least, most = plan.filter.prompts_per_call, plan.filter.least_prompts, plan.filter.most_prompts
    bounds = f"at least {least:,}" + (f", at most {most:,}" if most else "")
    return f"{drawn}, and replacements for those whose scores are all equal: {call:,} at a time, {bounds}"


def _generation(plan: BatchPlan, config: PPOConfig) -> str:
    rollout, tokens = plan.rollout, config.data.max_response_length
    each = f"{count(rollout.trajectories_per_engine, 'trajectory')} each"
    waves = f", in {count(rollout.waves, 'wave')} of at most {rollout.concurrent_sequences:,} at a time"
    waves = waves if rollout.waves > 1 else ""
    total = f"{count(plan.samples_per_prompt, 'response')} of at most {count(tokens, 'token')} to each prompt"
    sampled = f"{count(plan.trajectories_per_step, 'trajectory')} from {count(rollout.engines, 'engine')}"
    greedy = estimator_of(config.algorithm.adv_estimator).greedy_baseline
    besides = "; and a greedy response to each prompt, which is scored but not trained on" if greedy else ""
    return f"{total}: {sampled}, {each}{waves}{besides}"


def _scoring(plan: BatchPlan, config: PPOConfig) -> str:
    if plan.reward_model:
        return f"a reward model scores every trajectory, {_pass(plan, 'reward_model', plan.reward_model)}"
    workers = count(config.reward.num_workers, "process")
    return f"the reward function scores {count(plan.trajectories_per_step, 'trajectory')}, in {workers}"


def _old_log_probs(plan: BatchPlan, config: PPOConfig, exact: bool) -> str:
    first = _pass(plan, "actor", plan.old_log_prob)
    compares = f"in the first step after a start the actor computes its own and compares them, {first}"
    if config.actor_rollout_ref.actor.adaptive_entropy.enabled:
        compares = f"the actor computes its own to measure the entropy, {first}"
    match old_from(config, plan, exact=exact):
        case OldFrom.ROLLOUT if config.algorithm.rollout_correction.bypass_mode:
            return f"those of the generation engine, by bypass_mode; {compares}"
        case OldFrom.ROLLOUT:
            return f"those of the generation engine, which computes as the actor does; {compares}"
        case OldFrom.FIRST_PASS:
            return f"those of the update's own forward pass, as it takes one optimizer step; {compares}"
    return f"the actor computes log-probabilities again, {first}"


def _advantages(plan: BatchPlan, config: PPOConfig) -> str:
    estimator = config.algorithm.adv_estimator
    groups = f", by groups of {plan.samples_per_prompt}" if estimator_of(estimator).groups else ""
    return f"{estimator} turns scores into advantages{groups}"


def _sync(plan: BatchPlan) -> str:
    sent = f"the new weights go to {count(plan.rollout.engines, 'generation engine')}"
    if not plan.asynchronous:
        return sent
    rounds = count(plan.asynchronous.rounds_per_sync, "round")
    stale = count(plan.asynchronous.stale_trajectories, "trajectory")
    return f"{sent} after every {rounds}; {stale} may come from older weights"


_TEXTS: dict[str, Callable[[BatchPlan, PPOConfig, bool], str]] = {
    "prompts": lambda plan, config, _: _prompts(plan, config),
    "generate": lambda plan, config, _: _generation(plan, config),
    "score": lambda plan, config, _: _scoring(plan, config),
    "log-probs": _old_log_probs,
    "reference": lambda plan, *_: f"the reference computes its own, {_pass(plan, 'ref', plan.ref)}",
    "teachers": lambda plan, *_: (
        f"the teacher of its data source judges each row, {_pass(plan, 'actor', plan.old_log_prob)}"
    ),
    "values": lambda plan, *_: f"the critic computes values, {_pass(plan, 'critic', plan.values)}",
    "advantages": lambda plan, config, _: _advantages(plan, config),
    "critic": lambda plan, *_: _update(plan.critic, plan.prompts_per_step),
    "actor": lambda plan, *_: _update(plan.actor, plan.prompts_per_step),
    "sync": lambda plan, *_: _sync(plan),
}
"""Phase of `trainer/phases.py` -> its description, with the plan's numbers."""


def _pass(plan: BatchPlan, role: str, micro: MicroPlan | None) -> str:
    """One pass of a step's trajectories through a role's model; a reference may be the actor's."""
    assert micro is not None, f"a step with {role} has a plan for it"
    ranks = plan.layouts.get(role, plan.layouts["actor"]).data_ranks
    rows = -(-plan.trajectories_per_step // ranks)
    return f"on {count(ranks, 'data rank')} of {count(rows, 'row')}, {forwards(micro, rows)}"


def _on_ranks(role: RolePlan, noun: str) -> str:
    """The passes of an optimizer step's rows through a role's model."""
    each = count(role.rows_per_rank, noun)
    return f"{count(role.data_ranks, 'data rank')} of {each}, {forwards(role.micro, role.rows_per_rank)}"


def _update(role: RolePlan | None, prompts: int) -> str:
    assert role is not None, "a step with a critic has a plan for it"
    minis = prompts // role.mini_batch_prompts
    passes = f", {count(role.epochs, 'pass')}" if role.epochs > 1 else ""
    one = f"{count(role.mini_batch_prompts, 'prompt')} = {count(role.mini_batch_trajectories, 'trajectory')}"
    steps = count(role.optimizer_steps_per_step, "optimizer step")
    each = "each" if role.optimizer_steps_per_step > 1 else "it"
    return f"{steps} ({count(minis, 'mini-batch')}{passes}): {each} takes {one}, on {_on_ranks(role, 'row')}"


def _run(per_epoch: int, total: int, role: RolePlan, rows: str, batch: int) -> Phase:
    """The whole run, if the number of steps is known."""
    if not total:
        unless = "so the number of steps is unknown unless trainer.total_training_steps is set"
        return Phase("run", f"the number of {rows} is not known, {unless}")
    epochs = f" ({per_epoch:,} are one pass over the {rows}, {batch:,} each)" if per_epoch else ""
    steps = role.optimizer_steps(total)
    warm = ""
    if role.warmup_steps:
        warm = f"; the learning rate rises over the first {count(role.warmup_steps, 'training step')}"
    if role.first_step > 1:
        warm += f"; only the critic learns before step {role.first_step:,}"
    return Phase("run", f"{count(total, 'training step')}{epochs}, {count(steps, 'optimizer step')}{warm}")
