"""The pieces of a batch plan, and the arithmetic that its rules share. Standard library and the schema only.

In: numbers that a user asked for. Out: `MicroPlan`, `RolePlan` and `Quantity`, which the running code and the
tables use. Left out on purpose: which configuration keys the numbers come from (`batch_plan/request.py`,
`batch_plan/sft.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from hydraflow.batch_plan.repair import BUDGET, MICRO, SCHEDULE, SIZES, Cure, Violation
from hydraflow.engine.config import OptimConfig

DERIVED = "derived"


@dataclass(frozen=True)
class Plan:
    """What the plans of all kinds of runs have."""

    def to_json(self) -> str:
        """The content of `plan.json`; device ranges as [first, last + 1]."""
        return json.dumps(
            asdict(self), indent=2, ensure_ascii=False, default=lambda part: [part.start, part.stop]
        )


@dataclass(frozen=True)
class MicroPlan:
    """What one forward of one data rank holds: so many rows, or rows up to so many tokens. Exactly one is
    set."""

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
    accumulation_steps: int | None = None
    """a = g/m: micro-batches per optimizer step; None: as many as the tokens of the rows need."""
    warmup_steps: int = 0
    """Training steps over which the learning rate rises from 0."""
    decay_steps: int = 0
    """Training steps after the warm-up; 0: the total is not known, or the rate stays as it is."""
    total_optimizer_steps: int = 0
    """Optimizer steps of the run; 0: not known."""

    @classmethod
    def simple(
        cls,
        *,
        data_ranks: int = 1,
        mini_batch_trajectories: int,
        epochs: int = 1,
        micro: MicroPlan | None = None,
    ) -> RolePlan:
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
    formula: str = ""
    """How it was computed, with the numbers put in; empty for a number that was given."""
    provenance: str = DERIVED
    """default, a file, command line or derived."""


@dataclass(frozen=True)
class MicroRequest:
    """What the configuration says about the micro-batches of one pass, and under which keys."""

    purpose: str
    rows: int | None
    rows_key: str
    dynamic: bool
    max_tokens: int
    """Tokens per device."""
    tokens_key: str
    sharers: int = 1
    """sp or cp: devices that share the tokens of a row."""
    group: int = 1
    """Micro-batches come in groups of so many: the stages of an interleaved pipeline."""
    group_key: str = ""
    """Key that makes the pipeline an interleaved one."""

    @property
    def budget(self) -> int:
        """Tokens per micro-batch: L·sp, or L·cp."""
        return self.max_tokens * self.sharers

    def plan(self, *, rows_per_rank: int, row_tokens: int, exact: bool) -> MicroPlan:
        """The micro-batch of a pass over `rows_per_rank` rows of at most `row_tokens` tokens.

        `exact`: training micro-batches are equal, so a size that was not given is a divisor of
        `rows_per_rank`.

        >>> request = MicroRequest("update", None, "rows", False, 100, "tokens")
        >>> request.plan(rows_per_rank=12, row_tokens=20, exact=True)   # 5 rows fit, 4 divide 12
        MicroPlan(rows=4, max_tokens=None)
        """
        if self.dynamic:
            return MicroPlan(rows=None, max_tokens=self.budget)
        if self.rows is not None:
            return MicroPlan(rows=self.rows, max_tokens=None)
        fitting = max(1, min(self.budget // row_tokens, rows_per_rank))
        rows = (
            max((d for d in self.legal_rows(rows_per_rank) if d <= fitting), default=1) if exact else fitting
        )
        return MicroPlan(rows=rows, max_tokens=None)

    def legal_rows(self, rows_per_rank: int) -> list[int]:
        """Micro-batch sizes into which the rows of a data rank can be cut, in whole groups."""
        return divisors(rows_per_rank // self.group) if rows_per_rank % self.group == 0 else []

    def token_budget_violations(self, longest_row: int, formula: str) -> Iterator[Violation]:
        """A budget of tokens must hold the longest row; it counts when rows are filled by tokens or their
        number is not given."""
        if (not self.dynamic and self.rows is not None) or self.budget >= longest_row:
            return
        shared = f" x {self.sharers} devices that share a row" if self.sharers > 1 else ""
        yield Violation(
            rule=f"token budget:{self.tokens_key}",
            stage=BUDGET,
            field=self.tokens_key,
            value=self.max_tokens,
            text=f"tokens per device{shared} must hold the longest row, {formula} = {longest_row} tokens",
            cures=[
                {self.tokens_key: -(-longest_row // self.sharers)},
                {self.tokens_key: longest_row},
            ],
        )

    def divisor_violations(self, rows_per_rank: int, row_tokens: int, formula: str) -> Iterator[Violation]:
        """Training micro-batches of a fixed size must divide a data rank's rows, and fill whole groups.

        Filled by tokens, there are as many as the longest rows need, rounded up to whole groups: each needs a
        row.
        """
        if self.dynamic:
            needed = -(-rows_per_rank // max(1, self.budget // row_tokens))
            if -(-needed // self.group) * self.group > rows_per_rank:
                yield self._groups_violation(rows_per_rank, formula)
        elif self.rows is None:
            if rows_per_rank % self.group:
                yield self._groups_violation(rows_per_rank, formula)
        elif rows_per_rank % self.rows:
            text = f"must divide the rows of a data rank in one optimizer step, {formula} = {rows_per_rank}"
            yield self._rows_violation(rows_per_rank, text)
        elif rows_per_rank // self.rows % self.group:
            count = rows_per_rank // self.rows
            text = (
                f"makes {count} micro-batches of {rows_per_rank} rows; an interleaved pipeline needs a"
                f" multiple of {self.group}"
            )
            yield self._rows_violation(rows_per_rank, text)

    def _rows_violation(self, rows_per_rank: int, text: str) -> Violation:
        assert self.rows is not None
        asked = self.rows

        def cures() -> Iterator[Cure]:
            for rows in nearest(asked, self.legal_rows(rows_per_rank)):
                yield {self.rows_key: rows}
            yield {self.rows_key: None}
            if self.group > 1:
                yield {self.group_key: None}
                yield from (
                    {self.group_key: None, self.rows_key: rows}
                    for rows in nearest(asked, divisors(rows_per_rank))
                )

        return Violation(f"micro-batch:{self.purpose}", MICRO, self.rows_key, asked, text, cures)

    def _groups_violation(self, rows_per_rank: int, formula: str) -> Violation:
        text = (
            f"gives a data rank {formula} = {rows_per_rank} rows in one optimizer step; "
            f"an interleaved pipeline needs a multiple of its {self.group} stages as micro-batches"
        )
        return Violation(
            f"micro-batch:{self.purpose}", MICRO, self.group_key, None, text, [{self.group_key: None}]
        )

    @property
    def deciding_key(self) -> str:
        """The key whose provenance is the micro-batch's."""
        return self.tokens_key if self.dynamic else self.rows_key


