"""From broken rules to remedies that work together.

In: a judge, which says for any overrides what is broken then. Out: one `Problem` per broken rule, each with
overrides to paste.

Every rule proposes cures for itself; which of them helps is not guessed but asked of the judge. The search
takes one broken rule after the other, in the order of their stages, and of its cures the one that leaves the
least broken; a cure that breaks something further down is followed by a cure for that. What was changed is
then told to the rules that it repairs: whoever applies the first remedy of every problem has exactly the
configuration that the search ended in, and the judge has accepted it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hydraflow.errors import Problem, shown

Values = dict[str, object]
"""Overrides: key -> value."""
Cure = Mapping[str, object]
"""Overrides that may repair a rule."""

SIZES, MACHINES, MAPPING, HOLES, DIVISION, BATCH, MICRO, BUDGET, SCHEDULE = STAGES = range(9)
"""Stages, in the order in which rules depend on each other: a cure of one may break a later one, not an
earlier one."""

MOST_STEPS, MOST_REMEDIES, MOST_ALIKE, MOST_PAIRS = 24, 3, 2, 8
_MACHINES = dict.fromkeys(("nnodes", "nodes", "n_gpus_per_node", "devices_per_node"), 12.0)
_WEIGHTS = _MACHINES | {"train_batch_size": 3.0, "n": 6.0}
"""How much a change of a key asks of the user, by the key's last part; most ask 2."""
_DROPPED = 3.0
"""How far a number moves that is given up, in powers of two."""
_BROKEN = 2.0
"""How much a rule that is still broken asks."""


def no_cures() -> Iterable[Cure]:
    """For a rule that no override repairs."""
    return ()


@dataclass(frozen=True)
class Violation:
    """A broken rule."""

    rule: str
    """Its name, the same whenever the same rule is broken by the same role."""
    stage: int
    field: str
    """The key that the report names first."""
    value: object
    text: str
    """What must hold, with numbers."""
    cures: Callable[[], Iterable[Cure]] = no_cures
    """Overrides, each of which may repair it; wrong ones are found out."""
    advice: str = ""
    """What to do where no override helps."""


Judge = Callable[[Mapping[str, object]], Sequence[Violation]]


@dataclass
class _Step:
    owner: str
    """The original violation on whose account something was changed."""
    values: Values
    cured: set[str]
    """Rules that were broken before this step and not after it."""


def problems(judge: Judge, present: Callable[[str], object]) -> list[Problem]:
    """Every broken rule with remedies, the first of which work together; `present` gives the value in force
    of a key."""
    found = list(judge({}))
    cost = _Cost(present)
    steps = _pruned(judge, _search(judge, found, cost))
    remedies = _first_remedies(found, steps)
    return [_problem(violation, remedies, judge, cost) for violation in found]


class _Cost:
    """How much a change asks of the user: keys count, and how far each moves."""

    def __init__(self, present: Callable[[str], object]):
        self.present = present

    def __call__(self, values: Mapping[str, object]) -> float:
        return sum(self._one(key, value) for key, value in values.items())

    def _one(self, key: str, value: object) -> float:
        name = key.rpartition(".")[2]
        weight = _WEIGHTS.get(name, 2.0)
        now = self.present(key)
        if not isinstance(now, int | float) or now <= 0:
            return weight * 1.25
        way = abs(math.log2(value / now)) if isinstance(value, int | float) and value > 0 else _DROPPED
        return weight * (1 + way / 4)


def _search(judge: Judge, found: Sequence[Violation], cost: _Cost) -> list[_Step]:
    """Steps until nothing is broken, or none helps."""
    original, steps, changes, left = (
        {violation.rule for violation in found},
        list[_Step](),
        Values(),
        list(found),
    )
    owner = found[0].rule
    for _ in range(MOST_STEPS):
        if not left:
            break
        worst = min(left, key=lambda violation: violation.stage)
        if worst.rule in original:
            owner = worst.rule
        best = _best_cure(worst, changes, judge, cost, left) or _best_pair(worst, changes, judge, cost, left)
        if best is None:
            left = [violation for violation in left if violation.rule != worst.rule]
            continue
        values, after = best
        rules = {violation.rule for violation in after}
        steps.append(_Step(owner, values, {violation.rule for violation in left} - rules))
        changes |= values
        left = list(after)
    return steps


