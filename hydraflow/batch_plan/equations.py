"""The equations between the numbers of a step, and whole numbers that solve them.

    S = Q·n   G = M·n   Q = M·t   S = G·t   K = E·t   G = a·m·dp

Q prompts and S trajectories per step, n trajectories per prompt, M prompts and G trajectories per optimizer
step, t mini-batches per step, E passes, K optimizer steps per step, m rows per micro-batch, a micro-batches
per optimizer step, dp data ranks.

In: some of the numbers. Out: all of them, the free ones near what is preferred; or None where no whole
numbers do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from hydraflow.batch_plan.parts import divisors, multiples

EQUATIONS = (
    (("S",), ("Q", "n")),
    (("G",), ("M", "n")),
    (("Q",), ("M", "t")),
    (("S",), ("G", "t")),
    (("K",), ("E", "t")),
    (("G",), ("a", "m", "dp")),
    (("t",), ("P", "R")),
)
"""Products of both sides are equal. P rounds of R mini-batches are a step of asynchronous training."""
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
    "dp": "data ranks",
    "E": "epochs",
    "P": "rounds",
    "R": "mini-batches per round",
}


@dataclass(frozen=True)
class Step:
    """What is known besides the numbers that a user may choose."""

    epochs: int
    ranks: int = 1
    """The actor's data ranks."""
    group: int = 1
    """Micro-batches come in groups of so many."""
    shares: tuple[int, ...] = ()
    """Numbers that must divide G besides: those of a critic with the same mini-batches."""
    whole: int = 1
    """A number that must divide Q besides: the critic's own mini-batch."""
    preferred: Mapping[str, int] = field(default_factory=dict)
    """Q, n, M: what is taken where nothing forbids it."""
    static: bool = True
    """Whether micro-batches have a fixed number of rows."""
    asynchronous: bool = False


def closure(known: Mapping[str, int], step: Step) -> dict[str, Fraction] | None:
    """Everything that follows from `known`; None: it contradicts itself.

    >>> follows = closure({"S": 512, "n": 8, "K": 4}, Step(epochs=2, ranks=2))
    >>> follows["Q"], follows["M"]
    (Fraction(64, 1), Fraction(32, 1))
    """
    values = {name: Fraction(value) for name, value in known.items()} | {
        "E": Fraction(step.epochs),
        "dp": Fraction(step.ranks),
    }
    if not step.static:
        values.pop("m", None)
        values.pop("a", None)
    grown = True
    while grown:
        grown = False
        for left, right in EQUATIONS:
            unknown = [name for name in (*left, *right) if name not in values]
            if len(unknown) == 1:
                mine, other = (left, right) if unknown[0] in left else (right, left)
                values[unknown[0]] = _product(values, other) / _product(
                    values, [name for name in mine if name != unknown[0]]
                )
                grown = True
            elif not unknown and _product(values, left) != _product(values, right):
                return None
    return values


def explain(known: Mapping[str, int], step: Step) -> list[str]:
    """How numbers that cannot hold together come to something that cannot be, one line for each number on the
    way.

    >>> explain({"G": 256, "n": 8, "Q": 100}, Step(epochs=1))
    ['256/8 = 32 prompts per optimizer step', '100/32 mini-batches per step is no whole number']
    """
    chain = _Chain(dict(known) | {"E": step.epochs, "dp": step.ranks}, {})
    if not step.static:
        chain.values = {name: value for name, value in chain.values.items() if name not in ("m", "a")}
    while (found := chain.grow()) is not None:
        if isinstance(found, list):
            return found
    for share in (step.ranks, *step.shares):
        if chain.values.get("G", 0) % share:
            return [
                *chain.way_to("G"),
                f"{chain.values['G']} trajectories cannot be shared equally by {share} data ranks",
            ]
    return _no_mini_batch(chain.values, step)


def _no_mini_batch(values: Mapping[str, int], step: Step) -> list[str]:
    """Why no mini-batch fits a step, where only that is wrong."""
    q, n = values.get("Q"), values.get("n")
    if q is None or n is None or q % (unit := prompts_unit(values, step)) == 0:
        return []
    times = "·".join(str(values[name]) for name in ("a", "m", "dp") if name in values)
    least = f"{times}/{n} = {unit}" if unit * n == _shares(values, step)[0] else str(unit)
    return [f"an optimizer step has a multiple of {least} prompts, and none divides {q} prompts per step"]


