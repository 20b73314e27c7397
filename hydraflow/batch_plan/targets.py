"""Alternative numbers for a step, close to the requested ones: candidates for repairing a broken rule.

In: a `Request`. Out: overrides. All rules of a step share these fixes, because its numbers depend on each
other; the judge decides which fixes are legal (`batch_plan/repair.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from hydraflow.batch_plan.handles import HANDLES, KEYS
from hydraflow.batch_plan.parts import divisors, mini_batch_unit, multiples, nearest
from hydraflow.batch_plan.repair import Fix, Values
from hydraflow.batch_plan.request import CRITIC_MINI, Request


def fixes(request: Request) -> Iterator[Fix]:
    """Overrides that lead to steps near the requested one: steps that the data ranks can share, then steps
    whose micro-batches also divide evenly."""
    ranks, rows = {}, {}
    for role in request.roles:
        if role.ranks:
            ranks[role.name] = role.ranks * role.micro.together
            filled = 1 if role.micro.dynamic else role.micro.rows or 1
            rows[role.name] = role.ranks * role.micro.group * math.lcm(filled, role.micro.together)
    for shares in (ranks, rows):
        for step in _near(request, shares):
            if all(step[:3]):
                yield _overrides(request, *step)


def _near(request: Request, shares: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
    """Q, n, M and the critic's M near the requested ones, small changes first; `shares`: what must
    divide the trajectories of a role's mini-batch."""
    q, n, mini = request.q, request.n, request.actor.mini
    own = request.critic if request.critic and request.critic.mini_key == CRITIC_MINI else None
    critic = own.mini if own else 0
    ranks = [share for role, share in shares.items() if role == "actor" or not own]
    critic_ranks = [shares.get("critic", 1)] if own else []
    most = max([1, *(layout.data_ranks for layout in request.layouts.values())])
    limit = request.prompts or max(q, most) * 1024  # if unknown, more than any fix needs

    unit, critic_unit = mini_batch_unit(ranks, n), mini_batch_unit(critic_ranks, n)
    critics = [critic, *nearest(critic, _fitting(q, critic_unit))] if own else [0]
    for other in [mini, *nearest(mini, _fitting(q, unit))]:
        for other_critic in critics:
            yield q, n, other, other_critic
    sampling = request.layouts["rollout"].data_ranks if "rollout" in request.layouts else 1
    samples = max(2 if request.filter else 1, -(-sampling // min(request.prompts_per_call, limit)))
    step = math.lcm(mini_batch_unit(ranks, mini), mini_batch_unit(critic_ranks, critic or 1))
    for other in (n, max(n, samples, -(-most // q))):
        for several in multiples(other, step):
            yield q, several, mini, critic

    steps = (min(q, limit), max(q, -(-most // n)))
    for other in [mini, *multiples(mini, unit)]:
        for other_critic in [critic, *multiples(critic, critic_unit), other] if own else [0]:
            for near in steps:
                for prompts in multiples(near, math.lcm(other, other_critic or 1)):
                    yield prompts, n, other, other_critic
    for near in steps:
        for prompts in multiples(near, mini_batch_unit([*ranks, *critic_ranks], n)):
            yield prompts, n, prompts, prompts
    whole = mini_batch_unit([*ranks, *critic_ranks], steps[0])
    for other in (max(n, samples), max(n, -(-most // steps[0]))):
        for several in multiples(other, whole):
            yield steps[0], several, steps[0], steps[0]


def _overrides(request: Request, q: int, n: int, mini: int, critic: int) -> Values:
    """The overrides that give a step these numbers: changed keys, and contradicting handles unset; `critic`
    is used if the critic has its own mini-batch size."""
    numbers = request.numbers
    values = Values()
    for letter, number in (("Q", q), ("n", n), ("M", mini)):
        if number != numbers.values[letter] and numbers.key(letter) == KEYS[letter]:
            values[KEYS[letter]] = number
    if request.critic and request.critic.mini_key == CRITIC_MINI and critic not in (0, request.critic.mini):
        values[CRITIC_MINI] = critic
    handles = {"S": q * n, "G": mini * n, "K": _whole(q * request.actor.epochs, mini)}
    if request.actor.ranks and "m" in numbers.values and numbers.key("m") == KEYS["m"]:
        handles["a"] = _whole(mini * n, request.actor.ranks * numbers.values["m"])
    for name, value in handles.items():
        if numbers.handles.get(HANDLES[name], value) != value:
            values[HANDLES[name]] = value
    return values


def _whole(number: int, by: int) -> int | None:
    """The quotient; None unless it is a positive whole number, so that a handle is dropped."""
    return number // by or None if number % by == 0 else None


def _fitting(q: int, unit: int) -> list[int]:
    """Divisors of q that are multiples of `unit`."""
    return [unit * d for d in divisors(q // unit)] if q % unit == 0 else []
