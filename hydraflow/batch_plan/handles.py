"""Solves for a step's numbers from any consistent subset of them, including the handles that other trainers
use (section `batch`).

    S = Q·n   G = M·n   Q = M·t   S = G·t   K = E·t   G = a·m·dp

Q prompts and S trajectories per step, n trajectories per prompt, M prompts and G trajectories per optimizer
step, t mini-batches per step, E passes, K optimizer steps per step, m rows per micro-batch, a micro-batches
per optimizer step, dp data ranks.

In: settings and layouts. Out: `StepNumbers`, and a broken rule if the given numbers contradict each other.
Precedence: given numbers are binding; defaults yield to them, and numbers of a file yield to a handle on the
command line. As many of the weaker numbers as possible are kept: first the responses per prompt, then the
prompts per step, then the mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from hydraflow.batch_plan.parts import divisors, mini_batch_unit, multiples, nearest
from hydraflow.batch_plan.repair import BATCH, MICRO, Fix, Violation, without
from hydraflow.batch_plan.settings import DEFAULT, Settings
from hydraflow.batch_plan.topology import ACTOR
from hydraflow.schema import PPOConfig

KEYS = {
    "n": "actor_rollout_ref.rollout.n",
    "Q": "data.train_batch_size",
    "M": f"{ACTOR}.ppo_mini_batch_size",
    "m": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
}
"""Number -> its key, in the order in which they are kept."""
HANDLES = {
    "S": "batch.trajectories_per_step",
    "G": "batch.global_batch_trajectories",
    "K": "batch.optimizer_steps_per_step",
    "a": "batch.gradient_accumulation_steps",
}
"""Handle -> its key."""
ALL_KEYS = KEYS | HANDLES
NO_MINI_BATCH = "a mini-batch | Q"
"""The rule that some mini-batch fits the step."""
EPOCHS, SWITCH = f"{ACTOR}.ppo_epochs", f"{ACTOR}.use_dynamic_bsz"
_PRODUCTS = (
    ("S", ("Q", "n")),
    ("G", ("M", "n")),
    ("Q", ("M", "t")),
    ("S", ("G", "t")),
    ("K", ("E", "t")),
    ("G", ("a", "m", "dp")),
)
"""The equations above, as (total, factors)."""
_WORDS = {
    "S": "trajectories per step",
    "G": "trajectories per optimizer step",
    "Q": "prompts per step",
    "M": "prompts per optimizer step",
    "n": "responses per prompt",
    "t": "mini-batches per step",
    "K": "optimizer steps per step",
    "a": "micro-batches per optimizer step",
    "m": "rows per micro-batch",
}
_TEXTS = {
    "S": "trajectories per step = prompts per step x responses per prompt",
    "G": "trajectories per optimizer step = prompts per optimizer step x responses per prompt",
    "K": "optimizer steps per step = prompts per step / prompts per optimizer step x epochs",
    "a": "accumulation steps = trajectories per optimizer step / data ranks / rows per micro-batch",
}
"""The equation of each handle, reported if no derivation explains a contradiction."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers in force, by the letters of `KEYS`; m only where it is given or follows."""

    values: Mapping[str, int]
    derived: Mapping[str, str]
    """Letter of a number that followed -> the key that it follows from."""
    handles: Mapping[str, int]
    """The handles that were given, by key."""
    notes: tuple[str, ...] = ()
    doubtful: frozenset[str] = frozenset()
    """Keys of mini-batches that were not given or that contradict each other: no other rule reports them."""

    def key(self, name: str) -> str:
        """The key that decides a number: its own, or that of the handle that it follows from."""
        source = self.derived.get(name, KEYS[name])
        return source if source in self.handles else KEYS[name]

    def shown(self, name: str) -> int:
        """The value at `key(name)`, or the number in force."""
        return self.handles.get(self.key(name), self.values[name])


@dataclass(frozen=True)
class Derivation:
    """What follows from some numbers of a step."""

    values: Mapping[str, int | Fraction]
    fault: list[str]
    """The derivation of a contradiction, one line for each number on the way ("256/8 = 32 prompts per
    optimizer step", "100/32 mini-batches per step is not an integer"); empty: no contradiction."""
    ways: Mapping[str, list[str]]
    """The derivation of each number that followed, in the same form."""
    contradicts: bool
    """Whether two derivations of a number disagree."""

    @property
    def whole(self) -> dict[str, int]:
        return {name: value for name, value in self.values.items() if isinstance(value, int)}


