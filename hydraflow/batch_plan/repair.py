"""Finds remedies that together repair all broken rules.

In: a judge: a function that takes overrides and returns the rules that are broken under them. Out: one
`Problem` per broken rule, each with overrides to paste.

Every rule proposes fixes close to the requested values. The search repairs broken rules stage by stage, each
by the cheapest fix: a small change that leaves few rules broken. Pasting every first remedy gives the
configuration at which the search ended, which the judge has accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hydraflow.errors import Problem, shown

T = TypeVar("T")
Values = dict[str, object]
"""Overrides: key -> value."""
Fix = Mapping[str, object]
"""Overrides that may repair a rule."""

SIZES, MACHINES, MAPPING, HOLES, DIVISION, BATCH, MICRO, BUDGET, SCHEDULE = STAGES = range(9)
"""Stages, in the order in which rules depend on each other: a fix never breaks an earlier one."""

_A_STEP_BACK = 10**6
"""Added to the cost of a fix that makes no progress, so that any other fix is preferred."""
MOST_STEPS, MOST_REMEDIES, MOST_ALIKE = 24, 3, 2
"""Limits: steps of the search, remedies of a rule, and remedies that change the same keys."""
_WEIGHTS = dict.fromkeys(("nnodes", "nodes", "n_gpus_per_node", "devices_per_node"), 12)
_WEIGHTS |= {"n": 6, "train_batch_size": 3}
"""Cost of changing a key, by the key's last part; most cost 2, and so does a rule that stays broken."""


@dataclass(frozen=True)
class Violation:
    """A broken rule with the overrides that may repair it."""

    rule: str
    """Its name, the same whenever the same rule is broken by the same role."""
    stage: int
    field: str
    """The key that the report names first."""
    value: object
    text: str
    """What must hold, with numbers."""
    fixes: Sequence[Fix] | Callable[[], Iterable[Fix]] = ()
    """Overrides, each of which may repair it; the search tests them."""
    advice: str = ""
    """Advice if no override helps."""

    def candidates(self) -> list[Values]:
        """The fixes, each once and with its keys in order; those that change nothing are left out."""
        fixes = self.fixes() if callable(self.fixes) else self.fixes
        found = (sorted(fix.items()) for fix in fixes)
        return list({str(pairs): dict(pairs) for pairs in found if pairs}.values())


Judge = Callable[[Mapping[str, object]], Sequence[Violation]]


def problems(judge: Judge, present: Callable[[str], object]) -> list[Problem]:
    """Every broken rule with remedies, the first of which work together; `present`: a key's value now."""
    return _Search(judge, present).problems()


class _Search:
    def __init__(self, judge: Judge, present: Callable[[str], object]):
        self.judge, self.present = judge, present
        self.found = list(judge({}))
        self.changes: Values = {}
        """Overrides with which no repairable rule is broken any more."""
        self.owned: dict[str, set[str]] = {}
        """Rule -> the keys that were changed to repair it."""

    def problems(self) -> list[Problem]:
        left = self._repair()
        for key in list(self.changes) if not left else ():  # drops changes that later ones made unnecessary
            fewer = without(self.changes, key)
            if not self.judge(fewer):
                self.changes = fewer
        first = {violation.rule: self._remedy(violation) for violation in self.found}
        return [self._problem(violation, first) for violation in self.found]

    def _repair(self) -> Sequence[Violation]:
        """Changes keys until nothing is broken or nothing helps; returns the rules that are still broken."""
        left: Sequence[Violation] = self.found
        original, hopeless, owner = {one.rule for one in left}, set[str](), left[0].rule
        for _ in range(MOST_STEPS):
            repairable = [one for one in left if one.rule not in hopeless]
            if not repairable:
                break
            worst = min(repairable, key=lambda one: one.stage)
            owner = worst.rule if worst.rule in original else owner
            cost, fix = min(self._helpful(worst, left), key=lambda one: one[0], default=(math.inf, {}))
            if cost >= _A_STEP_BACK:
                hopeless.add(worst.rule)
            self.changes |= fix
            self.owned.setdefault(owner, set()).update(fix)
            left = self.judge(self.changes)
        return left

    def _helpful(self, broken: Violation, left: Sequence[Violation]) -> Iterator[tuple[float, Values]]:
        """Yields (cost, fix) for each fix that repairs `broken`; rules left broken add to the cost. A fix is
        a step back unless it reduces the number of broken rules in the earliest stage that it affects. A
        step back is taken only if no other fix helps, and once per rule, so that the search ends."""
        for fix in broken.candidates():
            after = self.judge(self.changes | fix)
            if all(one.rule != broken.rule for one in after):
                cost = self._cost(self.changes | fix) + 2 * len(after)
                yield cost + (_A_STEP_BACK if _by_stage(after) >= _by_stage(left) else 0), fix

    def _cost(self, values: Values) -> float:
        """The cost of a change for the user: how many keys change, and by what factor."""
        cost = 0.0
        for key, value in values.items():
            now, weight = self.present(key), _WEIGHTS.get(key.rpartition(".")[2], 2)
            numbers = [one for one in (now, value) if isinstance(one, int | float) and one > 0]
            # unsetting a number costs as much as a factor of 8; setting one, or changing text, a factor of 2
            ratio = max(numbers) / min(numbers) if len(numbers) == 2 else 8 if numbers and now else 2
            cost += weight * (3 + min(ratio, 8)) / 4
        return cost

    def _remedy(self, violation: Violation) -> Values:
        """The overrides that repair a rule: those made for it, else those made along with them, else all."""
        own = self.owned.get(violation.rule, set()) & set(self.changes)
        if not own:
            for key in self.changes:
                if violation.rule in {one.rule for one in self.judge(without(self.changes, key))}:
                    own |= set().union(*(keys for keys in self.owned.values() if key in keys))
        return {key: value for key, value in self.changes.items() if key in own} or self.changes

    def _problem(self, violation: Violation, remedies: Mapping[str, Values]) -> Problem:
        first = remedies[violation.rule]
        changed = any(self.present(key) != value for key, value in first.items())  # else nothing helps
        alternatives = [first] if changed else []
        rest: Values = {}
        for rule, values in remedies.items():
            rest |= values if rule != violation.rule else {}
        rest = {key: value for key, value in rest.items() if key not in first}
        for fix in sorted(violation.candidates(), key=self._cost):
            if len(alternatives) == MOST_REMEDIES:
                break
            alike = sum(fix.keys() == other.keys() for other in alternatives)
            if fix not in alternatives and alike < MOST_ALIKE and not self.judge(rest | fix):
                alternatives.append(fix)
        texts = ([f"{key}={shown(value)}" for key, value in values.items()] for values in alternatives)
        text = " or ".join(map(" ".join, texts))
        return Problem(violation.field, violation.value, violation.text, text or violation.advice)


def without(values: Mapping[str, T], *keys: str) -> dict[str, T]:
    """A copy without these keys."""
    return {key: value for key, value in values.items() if key not in keys}


def _by_stage(violations: Iterable[Violation]) -> tuple[int, ...]:
    stages = [violation.stage for violation in violations]
    return tuple(stages.count(stage) for stage in STAGES)
