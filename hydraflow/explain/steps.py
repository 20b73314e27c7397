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
    minis, mini, policy = q // actor.mini_batch_prompts, actor.mini_batch_prompts, "actor_rollout_ref"
    answers, each = count(n, "response"), count(actor.mini_batch_trajectories, "trajectory")
    prompts = PictureBar(
        count(q, "prompt"), "Q", "data.train_batch_size", q, "1", becomes=f"{answers} to each prompt"
    )
    cut = f"S = Q·n = {q}·{n}, cut into {count(minis, 'mini-batch')}"
    whole = count(plan.trajectories_per_step, "trajectory")
    step = PictureBar(whole, cut, f"{policy}.rollout.n", minis, each)
    shared = f"G = M·n = {mini}·{n}, on {count(actor.data_ranks, 'data rank')}"
    rows, key = count(actor.rows_per_rank, "row"), f"{policy}.actor.ppo_mini_batch_size"
    update = PictureBar(f"{each} per optimizer step", shared, key, actor.data_ranks, rows)
    taken = count(actor.optimizer_steps_per_step, "optimizer step")
    steps = f"K = (Q/M)·E = ({q}/{mini})·{actor.epochs} = {taken} per training step"
    bars = (prompts, step, update, _forwards(actor, f"{policy}.actor.ppo_"))
    end = ("then one optimizer step", steps, *_total(plan.total_steps, actor))
    return StepPicture(f"One training step: {count(q, 'prompt')}, {taken}", bars, end)


def sft_step(plan: SFTPlan, noun: str) -> StepPicture:
    """A step of supervised training, which is one optimizer step. noun: for one of its examples."""
    role, batch = plan.role, count(plan.conversations_per_step, noun)
    ranks, rows = f"on {count(role.data_ranks, 'data rank')}", count(role.rows_per_rank, "row")
    first = PictureBar(batch, ranks, "data.train_batch_size", role.data_ranks, rows)
    end = ("then one optimizer step", *_total(plan.total_steps, role))
    return StepPicture(
        f"One training step: {batch}, 1 optimizer step", (first, _forwards(role, "data.")), end
    )


def _forwards(role: RolePlan, prefix: str) -> PictureBar:
    """What one data rank does: forwards of equal rows, or of as many tokens as fit."""
    total = f"{count(role.rows_per_rank, 'row')} on one data rank"
    letter = f"g = G/dp = {role.mini_batch_trajectories}/{role.data_ranks}"
    if role.micro.max_tokens is not None:
        tokens, key = f"≤ {count(role.micro.max_tokens, 'token')}", f"{prefix}max_token_len_per_gpu"
        return PictureBar(total, f"{letter}, filled by tokens", key, None, tokens)
    assert role.micro.rows is not None
    passes, key = role.rows_per_rank // role.micro.rows, f"{prefix}micro_batch_size_per_gpu"
    letter = f"{letter}, a = g/m = {count(passes, 'forward')}"
    return PictureBar(total, letter, key, passes, count(role.micro.rows, "row"))


def _total(steps: int, role: RolePlan) -> tuple[str, ...]:
    if not steps:
        return ()
    whole = count(role.optimizer_steps(steps), "optimizer step")
    return (f"{count(steps, 'training step')} in the run = {whole}",)
