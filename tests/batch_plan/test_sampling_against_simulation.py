"""The plan of sampling against brute force, and every formula of the plan against its value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from batch_plan.overrides import alternatives, plan_of, refusal
from batch_plan.simulated_sampling import Sampling, SamplingCounts, simulate_sampling
from batch_plan.simulation import CannotRun
from batch_plan.test_against_simulation import PROMPTS, keys, some_run
from hypothesis import given, note, settings
from hypothesis import strategies as st

from hydraflow.batch_plan.resolve import BatchPlan

Draw = Callable[[st.SearchStrategy[Any]], Any]
POLICY = "actor_rollout_ref"
ACTOR, ROLLOUT = f"{POLICY}.actor", f"{POLICY}.rollout"


@st.composite
def samplings(draw: Draw) -> Sampling:
    """Synchronous or not, filtered or not; about half of them can be dealt out."""
    mini, times, batches = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rounds = draw(st.integers(1, 2))
    per_step = mini * draw(st.sampled_from([times, batches * rounds]))
    asynchronous = draw(st.booleans())
    filtered = draw(st.booleans())
    return Sampling(
        prompts=per_step + draw(st.sampled_from([-1, 0, 5, 20, 40])) or 1,
        prompts_per_step=per_step,
        mini=mini,
        samples=draw(st.integers(1, 4)),
        engines=draw(st.integers(1, 6)),
        slots=draw(st.integers(1, 9)),
        workers=draw(st.integers(1, 9)),
        filtered=filtered,
        call=draw(st.none() | st.integers(1, 20)),
        most_calls=draw(st.integers(0, 4)),
        rounds=rounds if asynchronous else 1,
        batches=batches if asynchronous else 1,
        staleness=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])) if asynchronous else 0.0,
    )


def written(one: Sampling) -> dict[str, Any]:
    """As a command line: one device trains, `engines` others sample."""
    return {
        "algorithm.adv_estimator": "grpo",
        "trainer.n_gpus_per_node": 1,
        "data.train_batch_size": one.prompts_per_step,
        "data.gen_batch_size": one.call,
        f"{ACTOR}.ppo_mini_batch_size": one.mini,
        f"{ROLLOUT}.n": one.samples,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.nnodes": one.engines,
        f"{ROLLOUT}.n_gpus_per_node": 1,
        f"{ROLLOUT}.max_num_seqs": one.slots,
        f"{ROLLOUT}.agent.num_workers": one.workers,
        "algorithm.filter_groups.enable": one.filtered,
        "algorithm.filter_groups.max_num_gen_batches": one.most_calls,
        "async_training.trigger_parameter_sync_step": one.rounds,
        "async_training.require_batches": one.batches,
        "async_training.staleness_threshold": one.staleness,
    }


def counts_of(plan: BatchPlan) -> SamplingCounts:
    return SamplingCounts(
        most_of_an_engine=plan.rollout.trajectories_per_engine,
        waves=plan.rollout.waves,
        most_of_a_worker=plan.agent.trajectories_per_worker,
        drawn=plan.filter.least_prompts if plan.filter else plan.prompts_per_step,
        most_drawn=plan.filter.most_prompts if plan.filter else None,
        in_flight=plan.asynchronous.prompts_in_flight if plan.asynchronous else plan.prompts_per_step,
    )


@settings(max_examples=200, deadline=None)
@given(samplings())
def test_sampling_is_accepted_exactly_when_it_can_be_dealt_out(one: Sampling) -> None:
    problems = refusal(written(one), prompts=one.prompts)
    for problem in problems:
        note(str(problem))
    try:
        counts = simulate_sampling(one)
    except CannotRun as reason:
        note(f"the simulation cannot run: {reason}")
        assert problems
        repaired = written(one) | {
            key: value for problem in problems for key, value in alternatives(problem)[0].items()
        }
        assert not refusal(repaired, prompts=one.prompts)
        return
    assert not problems
    plan = plan_of(written(one), prompts=one.prompts)
    assert counts_of(plan) == counts
    if plan.asynchronous:
        assert plan.asynchronous.prompts_per_round * plan.asynchronous.rounds_per_sync == one.prompts_per_step


@settings(max_examples=100, deadline=None)
@given(some_run(), samplings())
def test_every_formula_gives_its_value(taken: dict[str, Any], one: Sampling) -> None:
    """What is right of a formula's last `=`, where it is arithmetic, is the value of its line."""
    for line, prompts in ((keys(taken), taken[PROMPTS]), (written(one), one.prompts)):
        if refusal(line, prompts=prompts):
            continue
        for quantity in plan_of(line, prompts=prompts).quantities:
            computed = value(quantity.formula.rpartition("=")[2])
            if computed is not None and "=" in quantity.formula:
                note(f"{quantity}")
                assert computed == quantity.value


def value(formula: str) -> float | None:
    """The number that an expression of the plan comes to; None where it is no arithmetic.

    >>> value("⌊100/64⌋·2 + 1"), value("the files")
    (3, None)
    """
    text = formula.translate(str.maketrans({"·": "*", "⌊": "f", "⌋": ")", "⌈": "c", "⌉": ")", "x": "*"}))
    text = text.replace("f", "floor(").replace("c", "ceil(")
    if not re.fullmatch(r"(?:\d+(?:\.\d+)?|floor\(|ceil\(|[()+*/ -])+", text) or not re.search(r"\d", text):
        return None
    return eval(text, {"__builtins__": {}, "floor": math.floor, "ceil": math.ceil})
