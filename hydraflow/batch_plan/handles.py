"""The step's numbers from any consistent subset of them: prompts, samples, mini-batch, micro-batch, and
handles for what follows.

In: settings, and what layouts say. Out: `Numbers`, and a broken rule where what was given cannot hold
together.

Who yields: what was given binds; a default yields to it, and so does a number of a file to a handle on the
command line. Of the weaker numbers as many as possible are kept, samples first, then the step, then the
mini-batch. Equations: `batch_plan/equations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hydraflow.batch_plan.equations import Step, closure, explain, prompts_unit, solve
from hydraflow.batch_plan.parts import divisors, multiples, nearest
from hydraflow.batch_plan.repair import BATCH, MICRO, Cure, Violation
from hydraflow.batch_plan.settings import DEFAULT, Settings
from hydraflow.batch_plan.topology import ACTOR
from hydraflow.schema import PPOConfig

KEYS = {
    "n": "actor_rollout_ref.rollout.n",
    "Q": "data.train_batch_size",
    "M": f"{ACTOR}.ppo_mini_batch_size",
    "m": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "P": "async_training.trigger_parameter_sync_step",
    "R": "async_training.require_batches",
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
"""The rule that a step is one that some mini-batch fits."""
EPOCHS, SWITCH = f"{ACTOR}.ppo_epochs", f"{ACTOR}.use_dynamic_bsz"
_TEXTS = {
    "S": "trajectories per step = prompts per step x responses per prompt",
    "G": "trajectories per optimizer step = prompts per optimizer step x responses per prompt",
    "K": "optimizer steps per step = prompts per step / prompts per optimizer step x epochs",
    "a": "accumulation steps = trajectories per optimizer step / data ranks / rows per micro-batch",
}


@dataclass(frozen=True)
class Numbers:
    """The numbers in force, by the letters of `KEYS`; m only where it is given or follows."""

    values: Mapping[str, int]
    derived: Mapping[str, str]
    """Letter of a number that followed -> the key that it follows from."""
    handles: Mapping[str, int]
    """The handles that were given, by key."""
    asynchronous: bool
    data_ranks: int | None
    """The actor's; None: not known because devices do not add up."""
    notes: tuple[str, ...] = ()
    doubtful: frozenset[str] = frozenset()
    """Keys of mini-batches that nobody gave, or that contradict each other: no rule need speak of them
    besides."""

    def key(self, name: str) -> str:
        """The key that decides a number: its own, or that of the handle that it follows from."""
        source = self.derived.get(name, KEYS[name])
        return source if source in self.handles else KEYS[name]

    def shown(self, name: str) -> int:
        """What stands at `key(name)`, or the number in force."""
        return self.handles.get(self.key(name), self.values[name])


def is_asynchronous(config: PPOConfig) -> bool:
    """Whether sampling goes on beside training."""
    training = config.async_training
    return (
        training.staleness_threshold > 0
        or training.trigger_parameter_sync_step > 1
        or training.require_batches > 1
        or training.partial_rollout
    )


def settle(
    settings: Settings[PPOConfig], *, ranks: int | None, group: int, shares: Sequence[int], whole: int
) -> tuple[Numbers, list[Violation]]:
    """The numbers in force. `ranks`: the actor's data ranks, None if its devices do not add up; `group`: see
    `Step`; `shares`, `whole`: what a critic asks of G and Q."""
    config: PPOConfig = settings.config
    actor = config.actor_rollout_ref.actor
    given = _given(config)
    step = Step(
        epochs=actor.ppo_epochs,
        ranks=ranks or 1,
        group=group,
        shares=tuple(shares),
        whole=whole,
        preferred={name: given[name] for name in ("Q", "n", "M")},
        static=not actor.use_dynamic_bsz,
        asynchronous=is_asynchronous(config),
    )
    handles = {name: value for name, value in given.items() if name in HANDLES}
    return _Settling(settings, given, handles, step, ranks).result()


