"""The plan against brute force: it accepts what can be dealt out and nothing else, counts the same, and its
remedies repair.

Settings are drawn so that about half of them fit: a run that comes out even, in which some numbers are then
replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batch_plan.overrides import alternatives, plan_of, refusal
from batch_plan.simulation import (
    CannotRun,
    Counts,
    Engine,
    Fill,
    Frozen,
    Rollout,
    Run,
    Trained,
    TrainedCounts,
    simulate,
)
from hypothesis import given, note, settings
from hypothesis import strategies as st

from hydraflow.batch_plan.parts import RolePlan
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.errors import ConfigError, Problem

Draw = Callable[[st.SearchStrategy[Any]], Any]
POLICY = "actor_rollout_ref"
ACTOR, REF, ROLLOUT = f"{POLICY}.actor", f"{POLICY}.ref", f"{POLICY}.rollout"
PROMPTS = "prompts in the data"
"""One of the settings, though it is no key."""


# --- settings that come out even --------------------------------------------------


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def divisor(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from(divisors(number))


@st.composite
def even_run(draw: Draw) -> dict[str, Any]:
    """Settings of a run that can be dealt out."""
    kind, n = draw(st.sampled_from(["fsdp2", "megatron"])), draw(st.integers(1, 4))
    shared, ranks, accumulation, rows = (draw(st.sampled_from([1, 1, 2, 2, 3, 4])) for _ in range(4))
    devices = shared * ranks
    per_rank = accumulation * rows
    per_rank *= n if per_rank * ranks % n else 1
    mini = per_rank * ranks // n
    per_step = mini * draw(st.integers(1, 3))
    longest = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    nodes = draw(divisor(devices))
    taken: dict[str, Any] = {
        PROMPTS: per_step * draw(st.integers(1, 3)) + draw(st.integers(0, per_step - 1)),
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": devices // nodes,
        "trainer.total_epochs": draw(st.integers(1, 3)),
        "trainer.total_training_steps": draw(st.none() | st.integers(1, 9)),
        "data.train_batch_size": per_step,
        "data.max_prompt_length": longest[0],
        "data.max_response_length": longest[1],
        f"{ROLLOUT}.n": n,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.agent.num_workers": 1,
        f"{ACTOR}.strategy": kind,
        f"{ACTOR}.ppo_mini_batch_size": mini,
        f"{ACTOR}.ppo_epochs": draw(st.integers(1, 3)),
        f"{ACTOR}.use_dynamic_bsz": draw(st.booleans()),
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": draw(st.none() | st.just(rows)),
        f"{ACTOR}.ppo_max_token_len_per_gpu": draw(st.integers(sum(longest), 40)),
        f"{ACTOR}.optim.lr_warmup_steps": draw(st.sampled_from([-1, 0, 1, 2])),
        f"{ACTOR}.optim.lr_scheduler_type": draw(st.sampled_from(["constant", "linear", "cosine"])),
        "algorithm.adv_estimator": draw(st.sampled_from(["gae", "grpo"])),
        f"{ACTOR}.use_kl_loss": draw(st.booleans()),
    }
    taken |= draw(layout(ACTOR, kind, devices, shared)) | draw(rollout(devices))
    taken |= draw(forward(f"{ROLLOUT}.log_prob", sum(longest), 40)) | draw(
        forward(f"{REF}.log_prob", sum(longest), 40)
    )
    return (
        taken
        | draw(layout(REF, kind, devices, draw(divisor(devices))))
        | draw(critic(devices, per_step, n, sum(longest)))
    )


@st.composite
def layout(draw: Draw, role: str, kind: str, devices: int, shared: int) -> dict[str, Any]:
    """A role on its devices, `shared` of them for one row."""
    if kind == "fsdp2":
        return {
            f"{role}.fsdp_config.ulysses_sequence_parallel_size": shared,
            f"{role}.fsdp_config.fsdp_size": draw(st.just(-1) | divisor(devices)),
        }
    tensor = draw(divisor(shared))
    pipeline = draw(divisor(shared // tensor))
    expert_tensor = draw(divisor(devices // pipeline))
    expert = draw(divisor(devices // pipeline // expert_tensor))
    sizes = dict(
        tensor_model=tensor,
        pipeline_model=pipeline,
        context=shared // tensor // pipeline,
        expert_model=expert,
    )
    sizes |= dict(expert_tensor=expert_tensor)
    virtual = {
        f"{role}.megatron.virtual_pipeline_model_parallel_size": draw(
            st.sampled_from([None, None, 2]) if pipeline > 1 else st.none()
        )
    }
    return {f"{role}.megatron.{name}_parallel_size": size for name, size in sizes.items()} | virtual


@st.composite
def rollout(draw: Draw, devices: int) -> dict[str, Any]:
    """The trainer's devices, or machines of its own."""
    nodes, per_node = draw(st.sampled_from([0, 0, 1, 2])), draw(st.integers(1, 4))
    devices = nodes * per_node or devices
    tensor = draw(divisor(devices))
    pipeline = draw(divisor(devices // tensor))
    data = draw(divisor(devices // tensor // pipeline))
    sizes = dict(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, data_parallel_size=data
    )
    return {
        f"{ROLLOUT}.{name}": size
        for name, size in (sizes | dict(nnodes=nodes, n_gpus_per_node=per_node)).items()
    }


@st.composite
def forward(draw: Draw, prefix: str, longest: int, most: int) -> dict[str, Any]:
    """A pass that only computes: its own numbers, or null where it follows the actor."""
    return {
        f"{prefix}_micro_batch_size_per_gpu": draw(st.none() | st.integers(1, 9)),
        f"{prefix}_use_dynamic_bsz": draw(st.none() | st.booleans()),
        f"{prefix}_max_token_len_per_gpu": draw(st.none() | st.integers(longest, most)),
    }


@st.composite
def critic(draw: Draw, devices: int, per_step: int, n: int, longest: int) -> dict[str, Any]:
    kind, shared = draw(st.sampled_from(["fsdp2", "megatron"])), draw(divisor(devices))
    fitting = [mini for mini in divisors(per_step) if mini * n % (devices // shared) == 0]
    mini = draw(st.none() | (st.sampled_from(fitting) if fitting else st.just(per_step)))
    taken = {
        "critic.strategy": kind,
        "critic.ppo_mini_batch_size": mini,
        "critic.ppo_epochs": draw(st.none() | st.integers(1, 3)),
        "critic.use_dynamic_bsz": draw(st.none() | st.booleans()),
        "critic.ppo_micro_batch_size_per_gpu": draw(
            st.none() | divisor((mini or per_step) * n * shared // devices or 1)
        ),
        "critic.ppo_max_token_len_per_gpu": draw(st.integers(longest, 40)),
        "critic.forward_micro_batch_size_per_gpu": draw(st.none() | st.integers(1, 9)),
        "critic.forward_max_token_len_per_gpu": draw(st.none() | st.integers(longest, 40)),
    }
    return taken | draw(layout("critic", kind, devices, shared))


@st.composite
def some_run(draw: Draw, most_replaced: int = 3) -> dict[str, Any]:
    """An even run in which up to that many numbers are replaced by any others."""
    taken = draw(even_run())
    numbers = [
        key
        for key, value in taken.items()
        if isinstance(value, int) and not isinstance(value, bool) and value != -1
    ]
    replaced = draw(st.lists(st.sampled_from(numbers), max_size=most_replaced, unique=True))
    return taken | {key: draw(st.integers(1, 12)) for key in replaced}


# --- the same settings as plain numbers --------------------------------------------------


def run_of(taken: dict[str, Any]) -> Run:
    """The settings as the simulation takes them; nulls replaced by what they follow."""
    devices = taken["trainer.nnodes"] * taken["trainer.n_gpus_per_node"]
    update = Fill(
        taken[f"{ACTOR}.ppo_micro_batch_size_per_gpu"],
        taken[f"{ACTOR}.ppo_max_token_len_per_gpu"],
        taken[f"{ACTOR}.use_dynamic_bsz"],
    )
    mini, epochs = taken[f"{ACTOR}.ppo_mini_batch_size"], taken[f"{ACTOR}.ppo_epochs"]
    kind = taken[f"{ACTOR}.strategy"]
    old, own = (
        _follows(taken, f"{ROLLOUT}.log_prob", update),
        taken[f"{ROLLOUT}.nnodes"] * taken[f"{ROLLOUT}.n_gpus_per_node"],
    )
    return Run(
        prompts=taken[PROMPTS],
        prompts_per_step=taken["data.train_batch_size"],
        samples=taken[f"{ROLLOUT}.n"],
        prompt_tokens=taken["data.max_prompt_length"],
        response_tokens=taken["data.max_response_length"],
        passes=taken["trainer.total_epochs"],
        steps=taken["trainer.total_training_steps"],
        rollout=Rollout(
            own or devices,
            *(
                taken[f"{ROLLOUT}.{name}_parallel_size"]
                for name in ("tensor_model", "pipeline_model", "data")
            ),
        ),
        actor=Trained(engine_of(taken, ACTOR, kind, devices), mini, epochs, update, old),
        warmup=max(0, taken[f"{ACTOR}.optim.lr_warmup_steps"]),
        decays=taken[f"{ACTOR}.optim.lr_scheduler_type"] != "constant",
        critic=(
            _critic_of(taken, devices, mini, epochs, update.dynamic)
            if taken["algorithm.adv_estimator"] == "gae"
            else None
        ),
        ref=(
            Frozen(engine_of(taken, REF, kind, devices), _follows(taken, f"{REF}.log_prob", update))
            if taken[f"{ACTOR}.use_kl_loss"]
            else None
        ),
    )


def _critic_of(taken: dict[str, Any], devices: int, mini: int, epochs: int, dynamic: bool) -> Trained:
    own = taken["critic.use_dynamic_bsz"]
    update = Fill(
        taken["critic.ppo_micro_batch_size_per_gpu"],
        taken["critic.ppo_max_token_len_per_gpu"],
        dynamic if own is None else own,
    )
    rows = taken["critic.forward_micro_batch_size_per_gpu"] or update.rows
    values = Fill(rows, taken["critic.forward_max_token_len_per_gpu"] or update.tokens, update.dynamic)
    engine = engine_of(taken, "critic", taken["critic.strategy"], devices)
    return Trained(
        engine,
        taken["critic.ppo_mini_batch_size"] or mini,
        taken["critic.ppo_epochs"] or epochs,
        update,
        values,
    )


def _follows(taken: dict[str, Any], prefix: str, update: Fill) -> Fill:
    dynamic, tokens = taken[f"{prefix}_use_dynamic_bsz"], taken[f"{prefix}_max_token_len_per_gpu"]
    rows = taken[f"{prefix}_micro_batch_size_per_gpu"]
    return Fill(rows, tokens or update.tokens, update.dynamic if dynamic is None else dynamic)


def engine_of(taken: dict[str, Any], role: str, kind: str, devices: int) -> Engine:
    if kind == "fsdp2":
        keys = dict(sequence="ulysses_sequence_parallel_size", shard="fsdp_size")
        return Engine(
            devices,
            kind,
            **{
                ours: taken.get(f"{role}.fsdp_config.{key}", default)
                for (ours, key), default in zip(keys.items(), (1, -1))
            },
        )
    names = dict(
        tensor="tensor_model", pipeline="pipeline_model", virtual="virtual_pipeline_model", context="context"
    )
    names |= dict(expert="expert_model", expert_tensor="expert_tensor")
    return Engine(
        devices,
        kind,
        **{ours: taken[f"{role}.megatron.{name}_parallel_size"] for ours, name in names.items()},
    )


def simulated(taken: dict[str, Any]) -> Counts | None:
    try:
        return simulate(run_of(taken))
    except CannotRun as reason:
        note(f"the simulation cannot run: {reason}")
        return None


def keys(taken: dict[str, Any]) -> dict[str, Any]:
    """What is on the command line."""
    return {key: value for key, value in taken.items() if key != PROMPTS}


# --- laws --------------------------------------------------


def role_counts(plan: RolePlan) -> TrainedCounts:
    return TrainedCounts(
        data_ranks=plan.data_ranks,
        rows_per_optimizer_step=plan.mini_batch_trajectories,
        rows_per_rank=plan.rows_per_rank,
        optimizer_steps=plan.optimizer_steps_per_step,
        micro_rows=plan.micro.rows,
        accumulation=plan.accumulation_steps or 0,
    )


def by_tokens(counted: TrainedCounts) -> TrainedCounts:
    """Without the accumulation where it depends on the rows' lengths."""
    return counted if counted.micro_rows else TrainedCounts(**(vars(counted) | {"accumulation": 0}))


def check_counts(plan: BatchPlan, counts: Counts) -> None:
    """The plan's numbers are those that were counted."""
    assert (plan.trajectories_per_step, plan.rollout.replicas) == (counts.rows, counts.replicas)
    assert role_counts(plan.actor) == by_tokens(counts.actor)
    assert (plan.critic is None) == (counts.critic is None)
    if plan.critic and counts.critic:
        assert role_counts(plan.critic) == by_tokens(counts.critic)
    assert (plan.layouts["ref"].data_ranks if "ref" in plan.layouts else None) == counts.ref_ranks
    assert (plan.steps_per_epoch, plan.total_steps) == (counts.steps_per_pass, counts.steps)
    assert plan.actor.total_optimizer_steps == counts.actor_optimizer_steps


@settings(max_examples=400, deadline=None)
@given(some_run(most_replaced=1) | some_run())
def test_what_can_be_dealt_out_has_a_plan_and_the_rest_has_remedies(taken: dict[str, Any]) -> None:
    counts = simulated(taken)
    try:
        plan = plan_of(keys(taken), prompts=taken[PROMPTS])
    except ConfigError as error:
        for problem in error.problems:
            note(f"the plan refuses: {problem}")
        assert counts is None
        check_remedies(taken, error.problems)
    else:
        assert counts is not None
        check_counts(plan, counts)


def check_remedies(taken: dict[str, Any], problems: list[Problem]) -> None:
    """The first remedies of all problems together repair; where there is one problem, so does every one of
    its remedies."""
    together: dict[str, Any] = {}
    for problem in problems:
        together |= alternatives(problem)[0]
    for remedy in alternatives(problems[0]) if len(problems) == 1 else [together]:
        left = refusal(keys(taken | remedy), prompts=taken[PROMPTS])
        assert not left, f"{remedy}: {left}"
        assert simulated(taken | remedy)


@settings(max_examples=100, deadline=None)
@given(even_run())
def test_even_runs_can_mostly_be_dealt_out(taken: dict[str, Any]) -> None:
    """The drawing is worth something: without replaced numbers only the other roles' layouts and the
    interleaving can be at fault."""
    lone = taken | {"algorithm.adv_estimator": "grpo", f"{ACTOR}.use_kl_loss": False}
    lone |= {key: None for key in taken if "virtual_pipeline" in key} | {f"{ACTOR}.optim.lr_warmup_steps": 0}
    lone |= {
        f"{ROLLOUT}.pipeline_model_parallel_size": 1,
        f"{ROLLOUT}.data_parallel_size": 1,
        f"{ROLLOUT}.nnodes": 0,
    }
    lone |= {
        f"{ROLLOUT}.tensor_model_parallel_size": taken["trainer.nnodes"] * taken["trainer.n_gpus_per_node"]
    }
    assert simulated(lone) is not None
