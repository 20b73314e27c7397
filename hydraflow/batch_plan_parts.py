"""The pieces of a batch plan, and the arithmetic that its rules share. Standard library and the schema only.

In: numbers that a user asked for. Out: `MicroPlan`, `RolePlan` and `Quantity`, which the running code and the tables use.
Left out on purpose: which configuration keys the numbers come from (`batch_plan.py`, `batch_plan_sft.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from hydraflow.engine.config import OptimConfig
from hydraflow.errors import Problem


@dataclass(frozen=True)
class MicroPlan:
    """What one forward of one data rank holds: so many rows, or rows up to so many tokens. Exactly one is set."""

    rows: int | None
    max_tokens: int | None


@dataclass(frozen=True)
class RolePlan:
    """How a trained role cuts the trajectories of one step."""

    data_ranks: int
    """dp: ranks among which the rows of a mini-batch are split."""
    mini_batch_prompts: int
    """M: prompts per optimizer step."""
    mini_batch_trajectories: int
    """G = M·n: trajectories per optimizer step, over all data ranks."""
    rows_per_rank: int
    """g = G/dp: trajectories per data rank and optimizer step."""
    epochs: int
    """E: passes over the trajectories of a step."""
    shuffle: bool
    """Whether the prompts of the mini-batches are drawn in random order."""
    micro: MicroPlan
    """What one forward holds during an update."""
    optimizer_steps_per_step: int
    """K = (Q/M)·E."""
    warmup_steps: int = 0
    """Training steps over which the learning rate rises from 0."""

    @classmethod
    def simple(cls, *, data_ranks: int = 1, mini_batch_trajectories: int, epochs: int = 1, micro: MicroPlan | None = None) -> RolePlan:
        """One response per prompt and one mini-batch per step, for examples and tests.

        >>> RolePlan.simple(data_ranks=2, mini_batch_trajectories=6).rows_per_rank
        3
        """
        rows = mini_batch_trajectories // data_ranks
        return cls(
            data_ranks=data_ranks,
            mini_batch_prompts=mini_batch_trajectories,
            mini_batch_trajectories=mini_batch_trajectories,
            rows_per_rank=rows,
            epochs=epochs,
            shuffle=False,
            micro=micro or MicroPlan(rows=rows, max_tokens=None),
            optimizer_steps_per_step=epochs,
        )


@dataclass(frozen=True)
class Quantity:
    """One line of the plan's table: a number, what it counts, and where it comes from."""

    name: str
    unit: str
    value: int | float | str
    formula: str
    """How it was computed, with the numbers put in; empty for a number that was given."""
    provenance: str
    """default, file, command line or derived."""


