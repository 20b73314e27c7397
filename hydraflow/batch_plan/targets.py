"""Other numbers for a step, near those that were asked for: what a broken rule of the batch may be cured
with.

In: a `Request`. Out: overrides. All rules of a step share these cures, because its numbers hang together:
which of them are legal the judge decides (`batch_plan/repair.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydraflow.batch_plan.handles import HANDLES, KEYS
from hydraflow.batch_plan.parts import divisors, multiples, nearest
from hydraflow.batch_plan.repair import Cure, Values
from hydraflow.batch_plan.request import CRITIC_MINI, Request


@dataclass(frozen=True)
class Target:
    """Numbers of a step; `critic` is 0 where the critic's mini-batches are the actor's, or there is none."""

    q: int
    n: int
    mini: int
    critic: int


def cures(request: Request) -> Iterator[Cure]:
    """Overrides that lead to steps near the one that was asked for."""
    for target in _Near(request).targets():
        if target.q > 0 and target.n > 0 and target.mini > 0:
            yield overrides(request, target)


def overrides(request: Request, target: Target) -> Values:
    """What must be said so that the numbers become the target's: the keys that differ, and the handles that
    would contradict."""
    numbers = request.numbers
    values: Values = {}
    for name, wanted in (("Q", target.q), ("n", target.n), ("M", target.mini)):
        if wanted != numbers.values[name] and numbers.key(name) == KEYS[name]:
            values[KEYS[name]] = wanted
    critic = request.critic
    if target.critic and critic and target.critic != critic.mini:
        values[CRITIC_MINI] = target.critic
    for key, handle in _handles(request, target).items():
        if key in numbers.handles and handle != numbers.handles[key]:
            values[key] = handle
    return values | _rounds(request, target)


def _handles(request: Request, target: Target) -> dict[str, int | None]:
    """What the handles must say for a target; null where no whole number would."""
    numbers, epochs = request.numbers, request.actor.epochs
    found: dict[str, int | None] = {
        HANDLES["S"]: target.q * target.n,
        HANDLES["G"]: target.mini * target.n,
        HANDLES["K"]: target.q * epochs // target.mini if target.q * epochs % target.mini == 0 else None,
    }
    if numbers.data_ranks and "m" in numbers.values and numbers.key("m") == KEYS["m"]:
        steps, rest = divmod(target.mini * target.n, numbers.data_ranks * numbers.values["m"])
        found[HANDLES["a"]] = steps if rest == 0 and steps else None
    return found


def _rounds(request: Request, target: Target) -> Values:
    """Asynchronous rounds that fill the step."""
    if not request.asynchronous or target.q % target.mini:
        return {}
    batches, rounds = target.q // target.mini, request.asynchronous.rounds
    if rounds * request.asynchronous.batches == batches:
        return {}
    if batches % rounds == 0:
        return {KEYS["R"]: batches // rounds}
    return {KEYS["P"]: 1, KEYS["R"]: batches}


class _Near:
    """Targets near a request."""

    def __init__(self, request: Request):
        self.q, self.n = request.q, request.n
        roles = {role.name: role for role in request.roles}
        self.mini = roles["actor"].mini
        own_critic = "critic" in roles and roles["critic"].mini_key == CRITIC_MINI
        self.critic = roles["critic"].mini if own_critic else 0
        shared = [role for name, role in roles.items() if name == "actor" or not own_critic]
        self.ranks = [role.ranks for role in shared if role.ranks]
        self.critic_ranks = [roles["critic"].ranks or 1] if own_critic else []
        self.most = [layout.data_ranks for layout in request.layouts.values()]
        self.limit = request.prompts or max(self.q, *self.most, 1) * 1024
        calls = min(request.prompts_per_call, self.limit)
        sampling = [layout.data_ranks for role, layout in request.layouts.items() if role == "rollout"]
        self.samples = max(2 if request.filter else 1, *(-(-ranks // calls) for ranks in sampling), 1)

    def targets(self) -> Iterator[Target]:
        """Small changes first, then those that always lead to a legal step."""
        yield from self._other_mini_batches()
        yield from self._other_steps()
        yield from self._other_samples()
        yield from self._pairs()
        yield from self._one_mini_batch()

    def _other_mini_batches(self) -> Iterator[Target]:
        minis = [self.mini, *nearest(self.mini, _fitting(self.q, mini_batch_unit(self.ranks, self.n)))]
        critics = [self.critic]
        if self.critic:
            critics += nearest(self.critic, _fitting(self.q, mini_batch_unit(self.critic_ranks, self.n)))
        for mini in minis:
            for critic in critics:
                yield Target(self.q, self.n, mini, critic)

    def _other_steps(self) -> Iterator[Target]:
        whole = math.lcm(self.mini, self.critic or 1)
        least = -(-max(self.most, default=1) // self.n)
        for q in (*multiples(min(self.q, self.limit), whole), *multiples(max(self.q, least), whole)):
            yield Target(q, self.n, self.mini, self.critic)

    def _other_samples(self) -> Iterator[Target]:
        units = [ranks // math.gcd(ranks, self.mini) for ranks in self.ranks]
        units += [ranks // math.gcd(ranks, self.critic) for ranks in self.critic_ranks]
        least = max(self.samples, -(-max(self.most, default=1) // self.q))
        for n in (*multiples(self.n, math.lcm(*units)), *multiples(max(self.n, least), math.lcm(*units))):
            yield Target(self.q, n, self.mini, self.critic)

    def _pairs(self) -> Iterator[Target]:
        for mini in multiples(self.mini, mini_batch_unit(self.ranks, self.n)):
            critics = (
                multiples(self.critic, mini_batch_unit(self.critic_ranks, self.n)) if self.critic else [0]
            )
            for critic in (*critics, *([mini] if self.critic else [])):
                for q in multiples(min(self.q, self.limit), math.lcm(mini, critic or 1)):
                    yield Target(q, self.n, mini, critic)

    def _one_mini_batch(self) -> Iterator[Target]:
        all_ranks = [*self.ranks, *self.critic_ranks]
        least = -(-max(self.most, default=1) // self.n)
        for asked in dict.fromkeys((min(self.q, self.limit), max(self.q, least))):
            for q in multiples(asked, mini_batch_unit(all_ranks, self.n)):
                yield Target(q, self.n, q, q if self.critic else 0)
        q = min(self.q, self.limit)
        unit = mini_batch_unit(all_ranks, q)
        for n in (
            *multiples(max(self.n, self.samples), unit),
            -(-max(self.n, -(-max(self.most, default=1) // q)) // unit) * unit,
        ):
            yield Target(q, n, q, q if self.critic else 0)


def mini_batch_unit(ranks: Sequence[int], n: int) -> int:
    """The fewest prompts whose n responses each can be shared equally by every one of these numbers of data
    ranks.

    >>> mini_batch_unit([8, 12], 4)
    6
    """
    return math.lcm(*(count // math.gcd(count, n) for count in ranks))


def _fitting(q: int, unit: int) -> list[int]:
    """Divisors of q that are multiples of `unit`."""
    return [unit * d for d in divisors(q // unit)] if q % unit == 0 else []