def _given(config: PPOConfig) -> dict[str, int]:
    """Every number that stands in the configuration, by its letter."""
    batch, training, actor = config.batch, config.async_training, config.actor_rollout_ref.actor
    found = {
        "n": config.actor_rollout_ref.rollout.n,
        "Q": config.data.train_batch_size,
        "M": actor.ppo_mini_batch_size,
        "m": None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
        "P": training.trigger_parameter_sync_step if is_asynchronous(config) else None,
        "R": training.require_batches if is_asynchronous(config) else None,
        "S": batch.trajectories_per_step,
        "G": batch.global_batch_trajectories,
        "K": batch.optimizer_steps_per_step,
        "a": batch.gradient_accumulation_steps,
    }
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class _Settling:
    settings: Settings[PPOConfig]
    given: Mapping[str, int]
    handles: Mapping[str, int]
    step: Step
    ranks: int | None

    def result(self) -> tuple[Numbers, list[Violation]]:
        """The numbers, and what cannot hold."""
        if "a" in self.handles and not self.step.static:
            return self._numbers(self.given, {}), [_dynamic_accumulation(self.handles["a"])]
        binding = self._binding()
        solution = self._keeping(binding)
        if solution is not None:
            return self._numbers(solution, binding), []
        core = self._core(binding)
        settled = replace(self._numbers(self._guess(binding), binding), notes=())
        guessed = [] if "M" in binding else [KEYS["M"], KEYS["m"]]
        if not core & set(self.handles):
            violations = self._rounds_violation(core) or self._no_mini_batch_violation(core)
            return replace(settled, doubtful=frozenset(guessed if violations else ())), violations
        return replace(settled, doubtful=frozenset([*guessed, *HANDLES.values()])), [
            self._contradiction(core, binding)
        ]

    def _guess(self, binding: Mapping[str, int]) -> dict[str, int]:
        """Numbers to go on with where there is no solution: those that follow, and else those that stand
        there."""
        fixed = {name: value for name, value in binding.items() if name not in self.handles}
        follows = (
            closure({"n": self.given["n"]} | dict(binding), self.step) or closure(fixed, self.step) or {}
        )
        whole = {name: int(value) for name, value in follows.items() if value.denominator == 1 and value >= 1}
        return {**self.given, **{name: whole[name] for name in KEYS if name in whole and name not in binding}}

    def _strength(self, name: str) -> int:
        return self.settings.strength(ALL_KEYS[name])

    def _binding(self) -> dict[str, int]:
        """What does not yield: handles, numbers that were given, and those of files where no handle is on the
        command line."""
        least = 2 if any(self._strength(name) == 2 for name in self.handles) else 1
        return {
            name: value
            for name, value in self.given.items()
            if name in self.handles or self._strength(name) >= least
        }

    def _keeping(self, binding: Mapping[str, int]) -> dict[str, int] | None:
        """A solution that keeps as many of the other numbers as it can, the stronger first."""
        known = dict(binding)
        solution = solve(known, self.step)
        others = [name for name in KEYS if name in self.given and name not in binding]
        for name in sorted(others, key=lambda one: -self._strength(one)) if solution else ():
            kept = solve({**known, name: self.given[name]}, self.step)
            if kept is not None:
                known[name], solution = self.given[name], kept
        return solution

    def _numbers(self, solution: Mapping[str, int], binding: Mapping[str, int]) -> Numbers:
        values = {name: solution.get(name, self.given.get(name)) for name in KEYS}
        known = {name: value for name, value in values.items() if value is not None}
        if "m" not in self.given and "a" not in self.handles:
            known.pop("m", None)
        derived, notes = {}, []
        for name, value in known.items():
            if name in binding or (value == self.given.get(name) and self._source(name, binding) is None):
                continue
            source = self._source(name, binding)
            derived[name] = source or self._rival(name, binding)
            if name in self.given and value != self.given[name]:
                notes.append(self._note(name, value, binding))
        handles = {HANDLES[name]: value for name, value in self.handles.items()}
        return Numbers(known, derived, handles, self.step.asynchronous, self.ranks, tuple(notes))

    def _source(self, name: str, binding: Mapping[str, int]) -> str | None:
        """The handle without which a number would not follow."""
        if name not in (closure(binding, self.step) or {}):
            return None
        for handle in self.handles:
            fewer = {other: value for other, value in binding.items() if other != handle}
            if handle in binding and name not in (closure(fewer, self.step) or {}):
                return HANDLES[handle]
        return None

    def _rival(self, name: str, binding: Mapping[str, int]) -> str:
        """A key that a number without a handle yields to."""
        order = [*{"Q": "MnmPR", "M": "QnmPR", "n": "QMm", "R": "QMP", "P": "QMR"}.get(name, "")]
        return next((KEYS[other] for other in order if other in binding), "trainer.n_gpus_per_node")

    def _note(self, name: str, value: int, binding: Mapping[str, int]) -> str:
        origin = self.settings.origin(KEYS[name])
        whose = "the default" if origin == DEFAULT else f"{origin}'s"
        to = ", ".join([*self._named(binding), f"{self.step.ranks} data ranks"])
        return f"{KEYS[name]}={value}: {whose} {self.given[name]} yields to {to}"

    def _named(self, names: Mapping[str, int] | Sequence[str]) -> list[str]:
        return [f"{ALL_KEYS[name]}={self.given[name]}" for name in ALL_KEYS if name in names]

    # --- contradictions

    def _core(self, binding: Mapping[str, int]) -> set[str]:
        """Numbers that cannot hold together, though without any one of them the rest could."""
        contradicts = closure(binding, self.step) is None
        core = dict(binding)
        for name in sorted(binding, key=lambda one: one not in self.handles):
            fewer = {other: value for other, value in core.items() if other != name}
            if (closure(fewer, self.step) is None) if contradicts else (solve(fewer, self.step) is None):
                core = fewer
        follows = closure(core, self.step)
        if (
            follows is not None
            and "n" not in follows
            and {"S", "G", "a"} & set(core)
            and not explain(core, self.step)
        ):
            core["n"] = self.given["n"]
        return set(core)

    def _contradiction(self, core: set[str], binding: Mapping[str, int]) -> Violation:
        first = next(name for name in HANDLES if name in core)
        others = [name for name in ALL_KEYS if name in core and name != first]
        named = f" together with {', '.join(self._named(others))}" if others else ""
        shown = explain({name: self.given[name] for name in core}, self.step)
        known = [f"{EPOCHS}={self.step.epochs}"] * ("K" in core) + [f"{self.step.ranks} data ranks"] * (
            "a" in core
        )
        text = f"cannot hold{named}: {'; '.join(shown or [_TEXTS[first]])}" + (
            f" ({', '.join(known)})" if known else ""
        )

        def cures() -> Iterator[Cure]:
            for name in [first, *others]:
                yield from self._without(name, binding)

        return Violation("contradiction", BATCH, HANDLES[first], self.given[first], text, cures)

    def _without(self, name: str, binding: Mapping[str, int]) -> Iterator[Cure]:
        """Other values for one number, so that the rest can hold."""
        rest = {other: value for other, value in binding.items() if other != name}
        solution = self._keeping(rest) if name in HANDLES else solve(rest, self.step)
        implied = solution and {**solution, **_implied(solution, self.step)}.get(name)
        if implied and implied != self.given[name]:
            yield {ALL_KEYS[name]: implied}
        if name in HANDLES or name == "m":
            yield {ALL_KEYS[name]: None}
        if name in HANDLES:
            for near in nearest(self.given[name], self._possible(name, binding)):
                yield {ALL_KEYS[name]: near}

    def _possible(self, name: str, binding: Mapping[str, int]) -> list[int]:
        """Values near that a handle might have."""
        follows = (
            closure({key: value for key, value in binding.items() if key not in self.handles}, self.step)
            or {}
        )
        value = self.given[name]
        if name == "K" and "Q" in follows:
            return [t * self.step.epochs for t in divisors(int(follows["Q"]))]
        if name == "a" and {"Q", "n"} <= set(follows):
            return divisors(
                max(1, int(follows["Q"] * follows["n"]) // (self.step.ranks * int(follows.get("m", 1))))
            )
        unit = int(follows.get("n", 1)) if name in ("S", "G") else 1
        unit = unit * self.step.ranks if name == "G" else unit
        return [max(1, value // unit) * unit, (value // unit + 1) * unit]

    def _rounds_violation(self, core: set[str]) -> list[Violation]:
        """Without a handle, only the rounds of asynchronous training are no rule of their own."""
        mini, q, rounds, batches = (self.given.get(name, 1) for name in "MQPR")
        if not core & {"P", "R"} or rounds * batches * mini == q:
            return []
        text = (
            f"x {KEYS['P']}={rounds} x {KEYS['M']}={mini} is not {KEYS['Q']}={q}, the prompts of so many"
            " rounds"
        )

        def cures() -> Iterator[Cure]:
            for name, others in (("R", rounds * mini), ("P", batches * mini), ("M", rounds * batches)):
                if q % others == 0:
                    yield {KEYS[name]: q // others}
            yield {KEYS["Q"]: rounds * batches * mini}
            if q % mini == 0:
                yield {KEYS["P"]: 1, KEYS["R"]: q // mini}
            yield {KEYS["Q"]: rounds * batches * mini, KEYS["M"]: mini}
            yield {KEYS["P"]: 1, KEYS["R"]: 1, KEYS["M"]: q}

        return [Violation("rounds", BATCH, KEYS["R"], batches, text, cures)]

    def _no_mini_batch_violation(self, core: set[str]) -> list[Violation]:
        """Where nobody gave a mini-batch, the step alone may be one that no mini-batch fits."""
        if "Q" not in core or "M" in core:
            return []
        known = {name: self.given[name] for name in core | {"n"}}
        unit = math.lcm(prompts_unit(known, self.step), self.step.whole)
        shared = f"{KEYS['n']}={known['n']} on {self.step.ranks} data ranks"
        text = f"must be a multiple of {unit}, so that each rank has equally many trajectories: {shared}"
        cures = [{KEYS["Q"]: near} for near in nearest(known["Q"], multiples(known["Q"], unit))]
        return [Violation(NO_MINI_BATCH, BATCH, KEYS["Q"], known["Q"], text, lambda: cures)]


def _implied(solution: Mapping[str, int], step: Step) -> dict[str, int]:
    """What the handles are for a solution."""
    found = {"S": solution["Q"] * solution["n"], "G": solution["M"] * solution["n"]}
    found["K"] = solution["Q"] // solution["M"] * step.epochs
    if "m" in solution:
        found["a"] = found["G"] // (step.ranks * solution["m"])
    return found


def _dynamic_accumulation(steps: int) -> Violation:
    key = HANDLES["a"]
    text = (
        f"cannot be fixed while {SWITCH}=true fills micro-batches by tokens: there are as many as the rows"
        " need"
    )
    return Violation("accumulation", MICRO, key, steps, text, lambda: [{key: None}, {SWITCH: False}])