@dataclass(frozen=True)
class MicroRequest:
    """What the configuration says about the micro-batches of one pass, and under which keys."""

    purpose: str
    rows: int | None
    rows_key: str
    dynamic: bool
    max_tokens: int
    tokens_key: str
    switch_key: str
    """Key of the switch that decides `dynamic`."""

    def plan(self, *, rows_per_rank: int, row_tokens: int, exact: bool) -> MicroPlan:
        """The micro-batch of a pass over `rows_per_rank` rows of at most `row_tokens` tokens.

        `exact`: training micro-batches are equal, so a size that was not given is a divisor of `rows_per_rank`.

        >>> request = MicroRequest("update", None, "rows", False, 100, "tokens", "dynamic")
        >>> request.plan(rows_per_rank=12, row_tokens=20, exact=True)   # 5 rows fit, 4 divide 12
        MicroPlan(rows=4, max_tokens=None)
        """
        if self.dynamic:
            return MicroPlan(rows=None, max_tokens=self.max_tokens)
        if self.rows is not None:
            return MicroPlan(rows=self.rows, max_tokens=None)
        fitting = max(1, min(self.max_tokens // row_tokens, rows_per_rank))
        return MicroPlan(rows=max(d for d in divisors(rows_per_rank) if d <= fitting) if exact else fitting, max_tokens=None)

    def token_budget_problems(self, longest_row: int, formula: str) -> Iterator[Problem]:
        """A budget of tokens must hold the longest row; it counts when rows are filled by tokens or their number is not given."""
        if (self.dynamic or self.rows is None) and self.max_tokens < longest_row:
            rule = f"must hold the longest row, {formula} = {longest_row} tokens"
            yield Problem(self.tokens_key, self.max_tokens, rule, f"{self.tokens_key}={longest_row}")

    def divisor_problems(self, rows_per_rank: int, formula: str) -> Iterator[Problem]:
        """Training micro-batches of a fixed size must divide a data rank's rows."""
        if self.dynamic or self.rows is None or rows_per_rank % self.rows == 0:
            return
        rule = f"must divide the rows of a data rank in one optimizer step, {formula} = {rows_per_rank}"
        yield Problem(self.rows_key, self.rows, rule, options(self.rows_key, nearest(self.rows, divisors(rows_per_rank))))

    def notes(self) -> Iterator[str]:
        """What was given and has no effect."""
        if self.dynamic and self.rows is not None:
            yield f"{self.rows_key}={self.rows} has no effect: {self.switch_key}=true fills micro-batches by tokens"

    def quantity(self, plan: MicroPlan, provenance: str) -> Quantity:
        """The line of the table that shows `plan`; `provenance` is that of the key that decided."""
        if plan.max_tokens is not None:
            return Quantity(f"micro-batch of {self.purpose}", "tokens per device", plan.max_tokens, "", provenance)
        assert plan.rows is not None
        fitted = self.rows is None
        formula = f"the most that {self.max_tokens} tokens hold" if fitted else ""
        return Quantity(f"micro-batch of {self.purpose}", "rows per data rank", plan.rows, formula, "derived" if fitted else provenance)

    @property
    def deciding_key(self) -> str:
        """The key whose provenance is the micro-batch's."""
        return self.tokens_key if self.dynamic else self.rows_key


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in rising order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest(value: int, candidates: Iterable[int]) -> list[int]:
    """The largest candidate below `value` and the smallest above, where they exist.

    >>> nearest(96, [32, 64, 128, 256])
    [64, 128]
    """
    candidates = list(candidates)
    return [*sorted(c for c in candidates if c < value)[-1:], *sorted(c for c in candidates if c > value)[:1]]


def options(key: str, values: Iterable[int]) -> str:
    """Overrides to paste, one of which is enough.

    >>> options("trainer.nnodes", [1, 2])
    'trainer.nnodes=1 or trainer.nnodes=2'
    """
    return " or ".join(f"{key}={value}" for value in values)


def not_positive(numbers: Iterable[tuple[str, int | None]]) -> list[Problem]:
    """Sizes that were given and count less than one; null stands for a number to be derived."""
    return [Problem(key, n, "must be at least 1", f"{key}=1") for key, n in numbers if n is not None and n < 1]


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Training steps of the warm-up: `lr_warmup_steps`, or with -1 the ratio's share of all steps, rounded down."""
    return optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)


def warmup_problems(optim: OptimConfig, optim_key: str, total_steps: int) -> Iterator[Problem]:
    """A warm-up must end within the run, and leave a step for a decay; not judged while the total is unknown (0)."""
    decays = optim.lr_scheduler_type != "constant"
    latest, warmup = total_steps - 1 if decays else total_steps, warmup_steps(optim, total_steps)
    if total_steps == 0 or warmup == 0 or warmup <= latest:
        return
    by_steps = optim.lr_warmup_steps >= 0
    key = f"{optim_key}.{'lr_warmup_steps' if by_steps else 'lr_warmup_steps_ratio'}"
    given = optim.lr_warmup_steps if by_steps else optim.lr_warmup_steps_ratio
    room = f", and the {optim.lr_scheduler_type} decay needs one of them" if decays else ""
    rule = f"{warmup} warm-up steps do not fit {total_steps} training steps{room}"
    yield Problem(key, given, rule, f"{key}={min(latest, total_steps // 10) if by_steps else 0.1}")


def value_at(config: object, key: str) -> object:
    """The value of a dotted key in nested dataclasses."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def provenance(config: object, defaults: object, key: str, given: Collection[str]) -> str:
    """Where the value of `key` comes from; `given` are the keys on the command line."""
    if key in given:
        return "command line"
    return "default" if value_at(config, key) == value_at(defaults, key) else "file"
