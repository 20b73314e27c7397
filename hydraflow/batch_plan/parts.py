"""The pieces of a batch plan, and the arithmetic that its rules share. Standard library and the schema only.

In: requested numbers. Out: `MicroPlan`, `RolePlan` and `Quantity`, which the running code and the
tables use. Left out on purpose: which configuration keys the numbers come from (`batch_plan/request.py`,
`batch_plan/sft.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hydraflow.batch_plan.repair import BUDGET, MICRO, SCHEDULE, SIZES, Fix, Violation
from hydraflow.batch_plan.settings import Settings, value_at
from hydraflow.engine.config import OptimConfig
from hydraflow.options import walk, why_idle

DERIVED = "derived"
KEEP_GROUPS = "trainer.keep_groups"


@dataclass(frozen=True)
class Plan:
    """Every job's plan can be written as `plan.json`."""

    def to_json(self) -> str:
        """The content of `plan.json`; device ranges as [first, last + 1]."""
        return json.dumps(
            asdict(self), indent=2, ensure_ascii=False, default=lambda part: [part.start, part.stop]
        )


@dataclass(frozen=True)
class MicroPlan:
    """A micro-batch: the rows of one forward pass on one data rank, or its token budget; one is set."""

    rows: int | None
    max_tokens: int | None
    unit: int = 1
    """Neighbouring rows that must stay together, such as the two of a pair; divides `rows`."""
    whole_groups: bool = False
    """Whether the rows of a group stay together where memory and the other ranks allow."""


