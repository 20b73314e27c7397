"""The plan of supervised training against brute force: a conversation is a prompt with one response, a step
is one mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batch_plan.overrides import alternatives, configured
from batch_plan.simulation import CannotRun, Counts, Engine, Fill, Rollout, Run, Trained, simulate
from batch_plan.test_against_simulation import by_tokens, divisor, role_counts
from hypothesis import given, note, settings
from hypothesis import strategies as st

from hydraflow.batch_plan.sft import SFTPlan, resolve_sft_plan
from hydraflow.errors import ConfigError, Problem
from hydraflow.schema import SFTConfig

Draw = Callable[[st.SearchStrategy[Any]], Any]
Settings = dict[str, Any]
CONVERSATIONS = "conversations in the data"


@st.composite
def some_run(draw: Draw) -> Settings:
    """A run that comes out even, in which up to two numbers are replaced by others."""
    nodes, per_node, rows, accumulation = (draw(st.sampled_from([1, 1, 2, 3])) for _ in range(4))
    devices = nodes * per_node
    shared = draw(divisor(devices))
    batch, longest = rows * accumulation * devices // shared, draw(st.integers(1, 9))
    taken: Settings = {
        CONVERSATIONS: batch * draw(st.integers(1, 3)) + draw(st.integers(0, batch - 1)),
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": per_node,
        "trainer.total_epochs": draw(st.integers(1, 3)),
        "trainer.total_training_steps": draw(st.none() | st.integers(1, 9)),
        "data.train_batch_size": batch,
        "data.max_length": longest,
        "data.micro_batch_size_per_gpu": draw(st.none() | st.just(rows)),
        "data.max_token_len_per_gpu": draw(st.integers(longest, 30)),
        "data.use_dynamic_bsz": draw(st.booleans()),
        "fsdp_config.ulysses_sequence_parallel_size": shared,
        "fsdp_config.fsdp_size": draw(st.just(-1) | divisor(devices)),
    }
    numbers = [
        key
        for key, value in taken.items()
        if isinstance(value, int) and not isinstance(value, bool) and value != -1
    ]
    replaced = draw(st.lists(st.sampled_from(numbers), max_size=2, unique=True))
    return taken | {key: draw(st.integers(1, 12)) for key in replaced}


def plan_of(taken: Settings) -> SFTPlan:
    line = {key: value for key, value in taken.items() if key != CONVERSATIONS}
    return resolve_sft_plan(
        configured(line, SFTConfig()),
        conversations=taken[CONVERSATIONS],
        origins=dict.fromkeys(line, "command line"),
    )


def refusal(taken: Settings) -> list[Problem]:
    try:
        plan_of(taken)
    except ConfigError as error:
        return error.problems
    return []


def simulated(taken: Settings) -> Counts | None:
    engine = Engine(
        taken["trainer.nnodes"] * taken["trainer.n_gpus_per_node"],
        sequence=taken["fsdp_config.ulysses_sequence_parallel_size"],
        shard=taken["fsdp_config.fsdp_size"],
    )
    fill = Fill(
        taken["data.micro_batch_size_per_gpu"],
        taken["data.max_token_len_per_gpu"],
        taken["data.use_dynamic_bsz"],
    )
    batch = taken["data.train_batch_size"]
    steps, passes = taken["trainer.total_training_steps"], taken["trainer.total_epochs"]
    model = Trained(engine, batch, 1, fill, fill)
    try:
        return simulate(
            Run(taken[CONVERSATIONS], batch, 1, taken["data.max_length"], 0, passes, steps, Rollout(1), model)
        )
    except CannotRun as reason:
        note(f"the simulation cannot run: {reason}")
        return None


@settings(max_examples=250, deadline=None)
@given(some_run())
def test_the_plan_accepts_exactly_what_can_be_dealt_out(taken: Settings) -> None:
    counts, problems = simulated(taken), refusal(taken)
    for problem in problems:
        note(str(problem))
    assert (counts is None) == bool(problems)
    if counts is None:
        assert not refusal(
            taken | {key: value for problem in problems for key, value in alternatives(problem)[0].items()}
        )
        return
    plan = plan_of(taken)
    assert role_counts(plan.role) == by_tokens(counts.actor)
    assert (plan.steps_per_epoch, plan.total_steps) == (counts.steps_per_pass, counts.steps)
    assert any(str(counts.unused_prompts) in line for line in plan.notes) == bool(counts.unused_prompts)