@dataclass(frozen=True)
class StepConstraints:
    """Limits on the numbers of a step, apart from the given numbers."""

    epochs: int
    ranks: int
    """The actor's data ranks; 1 if its devices do not add up."""
    group: int
    """Micro-batches come in groups of this size."""
    shares: tuple[int, ...]
    """Further numbers that must divide G: those of a critic with the same mini-batches."""
    whole: int
    """A further number that must divide Q: the critic's own mini-batch."""
    preferred: Mapping[str, int]
    """Q, n, M: the preferred values if nothing rules them out."""
    static: bool
    """Whether micro-batches have a fixed number of rows."""
    keeps_groups: bool
    """Whether ranks and micro-batches get whole groups of n rows."""

    def follow(self, known: Mapping[str, int]) -> Derivation:
        """Everything that follows from `known`."""
        values: dict[str, int | Fraction] = {**known, "E": self.epochs, "dp": self.ranks}
        if not self.static:
            values = {name: value for name, value in values.items() if name not in ("m", "a")}
        ways: dict[str, list[str]] = {}
        fault: list[str] = []
        while True:
            for total, factors in _PRODUCTS:
                unknown = [name for name in (total, *factors) if name not in values]
                there = [values[name] for name in factors if name in values]
                product = math.prod(there)
                if len(unknown) == 1 or (not unknown and product != values[total]):
                    break
            else:
                return Derivation(values, fault, ways, contradicts=False)
            text = "·".join(map(str, there))
            way = list(dict.fromkeys(line for name in (total, *factors) for line in ways.get(name, ())))
            if not unknown:
                line = f"{text} = {product} {_WORDS[total]}, not {values[total]}"
                return Derivation(values, fault or [*way, line], ways, contradicts=True)
            name, value = unknown[0], Fraction(product)
            if name != total:
                value = values[total] / value
                text = f"{values[total]}/{text if len(there) == 1 else f'({text})'}"
            values[name] = int(value) if value.denominator == 1 else value
            if value.denominator != 1:
                fault = fault or [*way, f"{text} {_WORDS[name]} is not an integer"]
            ways[name] = way if product == 1 else [*way, f"{text} = {value} {_WORDS[name]}"]

    def explain(self, known: Mapping[str, int]) -> list[str]:
        """Why no step has these numbers."""
        follows = self.follow(known)
        if follows.fault:
            return follows.fault
        values = follows.whole
        for share in (self.ranks, *self.shares):
            if values.get("G", 0) % share:
                text = f"{values['G']} trajectories cannot be shared equally by {share} data ranks"
                return [*follows.ways.get("G", ()), text]
        if not {"Q", "n"} <= set(values) or values["Q"] % (unit := self.unit(values)) == 0:
            return []
        times = "·".join(str(values[name]) for name in ("a", "m", "dp") if name in values)
        least = f"{times}/{values['n']} = {unit}" if unit * values["n"] == self._rows(values) else str(unit)
        step = f"{values['Q']} prompts per step"
        return [f"an optimizer step has a multiple of {least} prompts, and none divides {step}"]

    def _rows(self, values: Mapping[str, int]) -> int:
        """What the actor's ranks and micro-batches divide G into; needs n where groups are kept."""
        least = values["n"] if self.keeps_groups else 1
        if not self.static:
            return self.ranks * least
        return self.ranks * values.get("m", least) * math.lcm(values.get("a", 1), self.group)

    def unit(self, values: Mapping[str, int]) -> int:
        """Prompts of the smallest mini-batch that all data ranks can share, with n of `values`; all others
        are multiples of it."""
        return mini_batch_unit([self._rows(values), *self.shares], values["n"])

    def solve(self, known: Mapping[str, int]) -> dict[str, int] | None:
        """Integers Q, n, M (and m where it follows) that agree with `known` and that the data ranks can
        share; None if there are none. n is derived or the preferred value; it is never changed to make other
        numbers divide."""
        follows = self.follow(known)
        if follows.fault:
            return None
        values = follows.whole
        if "n" not in values:
            return self.solve({**known, "n": self.preferred["n"]})
        unit = self.unit(values)
        for mini in self._minis(values, unit):
            whole = math.lcm(mini, self.whole)
            q = values.get("Q") or mini * values.get("t", 0) or _nearest(self.preferred["Q"], whole)[0]
            if mini % unit == 0 and q % whole == 0:
                return self.follow({**values, "Q": q, "M": mini}).whole
        return None

    def _minis(self, values: Mapping[str, int], unit: int) -> Sequence[int]:
        """Candidates for M, the preferred first."""
        if "M" in values:
            return [values["M"]]
        if "Q" not in values:
            return _nearest(self.preferred["M"], unit)
        fitting = [one for one in divisors(values["Q"]) if one % unit == 0]
        return [one for one in fitting if one <= self.preferred["M"]][-1:] or fitting[:1]