@dataclass
class _Chain:
    """Numbers, and for those that followed how."""

    values: dict[str, int]
    ways: dict[str, tuple[str, list[str]]]
    """Number -> its line, and the numbers that it followed from."""

    def grow(self) -> list[str] | bool | None:
        """One number more; None when nothing follows any more; the whole way when something cannot be."""
        for (total,), factors in EQUATIONS:
            unknown = [name for name in (total, *factors) if name not in self.values]
            if len(unknown) == 1:
                return self._derive(unknown[0], total, [name for name in factors if name != unknown[0]])
            product = math.prod(self.values.get(name, 1) for name in factors)
            if not unknown and self.values[total] != product:
                line = f"{self._written(factors)} = {product} is not the {self.values[total]} {_WORDS[total]}"
                return [*self.way_to(total, *factors), line]
        return None

    def _derive(self, name: str, total: str, others: list[str]) -> list[str] | bool:
        product, written = math.prod(self.values[other] for other in others), self._written(others)
        sources = others if name == total else [total, *others]
        if name == total:
            self.values[name], rest = product, 0
        else:
            written = f"{self.values[total]}/{written if len(others) == 1 else f'({written})'}"
            self.values[name], rest = divmod(self.values[total], product)
        if rest or not self.values[name]:
            return [*self.way_to(*sources), f"{written} {_WORDS[name]} is no whole number"]
        plain = all(self.values[other] == 1 for other in others)
        self.ways[name] = ("" if plain else f"{written} = {self.values[name]} {_WORDS[name]}", sources)
        return True

    def way_to(self, *names: str) -> list[str]:
        """The lines of these numbers and of those before them."""
        lines: list[str] = []
        for name in names:
            line, sources = self.ways.get(name, ("", []))
            lines += [*self.way_to(*sources), *([line] if line else [])]
        return list(dict.fromkeys(lines))

    def _written(self, names: Iterable[str]) -> str:
        return "·".join(str(self.values[name]) for name in names)


def _product(values: Mapping[str, Fraction], names: Iterable[str]) -> Fraction:
    return math.prod((values[name] for name in names), start=Fraction(1))


def solve(known: Mapping[str, int], step: Step) -> dict[str, int] | None:
    """Whole Q, n, M (and m, P, R where they follow) that agree with `known` and that the data ranks can
    share.

    n follows from the equations, or is the preferred one: how many responses a prompt gets is no matter of
    divisibility.

    >>> solve({"G": 96, "n": 8}, Step(epochs=1, ranks=4, preferred={"Q": 1024, "n": 1, "M": 256}))["Q"]
    1020
    """
    follows = closure(known, step)
    if follows is None or any(value.denominator != 1 or value < 1 for value in follows.values()):
        return None
    exact = {name: int(value) for name, value in follows.items()}
    if "n" not in exact:
        return solve({**known, "n": step.preferred["n"]}, step)
    return next(_with_samples(exact, step), None)


def _shares(exact: Mapping[str, int], step: Step) -> list[int]:
    """Numbers that must divide the trajectories of a mini-batch."""
    own = step.ranks
    if step.static:
        own *= exact.get("m", 1) * math.lcm(exact.get("a", 1), step.group)
    return [own, *step.shares]


def prompts_unit(values: Mapping[str, int], step: Step) -> int:
    """Prompts of the smallest mini-batch that all data ranks can share, with n of `values`; all others are
    multiples of it.

    >>> prompts_unit({"n": 2, "m": 3}, Step(epochs=1, ranks=4))
    6
    """
    return math.lcm(*(share // math.gcd(share, values["n"]) for share in _shares(values, step)))


def _with_samples(exact: Mapping[str, int], step: Step) -> Iterator[dict[str, int]]:
    unit = prompts_unit(exact, step)
    rounds = math.lcm(*(exact.get(name, 1) for name in ("P", "R"))) if "t" not in exact else exact["t"]
    for mini, q in _prompts(exact, step, unit, rounds):
        follows = closure({**exact, "Q": q, "M": mini}, step)
        if (
            q % mini
            or mini % unit
            or follows is None
            or any(value.denominator != 1 for value in follows.values())
        ):
            continue
        if q % step.whole or (q // mini) % rounds or ("t" in exact and q // mini != exact["t"]):
            continue
        yield _with_rounds({name: int(value) for name, value in follows.items()}, exact, step)


def _prompts(exact: Mapping[str, int], step: Step, unit: int, rounds: int) -> Iterator[tuple[int, int]]:
    """Candidates for (M, Q), the preferred first."""
    q = exact.get("Q") or (
        exact["S"] // exact["n"] if "S" in exact and exact["S"] % exact["n"] == 0 else None
    )
    mini = exact.get("M") or (
        exact["G"] // exact["n"] if "G" in exact and exact["G"] % exact["n"] == 0 else None
    )
    if mini is not None:
        yield mini, q or _near_multiple(step.preferred["Q"], mini, step, rounds, exact)
    elif q is not None:
        minis = divisors(q // rounds) if q % rounds == 0 else []
        fitting = [one for one in minis if one % unit == 0]
        below = [one for one in fitting if one <= step.preferred["M"]]
        yield from ((one, q) for one in (below[-1:] or fitting[:1]))
    else:
        for one in sorted(
            multiples(step.preferred["M"], unit), key=lambda one: abs(one - step.preferred["M"])
        ):
            yield one, _near_multiple(step.preferred["Q"], one, step, rounds, exact)


def _near_multiple(q: int, mini: int, step: Step, rounds: int, exact: Mapping[str, int]) -> int:
    """The step nearest to `q` that holds whole mini-batches."""
    if "t" in exact:
        return mini * exact["t"]
    return min(multiples(q, math.lcm(mini * rounds, step.whole)), key=lambda one: abs(one - q))


def _with_rounds(values: dict[str, int], exact: Mapping[str, int], step: Step) -> dict[str, int]:
    """With the rounds of asynchronous training: one round after the other is weighed against larger
    rounds."""
    if step.asynchronous and not {"P", "R"} <= set(values):
        values["P"] = exact.get("P", 1)
        values["R"] = values["t"] // values["P"]
    return values