@dataclass(frozen=True)
class RolePlan:
    """How a trained role splits the trajectories of one step."""

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
    """Micro-batch of an update."""
    optimizer_steps_per_step: int
    """K = (Q/M)·E."""
    accumulation_steps: int | None = None
    """a = g/m: micro-batches per optimizer step; None: depends on the rows' tokens."""
    warmup_steps: int = 0
    """Training steps over which the learning rate rises from 0."""
    decay_steps: int = 0
    """Training steps after the warm-up; 0: the total is not known, or the rate stays as it is."""
    total_optimizer_steps: int = 0
    """Optimizer steps of the run; 0: not known, or none."""
    first_step: int = 1
    """First training step, counted from 1, in which the role learns."""

    def optimizer_steps(self, training_steps: int) -> int:
        """Optimizer steps in the first `training_steps` training steps."""
        return max(0, training_steps - self.first_step + 1) * self.optimizer_steps_per_step

    def of_units(self, unit: int) -> RolePlan:
        """The same plan with each row replaced by `unit` rows that stay together."""
        micro = replace(self.micro, rows=self.micro.rows and self.micro.rows * unit, unit=unit)
        rows, each = self.mini_batch_trajectories * unit, self.rows_per_rank * unit
        return replace(self, mini_batch_trajectories=rows, rows_per_rank=each, micro=micro)


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
    """Micro-batches come in groups of this size: the stages of an interleaved pipeline."""
    group_key: str = ""
    """Key that makes the pipeline an interleaved one."""
    together: int = 1
    """Rows that stay together: the n responses to a prompt with `trainer.keep_groups`."""

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
        MicroPlan(rows=4, max_tokens=None, unit=1, whole_groups=False)
        """
        whole = self.together > 1
        if self.dynamic:
            return MicroPlan(rows=None, max_tokens=self.budget, whole_groups=whole)
        if self.rows is not None:
            return MicroPlan(rows=self.rows, max_tokens=None, whole_groups=whole)
        least = self.together
        fitting = min(self.budget // row_tokens, rows_per_rank) // least * least
        if exact:
            fitting = max((d for d in self.legal_rows(rows_per_rank) if d <= fitting), default=least)
        return MicroPlan(rows=max(least, fitting), max_tokens=None, whole_groups=whole)

    def legal_rows(self, rows_per_rank: int) -> list[int]:
        """Micro-batch sizes that divide the rows of a data rank into a multiple of `group` micro-batches, and
        are multiples of `together`."""
        least = self.together
        if rows_per_rank % (self.group * least):
            return []
        return [least * count for count in divisors(rows_per_rank // self.group // least)]

    def token_budget_violations(self, longest_row: int, formula: str) -> Iterator[Violation]:
        """A token budget must hold the longest row, or as many of them as stay together; it is used when rows
        are filled by tokens or their number is not given."""
        longest, what, key = longest_row * self.together, "the longest row", self.tokens_key
        if (not self.dynamic and self.rows is not None) or self.budget >= longest:
            return
        fixes: list[Fix] = [{key: -(-longest // self.sharers)}, {key: longest}]
        if self.together > 1:
            what, formula = f"the {self.together} responses to a prompt", f"{self.together}·({formula})"
            fixes.append({KEEP_GROUPS: False})
        shared = f" x {self.sharers} devices that share a row" if self.sharers > 1 else ""
        text = f"tokens per device{shared} must hold {what}, {formula} = {longest} tokens"
        advice = "shorter prompts or responses"
        yield Violation(f"token budget:{key}", BUDGET, key, self.max_tokens, text, fixes, advice)

    def group_violations(self) -> Iterator[Violation]:
        """A given number of rows is a multiple of those that stay together."""
        if self.dynamic or self.rows is None or self.rows % self.together == 0:
            return
        text = f"must be a multiple of the {self.together} responses to a prompt, to keep them together"
        fixes: list[Fix] = [{self.rows_key: rows} for rows in multiples(self.rows, self.together)]
        fixes += [{self.rows_key: None}, {KEEP_GROUPS: False}]
        yield Violation(f"whole groups:{self.rows_key}", MICRO, self.rows_key, self.rows, text, fixes)

    def divisor_violations(self, rows_per_rank: int, row_tokens: int, formula: str) -> Iterator[Violation]:
        """Training micro-batches of a fixed size must divide a data rank's rows, and fill whole groups.
        Filled by tokens, there are as many as the longest rows need, rounded up to whole groups: each needs a
        row."""
        asked, purpose = self.rows, self.purpose
        if self.dynamic or asked is None:
            needed = -(-rows_per_rank // max(1, self.budget // row_tokens))
            short = -(-needed // self.group) * self.group > rows_per_rank
            if short if self.dynamic else rows_per_rank % self.group:
                text = f"gives a data rank {formula} = {rows_per_rank} rows in one optimizer step; an"
                text += f" interleaved pipeline needs a multiple of its {self.group} stages as micro-batches"
                off: list[Fix] = [{self.group_key: None}]
                yield Violation(f"micro-batch:{purpose}", MICRO, self.group_key, None, text, off)
            return
        count, rest = divmod(rows_per_rank, asked)
        if rest == 0 and count % self.group == 0:
            return

        def fixes() -> Iterator[Fix]:
            for rows in nearest(asked, self.legal_rows(rows_per_rank)):
                yield {self.rows_key: rows}
            yield {self.rows_key: None}
            if self.group > 1:
                yield {self.group_key: None}
                for rows in nearest(asked, replace(self, group=1).legal_rows(rows_per_rank)):
                    yield {self.group_key: None, self.rows_key: rows}

        text = f"must divide the rows of a data rank in one optimizer step, {formula} = {rows_per_rank}"
        if rest == 0:
            text = f"makes {count} micro-batches of {rows_per_rank} rows; an interleaved pipeline needs a"
            text += f" multiple of {self.group}"
        yield Violation(f"micro-batch:{purpose}", MICRO, self.rows_key, asked, text, fixes)

    @property
    def deciding_key(self) -> str:
        """The key whose provenance is the micro-batch's."""
        return self.tokens_key if self.dynamic else self.rows_key