def _best_cure(
    broken: Violation, changes: Values, judge: Judge, cost: _Cost, left: Sequence[Violation]
) -> tuple[Values, Sequence[Violation]] | None:
    """Of the cures that help, the one that asks least; what stays broken asks, too.

    A cure helps if its rule holds then, and less is broken in the earliest stage where it makes a difference:
    so the search ends.
    """
    before = _by_stage(left)
    best: tuple[float, Values, Sequence[Violation]] | None = None
    for cure in _distinct(broken.cures()):
        after = judge(changes | cure)
        asks = cost(changes | cure) + _BROKEN * len(after)
        helps = _by_stage(after) < before and all(violation.rule != broken.rule for violation in after)
        if helps and (best is None or asks < best[0]):
            best = (asks, cure, after)
    return (best[1], best[2]) if best else None


def _best_pair(
    broken: Violation, changes: Values, judge: Judge, cost: _Cost, left: Sequence[Violation]
) -> tuple[Values, Sequence[Violation]] | None:
    """Where no cure helps alone: one that breaks another rule, together with a cure for that."""
    before = _by_stage(left)
    best: tuple[float, Values, Sequence[Violation]] | None = None
    for cure in sorted(_distinct(broken.cures()), key=cost)[:MOST_PAIRS]:
        uncovered = [violation for violation in judge(changes | cure) if violation.rule != broken.rule]
        for other in _distinct(uncovered[0].cures()) if uncovered else ():
            after = judge(changes | cure | other)
            asks = cost(changes | cure | other) + _BROKEN * len(after)
            if _by_stage(after) < before and (best is None or asks < best[0]):
                best = (asks, cure | other, after)
    return (best[1], best[2]) if best else None


def _by_stage(violations: Iterable[Violation]) -> tuple[int, ...]:
    stages = [violation.stage for violation in violations]
    return tuple(stages.count(stage) for stage in STAGES)


def _distinct(cures: Iterable[Cure]) -> list[Values]:
    return [
        dict(pairs)
        for pairs in dict.fromkeys(
            tuple(sorted(cure.items(), key=str)) for cure in map(_hashable, cures) if cure
        )
    ]


def _hashable(cure: Cure) -> Values:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in cure.items()}


def _pruned(judge: Judge, steps: list[_Step]) -> list[_Step]:
    """Without the detours: a key that need not change does not."""
    changes = _together(steps)
    if judge(changes):
        return steps
    for key in list(changes):
        fewer = {other: value for other, value in changes.items() if other != key}
        if not judge(fewer):
            changes = fewer
    return [
        _Step(step.owner, {key: changes[key] for key in step.values if key in changes}, step.cured)
        for step in steps
    ]


def _together(steps: Iterable[_Step]) -> Values:
    changes: Values = {}
    for step in steps:
        changes |= step.values
    return changes


def _first_remedies(found: Sequence[Violation], steps: Sequence[_Step]) -> dict[str, Values]:
    """Rule -> overrides. A rule that needed no step of its own shows those of the step that repaired it."""
    final = _together(steps)
    own: dict[str, Values] = {}
    for step in steps:
        own.setdefault(step.owner, {}).update({key: final[key] for key in step.values})
    for violation in found:
        curers = [step.owner for step in steps if violation.rule in step.cured]
        if not own.get(violation.rule):
            own[violation.rule] = dict(curers and own.get(curers[-1]) or final)
    return own


def _problem(violation: Violation, remedies: Mapping[str, Values], judge: Judge, cost: _Cost) -> Problem:
    first = remedies.get(violation.rule, {})
    alternatives = [first] if first else []
    others = {
        key: value
        for rule, values in remedies.items()
        for key, value in values.items()
        if rule != violation.rule
    }
    rest = {key: value for key, value in others.items() if key not in first}
    for cure in sorted(_distinct(violation.cures()), key=cost):
        if len(alternatives) == MOST_REMEDIES:
            break
        same_keys = sum(cure.keys() == other.keys() for other in alternatives)
        if cure not in alternatives and same_keys < MOST_ALIKE and not judge(rest | cure):
            alternatives.append(cure)
    text = " or ".join(
        " ".join(f"{key}={shown(value)}" for key, value in values.items()) for values in alternatives
    )
    return Problem(violation.field, violation.value, violation.text, text or violation.advice)