def _nearest(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, the nearest first."""
    return sorted(multiples(value, unit), key=lambda one: abs(one - value))


def settle(
    settings: Settings[PPOConfig],
    *,
    ranks: int,
    group: int,
    shares: Sequence[int],
    whole: int,
    keeps_groups: bool,
) -> tuple[StepNumbers, list[Violation]]:
    """The numbers in force, and contradictions. `ranks`, `group`, `keeps_groups`: see `StepConstraints`;
    `shares`, `whole`: what a critic requires of G and Q."""
    config: PPOConfig = settings.config
    batch, actor = config.batch, config.actor_rollout_ref.actor
    found = {
        "n": config.actor_rollout_ref.rollout.n,
        "Q": config.data.train_batch_size,
        "M": actor.ppo_mini_batch_size,
        "m": None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
        "S": batch.trajectories_per_step,
        "G": batch.global_batch_trajectories,
        "K": batch.optimizer_steps_per_step,
        "a": batch.gradient_accumulation_steps,
    }
    given = {name: value for name, value in found.items() if value is not None}
    step = StepConstraints(
        epochs=actor.ppo_epochs,
        ranks=ranks,
        group=group,
        shares=tuple(shares),
        whole=whole,
        preferred=given,
        static=not actor.use_dynamic_bsz,
        keeps_groups=keeps_groups,
    )
    if step.static or "a" not in given:
        return _NumberResolver(settings, given, step).result()
    numbers, broken = _NumberResolver(settings, without(given, "a"), step).result()
    text = f"cannot be fixed while {SWITCH}=true fills micro-batches by tokens: there are as many as"
    text += " the rows need"
    fixes: list[Fix] = [{HANDLES["a"]: None}, {SWITCH: False}]
    return numbers, [Violation("accumulation", MICRO, HANDLES["a"], given["a"], text, fixes), *broken]


class _NumberResolver:
    def __init__(self, settings: Settings[PPOConfig], given: Mapping[str, int], step: StepConstraints):
        self.settings, self.given, self.step = settings, given, step
        self.handles = {name: value for name, value in given.items() if name in HANDLES}
        self.strength = {name: settings.strength(ALL_KEYS[name]) for name in given}
        least = 2 if any(self.strength[name] == 2 for name in self.handles) else 1
        self.binding = {
            name: value for name, value in given.items() if name in HANDLES or self.strength[name] >= least
        }
        """The numbers that do not yield: handles, numbers on the command line, and those of files unless a
        handle is on the command line."""

    def result(self) -> tuple[StepNumbers, list[Violation]]:
        solution = self._keeping(self.binding)
        if solution is not None:
            return self._numbers(solution), []
        core = self._core()
        numbers = replace(self._numbers(self._guess()), notes=())
        guessed = [] if "M" in self.binding else [KEYS["M"], KEYS["m"]]
        if core & set(self.handles):
            doubtful = frozenset([*guessed, *HANDLES.values()])
            return replace(numbers, doubtful=doubtful), [self._contradiction(core)]
        violations = self._no_mini_batch_violation(core)
        return replace(numbers, doubtful=frozenset(guessed if violations else ())), violations

    def _keeping(self, binding: Mapping[str, int]) -> dict[str, int] | None:
        """A solution that keeps as many of the other numbers as it can, the stronger first."""
        known, solution = dict(binding), self.step.solve(binding)
        others = [name for name in KEYS if name in self.given and name not in binding]
        for name in sorted(others, key=lambda one: -self.strength[one]) if solution else ():
            kept = self.step.solve({**known, name: self.given[name]})
            if kept is not None:
                known[name], solution = self.given[name], kept
        return solution

    def _guess(self) -> dict[str, int]:
        """Numbers for the other rules to check if there is no solution: derived ones, else those given."""
        fixed = without(self.binding, *HANDLES)
        everything = self.step.follow({"n": self.given["n"], **self.binding})
        follows = (self.step.follow(fixed) if everything.contradicts else everything).whole
        return {**self.given, **without(follows, *self.binding)}

    def _numbers(self, solution: Mapping[str, int]) -> StepNumbers:
        known = {name: solution[name] for name in KEYS if name in solution}
        if "m" not in self.given and "a" not in self.handles:
            known.pop("m", None)
        derived, notes = {}, []
        for name, value in without(known, *self.binding).items():
            source, changed = self._source(name), value != self.given.get(name)
            if not source and not changed:
                continue
            derived[name] = source or self._rival(name)
            if name in self.given and changed:
                origin = self.settings.origin(KEYS[name])
                whose = "the default" if origin == DEFAULT else f"{origin}'s"
                to = ", ".join([*self._named(self.binding), f"{self.step.ranks} data ranks"])
                notes.append(f"{KEYS[name]}={value}: {whose} {self.given[name]} yields to {to}")
        handles = {HANDLES[name]: value for name, value in self.handles.items()}
        return StepNumbers(known, derived, handles, tuple(notes))

    def _source(self, name: str) -> str | None:
        """The handle without which a number would not follow."""
        follows = name in self.step.follow(self.binding).values
        for handle in self.handles if follows else ():
            if name not in self.step.follow(without(self.binding, handle)).values:
                return HANDLES[handle]
        return None

    def _rival(self, name: str) -> str:
        """A key that a number without a handle yields to."""
        order = {"Q": "Mnm", "M": "Qnm", "n": "QMm"}.get(name, "")
        return next((KEYS[other] for other in order if other in self.binding), "trainer.n_gpus_per_node")

    def _named(self, names: Iterable[str]) -> list[str]:
        return [f"{ALL_KEYS[name]}={self.given[name]}" for name in ALL_KEYS if name in set(names)]

    def _core(self) -> set[str]:
        """A minimal contradiction: without any one of these numbers the others are consistent."""
        contradicts = self.step.follow(self.binding).contradicts
        core = dict(self.binding)
        for name in sorted(core, key=lambda one: one not in HANDLES):
            fewer = without(core, name)
            if self.step.follow(fewer).contradicts if contradicts else self.step.solve(fewer) is None:
                core = fewer
        if core.keys() & HANDLES.keys() and not self.step.explain(core):
            core["n"] = self.given["n"]
        return set(core)

    def _contradiction(self, core: set[str]) -> Violation:
        first = next(name for name in HANDLES if name in core)
        others = [name for name in ALL_KEYS if name in core and name != first]
        fault = f"conflicts with {', '.join(self._named(others))}" if others else "cannot hold"
        why = self.step.explain({name: self.given[name] for name in core}) or [_TEXTS[first]]
        known = [f"{EPOCHS}={self.step.epochs}"] if "K" in core else []
        known += [f"{self.step.ranks} data ranks"] if "a" in core else []
        text = f"{fault}: {'; '.join(why)}" + (f" ({', '.join(known)})" if known else "")

        def fixes() -> Iterator[Fix]:
            for name in [first, *others]:
                yield from self._other_values(name)

        return Violation("contradiction", BATCH, HANDLES[first], self.given[first], text, fixes)

    def _other_values(self, name: str) -> Iterator[Fix]:
        """Other values for one number, so that the rest can hold."""
        rest = without(self.binding, name)
        solution = self._keeping(rest) if name in HANDLES else self.step.solve(rest)
        implied = solution and self.step.follow(without(solution, *HANDLES)).whole.get(name)
        if implied and implied != self.given[name]:
            yield {ALL_KEYS[name]: implied}
        if name in HANDLES or name == "m":
            yield {ALL_KEYS[name]: None}
        if name in HANDLES:
            for near in nearest(self.given[name], self._possible(name)):
                yield {HANDLES[name]: near}

    def _possible(self, name: str) -> list[int]:
        """Nearby values that a handle might take."""
        follows = self.step.follow(without(self.binding, *HANDLES)).whole
        value, ranks = self.given[name], self.step.ranks
        if name == "K" and "Q" in follows:
            return [t * self.step.epochs for t in divisors(follows["Q"])]
        if name == "a" and {"Q", "n"} <= set(follows):
            least = follows["n"] if self.step.keeps_groups else 1
            return divisors(max(1, follows["Q"] * follows["n"] // (ranks * follows.get("m", least))))
        unit = follows.get("n", 1) * (ranks if name == "G" else 1) if name in "SG" else 1
        return [max(1, value // unit) * unit, (value // unit + 1) * unit]

    def _no_mini_batch_violation(self, core: set[str]) -> list[Violation]:
        """If no mini-batch size was given, reports a step that no mini-batch size fits."""
        if "Q" not in core or "M" in core:
            return []
        known = {name: self.given[name] for name in core | {"n"}}
        unit = math.lcm(self.step.unit(known), self.step.whole)
        shared = f"{KEYS['n']}={known['n']} on {self.step.ranks} data ranks"
        what = "prompts" if self.step.keeps_groups else "trajectories"
        text = f"must be a multiple of {unit}, so that ranks get the same number of {what}: {shared}"
        fixes = [{KEYS["Q"]: near} for near in nearest(known["Q"], multiples(known["Q"], unit))]
        return [Violation(NO_MINI_BATCH, BATCH, KEYS["Q"], known["Q"], text, fixes)]