@dataclass(frozen=True)
class RoleRequest:
    """What the configuration says about a trained role, and under which keys."""

    name: str
    mini: int
    mini_key: str
    ranks: int | None
    """Data ranks; None: its devices do not add up."""
    epochs: int
    shuffle: bool
    micro: MicroRequest
    optim: OptimConfig
    optim_key: str
    first_step: int = 1
    """First training step, counted from 1, in which it learns."""

    def plan(self, *, q: int, n: int, row_tokens: int, total_steps: int) -> RolePlan:
        """How it splits a step of `q` prompts with `n` rows each."""
        assert self.ranks is not None
        rows, steps = self.mini * n // self.ranks, q // self.mini * self.epochs
        micro = self.micro.plan(rows_per_rank=rows, row_tokens=row_tokens, exact=True)
        warmup = warmup_steps(self.optim, total_steps)
        return RolePlan(
            data_ranks=self.ranks,
            mini_batch_prompts=self.mini,
            mini_batch_trajectories=self.mini * n,
            rows_per_rank=rows,
            epochs=self.epochs,
            shuffle=self.shuffle,
            micro=micro,
            optimizer_steps_per_step=steps,
            accumulation_steps=rows // micro.rows if micro.rows else None,
            warmup_steps=warmup,
            decay_steps=max(0, total_steps - warmup),
            total_optimizer_steps=max(0, total_steps - self.first_step + 1) * steps,
            first_step=self.first_step,
        )

    def micro_batch_violations(self, n: int, row_tokens: int, formula: str) -> Iterator[Violation]:
        """Micro-batches of an update must fill a data rank's rows; `formula`: of these rows."""
        if self.ranks and self.mini * n % self.ranks == 0:
            yield from self.micro.divisor_violations(self.mini * n // self.ranks, row_tokens, formula)

    def warmup_violations(self, total_steps: int) -> Iterator[Violation]:
        """A warm-up must end within the run and leave a step for a decay; not checked if the total is 0,
        which means unknown."""
        optim, warmup = self.optim, warmup_steps(self.optim, total_steps)
        decays, by_steps = optim.lr_scheduler_type != "constant", optim.lr_warmup_steps >= 0
        latest = total_steps - 1 if decays else total_steps
        if total_steps == 0 or warmup <= max(latest, 0):
            return
        key = f"{self.optim_key}.{'lr_warmup_steps' if by_steps else 'lr_warmup_steps_ratio'}"
        given = optim.lr_warmup_steps if by_steps else optim.lr_warmup_steps_ratio
        room = f", and the {optim.lr_scheduler_type} decay needs one of them" if decays else ""
        fitting = min(latest, total_steps // 10) if by_steps else 0.1
        text = f"{warmup} warm-up steps do not fit {total_steps} training steps{room}"
        yield Violation(f"warm-up:{self.optim_key}", SCHEDULE, key, given, text, [{key: fitting}])


MOST = 10**9
"""Maximum of any size, so that products of several stay exact."""
MOST_TRIED = 2**16
"""Largest divisor that is searched for."""


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending: all of them for numbers up to 2^32, beyond that those up to
    2^16 and their partners.

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


def mini_batch_unit(ranks: Sequence[int], n: int) -> int:
    """The smallest number of prompts whose n responses each divide equally over each of these numbers of data
    ranks.

    >>> mini_batch_unit([8, 12], 4)
    6
    """
    return math.lcm(*(count // math.gcd(count, n) for count in ranks))


def no_sizes(settings: Settings[Any]) -> list[Violation]:
    """A violation for each size that has an effect and is below 1 or above `MOST`; null is derived later."""
    found = []
    for leaf in walk(settings.config):
        value = leaf.value
        if not leaf.option.size or value is None or 1 <= value <= MOST or why_idle(settings.config, leaf.key):
            continue
        text, least = ("must be at least 1", 1) if value < 1 else (f"must be at most {MOST}", MOST)
        fixes: list[Fix] = [{leaf.key: least}, {leaf.key: value_at(settings.defaults, leaf.key)}]
        found.append(Violation(f"size:{leaf.key}", SIZES, leaf.key, value, text, fixes))
    return found


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Training steps of the warm-up: `lr_warmup_steps`, or with -1 the ratio of all steps, rounded down."""
    if optim.lr_warmup_steps >= 0:
        return optim.lr_warmup_steps
    return int(optim.lr_warmup_steps_ratio * total_steps) if math.isfinite(optim.lr_warmup_steps_ratio) else 0
