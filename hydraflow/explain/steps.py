"""Which bars the picture of a step has: prompts, trajectories, one optimizer step, one data rank, one
forward.

In: a plan. Out: a `StepPicture` for `svg.py`, with the plan's own numbers.
"""

from __future__ import annotations

from hydraflow.batch_plan.parts import RolePlan
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.explain.svg import PictureBar, StepPicture
from hydraflow.system.printing import count


def ppo_step(plan: BatchPlan) -> StepPicture:
    """A step of reinforcement learning: the actor's."""
    q, n, actor = plan.prompts_per_step, plan.samples_per_prompt, plan.actor
    minis, mini = q // actor.mini_batch_prompts, actor.mini_batch_prompts
    bars = (
        PictureBar(
            count(q, "prompt"),
            "Q",
            "data.train_batch_size",
            q,
            "1",
            becomes=f"{count(n, 'response')} to each prompt",
        ),
        PictureBar(
            count(plan.trajectories_per_step, "trajectory"),
            f"S = Q·n = {q}·{n}, cut into {count(minis, 'mini-batch')}",
            "actor_rollout_ref.rollout.n",
            minis,
            count(actor.mini_batch_trajectories, "trajectory"),
        ),
        PictureBar(
            f"{count(actor.mini_batch_trajectories, 'trajectory')} per optimizer step",
            f"G = M·n = {mini}·{n}, on {count(actor.data_ranks, 'data rank')}",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            actor.data_ranks,
            count(actor.rows_per_rank, "row"),
        ),
        _forwards(actor, "actor_rollout_ref.actor"),
    )
    steps = (
        f"K = (Q/M)·E = ({q}/{mini})·{actor.epochs} ="
        f" {count(actor.optimizer_steps_per_step, 'optimizer step')} per training step"
    )
    title = (
        f"One training step: {count(q, 'prompt')}, {count(actor.optimizer_steps_per_step, 'optimizer step')}"
    )
    return StepPicture(title, bars, ("then one optimizer step", steps, *_total(plan.total_steps, actor)))


def sft_step(plan: SFTPlan) -> StepPicture:
    """A step of supervised training, which is one optimizer step."""
    role, batch = plan.role, plan.conversations_per_step
    ranks = f"on {count(role.data_ranks, 'data rank')}"
    first = PictureBar(
        count(batch, "conversation"),
        ranks,
        "data.train_batch_size",
        role.data_ranks,
        count(role.rows_per_rank, "row"),
    )
    title = f"One training step: {count(batch, 'conversation')}, 1 optimizer step"
    return StepPicture(
        title, (first, _forwards(role, "data")), ("then one optimizer step", *_total(plan.total_steps, role))
    )


def _forwards(role: RolePlan, section: str) -> PictureBar:
    """What one data rank does: forwards of equal rows, or of as many tokens as fit."""
    prefix = "ppo_" if section != "data" else ""
    total, letter = (
        f"{count(role.rows_per_rank, 'row')} on one data rank",
        f"g = G/dp = {role.mini_batch_trajectories}/{role.data_ranks}",
    )
    if role.micro.max_tokens is not None:
        tokens = f"≤ {count(role.micro.max_tokens, 'token')}"
        return PictureBar(
            total, f"{letter}, filled by tokens", f"{section}.{prefix}max_token_len_per_gpu", None, tokens
        )
    assert role.micro.rows is not None
    passes = role.rows_per_rank // role.micro.rows
    letter = f"{letter}, a = g/m = {count(passes, 'forward')}"
    return PictureBar(
        total, letter, f"{section}.{prefix}micro_batch_size_per_gpu", passes, count(role.micro.rows, "row")
    )


def _total(steps: int, role: RolePlan) -> tuple[str, ...]:
    if not steps:
        return ()
    whole = count(role.optimizer_steps(steps), "optimizer step")
    return (f"{count(steps, 'training step')} in the run = {whole}",)