MOST = 10**9
"""No size is larger: what follows from several can still be counted."""
MOST_TRIED = 2**16
"""Up to which divisors are looked for."""


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, in rising order: all of them up to 2^32, beyond that those up to 2^16
    and their partners.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, min(math.isqrt(number), MOST_TRIED) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest(value: int, candidates: Iterable[int]) -> list[int]:
    """The largest candidate below `value` and the smallest above, where they exist.

    >>> nearest(96, [32, 64, 128, 256])
    [64, 128]
    """
    candidates = list(candidates)
    return [*sorted(c for c in candidates if c < value)[-1:], *sorted(c for c in candidates if c > value)[:1]]


def multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, at most and at least as large; only positive ones.

    >>> multiples(100, 8), multiples(3, 8), multiples(16, 8)
    ([96, 104], [8], [16])
    """
    return [unit * k for k in dict.fromkeys((value // unit, -(-value // unit))) if k]


def no_sizes(numbers: Iterable[tuple[str, int | None]], default: Callable[[str], object]) -> list[Violation]:
    """Sizes that were given and count less than one, or more than anybody has; null stands for a number to be
    derived."""
    return [
        _size_violation(key, n, default(key)) for key, n in numbers if n is not None and not 1 <= n <= MOST
    ]


def _size_violation(key: str, value: int, default: object) -> Violation:
    text, least = ("must be at least 1", 1) if value < 1 else (f"must be at most {MOST}", MOST)
    return Violation(f"size:{key}", SIZES, key, value, text, [{key: least}, {key: default}])


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Training steps of the warm-up: `lr_warmup_steps`, or with -1 the ratio's share of all steps, rounded
    down."""
    if optim.lr_warmup_steps >= 0:
        return optim.lr_warmup_steps
    return int(optim.lr_warmup_steps_ratio * total_steps) if math.isfinite(optim.lr_warmup_steps_ratio) else 0


def warmup_violations(optim: OptimConfig, optim_key: str, total_steps: int) -> Iterator[Violation]:
    """A warm-up must end within the run, and leave a step for a decay; not judged while the total is unknown
    (0)."""
    decays = optim.lr_scheduler_type != "constant"
    latest, warmup = total_steps - 1 if decays else total_steps, warmup_steps(optim, total_steps)
    if total_steps == 0 or warmup <= max(latest, 0):
        return
    by_steps = optim.lr_warmup_steps >= 0
    key = f"{optim_key}.{'lr_warmup_steps' if by_steps else 'lr_warmup_steps_ratio'}"
    given = optim.lr_warmup_steps if by_steps else optim.lr_warmup_steps_ratio
    room = f", and the {optim.lr_scheduler_type} decay needs one of them" if decays else ""
    fitting = min(latest, total_steps // 10) if by_steps else 0.1
    text = f"{warmup} warm-up steps do not fit {total_steps} training steps{room}"
    yield Violation(f"warm-up:{optim_key}", SCHEDULE, key, given, text, [{key: fitting}])
