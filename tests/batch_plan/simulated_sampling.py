"""One step's sampling dealt out by hand: calls, engines with their slots, agent workers, asynchronous rounds.

In: plain numbers (`Sampling`). Out: `SamplingCounts`, or `CannotRun`. With `simulation.py` the oracle of the
batch plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from batch_plan.simulation import CannotRun


@dataclass(frozen=True)
class Sampling:
    """Everything that decides how a step is sampled."""

    prompts: int
    """In the data."""
    prompts_per_step: int
    mini: int
    samples: int
    engines: int
    slots: int
    """Sequences that an engine decodes at the same time."""
    workers: int
    filtered: bool = False
    """Groups whose scores are all the same are replaced; here every group is kept."""
    call: int | None = None
    """Prompts sampled at a time when filtered; None: those of a step."""
    most_calls: int = 0
    rounds: int = 1
    batches: int = 1
    staleness: float = 0.0


@dataclass(frozen=True)
class SamplingCounts:
    """What was counted."""

    most_of_an_engine: int
    waves: int
    most_of_a_worker: int
    drawn: int
    """Prompts that were sampled until the step was full."""
    most_drawn: int | None
    """Prompts after which the step gives up; None: it never does."""
    in_flight: int
    """Prompts that may be under way between two weight updates."""


def simulate_sampling(one: Sampling) -> SamplingCounts:
    """Deals out a step's sampling. Raises CannotRun."""
    size = (one.call or one.prompts_per_step) if one.filtered else one.prompts_per_step
    if max(size, one.prompts_per_step) > one.prompts:
        raise CannotRun(
            f"a call of {size} prompts and a step of {one.prompts_per_step}, and the data has {one.prompts}"
        )
    if one.filtered and len({sample % 2 for sample in range(one.samples)}) < 2:
        raise CannotRun("a group of one response never has two scores")
    drawn, most = _draw(one, size)
    shares = _dealt(size * one.samples, one.engines)
    if not all(shares):
        raise CannotRun("an engine without a row")
    _rounds(one)
    return SamplingCounts(
        most_of_an_engine=max(map(len, shares)),
        waves=max(_waves(share, one.slots) for share in shares),
        most_of_a_worker=max(map(len, _dealt(one.prompts_per_step * one.samples, one.workers))),
        drawn=drawn,
        most_drawn=most,
        in_flight=_in_flight(one),
    )


def _dealt(rows: int, parts: int) -> list[list[int]]:
    return [list(range(rows))[part::parts] for part in range(parts)]


def _draw(one: Sampling, size: int) -> tuple[int, int | None]:
    """Calls until there are enough prompts, and how many prompts the allowed calls have."""
    kept, calls = list[int](), 0
    while len(kept) < one.prompts_per_step:
        if one.filtered and one.most_calls and calls == one.most_calls:
            raise CannotRun(f"{calls} calls of {size} prompts do not fill a step of {one.prompts_per_step}")
        kept += range(size)
        calls += 1
    allowed = [prompt for _ in range(one.most_calls) for prompt in range(size)]
    return len(kept), len(allowed) if one.filtered and one.most_calls else None


def _waves(share: list[int], slots: int) -> int:
    """Times that an engine fills its slots, all responses being equally long."""
    left, waves = list(share), 0
    while left:
        left, waves = left[slots:], waves + 1
    return waves


def _rounds(one: Sampling) -> None:
    """Rounds of mini-batches take all prompts of a step, and each finds its own."""
    left = list(range(one.prompts_per_step))
    rounds = one.rounds if _asynchronous(one) else 0
    for _ in range(rounds):
        for _ in range(one.batches):
            taken, left = left[: one.mini], left[one.mini :]
            if len(taken) < one.mini:
                raise CannotRun("a round finds no whole mini-batch")
    if rounds and left:
        raise CannotRun(f"{len(left)} prompts are left when the weights are updated")


def _asynchronous(one: Sampling) -> bool:
    return one.rounds > 1 or one.batches > 1 or one.staleness > 0


def _in_flight(one: Sampling) -> int:
    """The prompts of a step, and one more for as long as the share of old ones stays allowed."""
    flying = one.prompts_per_step
    while flying + 1 - one.prompts_per_step <= one.staleness * one.prompts_per_step + 1e-9:
        flying += 1
    return flying
