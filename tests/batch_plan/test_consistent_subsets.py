"""Any consistent subset of the eight numbers of a step gives the other ones; a contradiction names both
sides.

The oracle is the table of equations below, solved with fractions by putting numbers in until nothing new
follows.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from batch_plan.overrides import alternatives, plan_of, refusal
from hypothesis import assume, example, given, note, settings
from hypothesis import strategies as st

from hydraflow.batch_plan.resolve import BatchPlan

Draw = Callable[[st.SearchStrategy[Any]], Any]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KEYS = {
    "Q": "data.train_batch_size",
    "n": f"{ROLLOUT}.n",
    "M": f"{ACTOR}.ppo_mini_batch_size",
    "m": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "S": "batch.trajectories_per_step",
    "G": "batch.global_batch_trajectories",
    "K": "batch.optimizer_steps_per_step",
    "a": "batch.gradient_accumulation_steps",
}
EQUATIONS = ["S = Q n", "G = M n", "G = g dp", "g = a m", "K M = Q E", "K G = S E"]
"""Products on both sides; dp and E are always known."""


class Contradiction(Exception):
    """Two ways to the same number do not agree."""


def closure(known: dict[str, int]) -> dict[str, Fraction]:
    """Everything that follows from `known`."""
    values = {name: Fraction(value) for name, value in known.items()}
    sides = [tuple(side.split() for side in equation.split("=")) for equation in EQUATIONS]
    grown = True
    while grown:
        grown = False
        for left, right in sides:
            unknown = [name for name in left + right if name not in values]
            if len(unknown) == 1:
                here, there = (left, right) if unknown[0] in left else (right, left)
                values[unknown[0]] = product(values, there) / product(
                    values, [name for name in here if name != unknown[0]]
                )
                grown = True
            elif not unknown and product(values, left) != product(values, right):
                raise Contradiction(f"{' '.join(left)} = {' '.join(right)} with {values}")
    return values


def product(values: dict[str, Fraction], names: list[str]) -> Fraction:
    result = Fraction(1)
    for name in names:
        result *= values[name]
    return result


@st.composite
def numbers_of_a_step(draw: Draw) -> dict[str, int]:
    """All numbers of a step that comes out even."""
    ranks, accumulation, rows, times, epochs = (draw(st.integers(1, 4)) for _ in range(5))
    mini_rows = ranks * accumulation * rows
    n = draw(st.sampled_from([d for d in range(1, mini_rows + 1) if mini_rows % d == 0]))
    mini = mini_rows // n
    given_numbers = dict(
        Q=mini * times,
        n=n,
        M=mini,
        m=rows,
        S=mini_rows * times,
        G=mini_rows,
        K=times * epochs,
        a=accumulation,
    )
    return given_numbers | dict(dp=ranks, E=epochs)


def command_line(numbers: dict[str, int], chosen: set[str]) -> dict[str, Any]:
    rest = {
        "algorithm.adv_estimator": "grpo",
        "trainer.n_gpus_per_node": numbers["dp"],
        f"{ACTOR}.ppo_epochs": numbers["E"],
    }
    return rest | {KEYS[name]: numbers[name] for name in KEYS if name in chosen}


def numbers_of(plan: BatchPlan) -> dict[str, int | None]:
    actor = plan.actor
    return dict(
        Q=plan.prompts_per_step,
        n=plan.samples_per_prompt,
        M=actor.mini_batch_prompts,
        m=actor.micro.rows,
        S=plan.trajectories_per_step,
        G=actor.mini_batch_trajectories,
        K=actor.optimizer_steps_per_step,
        a=actor.accumulation_steps,
    )


subsets = st.sets(st.sampled_from(sorted(KEYS)), min_size=1)


@settings(max_examples=200, deadline=None)
@given(numbers_of_a_step(), subsets)
def test_a_sufficient_subset_gives_all_numbers(numbers: dict[str, int], chosen: set[str]) -> None:
    assume(set(KEYS) <= set(closure({name: numbers[name] for name in (*chosen, "dp", "E")})))
    plan = plan_of(command_line(numbers, chosen))
    assert numbers_of(plan) == {name: numbers[name] for name in KEYS}


@settings(max_examples=200, deadline=None)
@example(dict(Q=4, n=3, M=4, m=1, S=12, G=12, K=1, a=4, dp=3, E=1), {"a", "Q"})
@given(numbers_of_a_step(), subsets)
def test_what_is_given_holds(numbers: dict[str, int], chosen: set[str]) -> None:
    """A step that follows from what is given always has a plan; and whatever else follows from defaults, no
    given number changes."""
    line = command_line(numbers, chosen)
    problems = refusal(line)
    if {"Q", "n", "M"} <= set(closure({name: numbers[name] for name in (*chosen, "dp", "E")})):
        assert not problems
    if not problems:
        found = numbers_of(plan_of(line)) | {"dp": numbers["dp"], "E": numbers["E"]}
        assert {name: found[name] for name in chosen} == {name: numbers[name] for name in chosen}
        known = {name: value for name, value in found.items() if value is not None}
        assert all(value.denominator == 1 and value > 0 for value in closure(known).values())


@settings(max_examples=100, deadline=None)
@given(numbers_of_a_step(), subsets, st.data())
def test_a_contradiction_names_both_sides(
    numbers: dict[str, int], chosen: set[str], data: st.DataObject
) -> None:
    changed = data.draw(st.sampled_from(sorted(chosen)))
    wrong = numbers | {changed: data.draw(st.integers(1, 30).filter(lambda value: value != numbers[changed]))}
    try:
        closure({name: wrong[name] for name in (*chosen, "dp", "E")})
    except Contradiction as contradiction:
        note(str(contradiction))
    else:
        assume(False)
    problems = refusal(command_line(wrong, chosen))
    report = "\n".join(map(str, problems))
    note(report)
    assert not refusal(
        command_line(wrong, chosen)
        | {key: value for one in problems for key, value in alternatives(one)[0].items()}
    )
    named = {name for name in chosen if f"{KEYS[name]}={wrong[name]}" in report}
    assert changed in named, "without it there would be no contradiction"
    assert len(named) >= 2, "one side alone contradicts nothing"
    assert not has_a_step({name: wrong[name] for name in (*named, "dp", "E")}), (
        "what is named must contradict itself"
    )


def has_a_step(known: dict[str, int], most: int = 40) -> bool:
    """Whether there is a step with these numbers whose others are at most so large: every one is tried."""
    try:
        closure(known)
    except Contradiction:
        return False
    several = {name: [known[name]] if name in known else range(1, most + 1) for name in ("a", "m", "n")}
    for a, m, n in ((a, m, n) for a in several["a"] for m in several["m"] for n in several["n"]):
        rows = a * m * known["dp"]
        if rows % n or known.get("G", rows) != rows or known.get("M", rows // n) != rows // n:
            continue
        for times in range(1, most + 1):
            found = {"Q": rows // n * times, "S": rows * times, "K": times * known["E"]}
            if all(known.get(name, value) == value for name, value in found.items()):
                return True
    return False
