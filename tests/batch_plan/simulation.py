"""A training run dealt out by hand: devices get coordinates, rows get ranks and micro-batches, optimizer
steps are counted.

In: plain numbers (`Run`). Out: `Counts`, or `CannotRun` with the reason. This is the oracle of the batch
plan: it divides nothing and knows no rule; it cuts lists and looks whether the last piece is whole. Left out
on purpose: configuration keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import TypeVar

T = TypeVar("T")


class CannotRun(Exception):
    """Why the rows or the devices cannot be dealt out."""


@dataclass(frozen=True)
class Engine:
    """A training engine on its devices; `kind` is fsdp2 or megatron."""

    devices: int
    kind: str = "fsdp2"
    sequence: int = 1
    """Ulysses."""
    shard: int = -1
    """fsdp_size: devices that hold one copy of the model together; -1: all."""
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def shares_a_row(self) -> int:
        """Devices over which the tokens of one row are spread, and whose token budgets add up."""
        return self.context if self.kind == "megatron" else self.sequence


@dataclass(frozen=True)
class Fill:
    """How one forward is filled: with `rows` rows (None: as many as `tokens` hold), or when `dynamic` with
    tokens."""

    rows: int | None = None
    tokens: int = 16384
    """Per device."""
    dynamic: bool = False


@dataclass(frozen=True)
class Trained:
    """A role that learns; `forward` is its pass without an update (old log-probabilities, values)."""

    engine: Engine
    mini: int
    epochs: int
    update: Fill
    forward: Fill


@dataclass(frozen=True)
class Frozen:
    """A role that only computes."""

    engine: Engine
    forward: Fill


@dataclass(frozen=True)
class Rollout:
    """Generation engines: one replica spans tensor x pipeline x data devices, and each of its data ranks
    samples rows of its own."""

    devices: int
    tensor: int = 1
    pipeline: int = 1
    data: int = 1


@dataclass(frozen=True)
class Run:
    """Everything that decides whether a run can be dealt out."""

    prompts: int
    """In the data."""
    prompts_per_step: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    passes: int
    """Over the data."""
    steps: int | None
    """Training steps; None: as many as the passes give."""
    rollout: Rollout
    actor: Trained
    warmup: int = 0
    """Training steps in which the actor's learning rate rises."""
    decays: bool = False
    """Whether it falls afterwards."""
    critic: Trained | None = None
    ref: Frozen | None = None


@dataclass(frozen=True)
class TrainedCounts:
    """What a learning role did in one step."""

    data_ranks: int
    rows_per_optimizer_step: int
    rows_per_rank: int
    """In one optimizer step."""
    optimizer_steps: int
    micro_rows: int | None
    """Rows in each micro-batch; None: filled by tokens."""
    accumulation: int
    """Micro-batches of one optimizer step and data rank; when filled by tokens, with rows that are all as
    long as allowed."""


@dataclass(frozen=True)
class Counts:
    """What was counted."""

    rows: int
    """Trajectories in one step."""
    replicas: int
    """Generation engines."""
    actor: TrainedCounts
    critic: TrainedCounts | None
    ref_ranks: int | None
    steps_per_pass: int
    steps: int
    unused_prompts: int
    """Per pass over the data: they do not fill a step."""
    actor_optimizer_steps: int
    """In the whole run."""


@dataclass(frozen=True)
class Row:
    """One trajectory."""

    prompt: int
    sample: int
    tokens: int


def simulate(run: Run) -> Counts:
    """Deals out a run. Raises CannotRun.

    >>> engine = Engine(devices=2)
    >>> actor = Trained(engine, mini=4, epochs=1, update=Fill(rows=2), forward=Fill(rows=2))
    >>> run = Run(20, 8, 2, 4, 4, 1, None, Rollout(2), actor)   # 8 prompts twice, 4 prompts a mini-batch
    >>> counts = simulate(run).actor
    >>> counts.data_ranks, counts.rows_per_optimizer_step, counts.rows_per_rank
    (2, 8, 4)
    >>> counts.optimizer_steps, counts.micro_rows, counts.accumulation
    (2, 2, 2)
    """
    steps_per_pass, steps, unused = _load(run)
    _schedule_rate(run, steps)
    rows = [
        Row(prompt, sample, run.prompt_tokens + run.response_tokens)
        for prompt in range(run.prompts_per_step)
        for sample in range(run.samples)
    ]
    place = run.rollout
    replicas = _coordinates(
        place.devices, {"tensor": place.tensor, "pipeline": place.pipeline, "data": place.data}, "replica"
    )
    _share_for_compute(rows, len({(at["replica"], at["data"]) for at in replicas}))
    actor = _train(rows, run.actor)
    return Counts(
        rows=len(rows),
        replicas=_number(replicas, "replica"),
        actor=actor,
        critic=_train(rows, run.critic) if run.critic else None,
        ref_ranks=_compute(rows, run.ref.engine, run.ref.forward) if run.ref else None,
        steps_per_pass=steps_per_pass,
        steps=steps,
        unused_prompts=unused,
        actor_optimizer_steps=sum(actor.optimizer_steps for _ in range(steps)),
    )


# --- devices --------------------------------------------------


def data_ranks(engine: Engine) -> int:
    """Ranks among which rows are split, counted on a grid of devices. Raises CannotRun where the grid has a
    hole.

    >>> data_ranks(Engine(devices=8, kind="megatron", tensor=2, pipeline=2))
    2
    """
    if engine.kind == "fsdp2":
        places = _coordinates(engine.devices, {"sequence": engine.sequence}, "data")
        _coordinates(
            engine.devices, {"shard": engine.devices if engine.shard == -1 else engine.shard}, "copy"
        )
        return _number(places, "data")
    if engine.virtual not in (None, 1) and engine.pipeline == 1:
        raise CannotRun("one pipeline stage has nothing to interleave")
    ranks = set()
    for stage in _equal_parts(list(range(engine.devices)), engine.pipeline, "pipeline stages"):
        dense = _coordinates(len(stage), {"tensor": engine.tensor, "context": engine.context}, "data")
        expert_tensor = engine.tensor if engine.expert_tensor is None else engine.expert_tensor
        _coordinates(len(stage), {"expert_tensor": expert_tensor, "expert": engine.expert}, "expert_data")
        ranks.add(_number(dense, "data"))
    assert len(ranks) == 1, ranks
    return ranks.pop()


def _coordinates(devices: int, sizes: Mapping[str, int], outer: str) -> list[dict[str, int]]:
    """A place for each device: groups of one device per combination of `sizes`, one group after the other
    along `outer`."""
    group = [dict(zip(sizes, place)) for place in product(*(range(size) for size in sizes.values()))]
    placed: list[dict[str, int]] = []
    for number in count():
        left = devices - len(placed)
        if left == 0 and placed:
            return placed
        if left < len(group):
            raise CannotRun(f"{left} devices are left over for a group of {dict(sizes)}")
        placed += [place | {outer: number} for place in group]
    raise AssertionError("unreachable")


def _number(places: Sequence[Mapping[str, int]], axis: str) -> int:
    return len({place[axis] for place in places})


# --- rows --------------------------------------------------


def _load(run: Run) -> tuple[int, int, int]:
    """Steps in one pass over the data, steps of the run, prompts that no step takes."""
    batches = [
        list(range(run.prompts))[start : start + run.prompts_per_step]
        for start in range(0, run.prompts, run.prompts_per_step)
    ]
    whole = [batch for batch in batches if len(batch) == run.prompts_per_step]
    if not whole:
        raise CannotRun(f"{run.prompts} prompts do not fill one step of {run.prompts_per_step}")
    unused = sum(len(batch) for batch in batches if len(batch) != run.prompts_per_step)
    taken = 0
    for number in count():
        for _ in whole:
            if run.steps is not None and taken == run.steps:
                return len(whole), taken, unused
            taken += 1
        if run.steps is None and number + 1 == run.passes:
            return len(whole), taken, unused
    raise AssertionError("unreachable")


def _schedule_rate(run: Run, steps: int) -> None:
    """The learning rate of each step: it rises to its peak, and falls in at least one step if it is to
    fall."""
    rising = [step for step in range(steps) if step < run.warmup]
    after = [step for step in range(steps) if step >= run.warmup]
    if len(rising) < run.warmup:
        raise CannotRun(f"{run.warmup} steps of warm-up in {steps}")
    if run.decays and not after:
        raise CannotRun("no step is left for the decay")


def _train(rows: list[Row], role: Trained) -> TrainedCounts:
    """One step of a learning role: its pass without an update, then every optimizer step."""
    ranks = _compute(rows, role.engine, role.forward)
    optimizer_steps = 0
    sizes, shares, accumulations = set(), set(), set()
    micro_rows: int | None = None
    for _ in range(role.epochs):
        for mini_batch in _mini_batches(rows, role.mini):
            for share in _equal_parts(mini_batch, ranks, "data ranks"):
                micro_batches = _micro_batches(share, role.update, role.engine)
                shares.add(len(share))
                accumulations.add(len(micro_batches))
                micro_rows = None if role.update.dynamic else len(micro_batches[0])
            sizes.add(len(mini_batch))
            optimizer_steps += 1
    assert len(sizes) == len(shares) == len(accumulations) == 1, "equal rows must give equal work"
    return TrainedCounts(ranks, sizes.pop(), shares.pop(), optimizer_steps, micro_rows, accumulations.pop())


def _mini_batches(rows: list[Row], prompts: int) -> list[list[Row]]:
    """All rows of that many prompts each, in prompt order."""
    batches: list[list[Row]] = []
    left = sorted({row.prompt for row in rows})
    while left:
        chosen, left = set(left[:prompts]), left[prompts:]
        if len(chosen) < prompts:
            raise CannotRun(f"the last mini-batch has {len(chosen)} of {prompts} prompts")
        batches.append([row for row in rows if row.prompt in chosen])
    return batches


def _micro_batches(share: list[Row], fill: Fill, engine: Engine) -> list[list[Row]]:
    """One data rank's rows of one optimizer step in micro-batches, as many as the engine's schedule takes."""
    budget = sum(fill.tokens for _ in range(engine.shares_a_row))
    if fill.dynamic:
        return _schedule_by_tokens(_filled(share, budget), engine)
    if fill.rows is not None:
        return _schedule(_pieces(share, fill.rows), engine)
    for rows in range(len(share), 0, -1):  # not given: the largest that fits and comes out even
        try:
            pieces = _schedule(_pieces(share, rows), engine)
        except CannotRun:
            continue
        if all(sum(row.tokens for row in piece) <= budget for piece in pieces):
            return pieces
    raise CannotRun(f"no micro-batch of {len(share)} rows fits {budget} tokens")


def _pieces(share: list[Row], rows: int) -> list[list[Row]]:
    pieces = [share[start : start + rows] for start in range(0, len(share), rows)]
    if len(pieces[-1]) < rows:
        raise CannotRun(f"the last micro-batch has {len(pieces[-1])} of {rows} rows")
    return pieces


def _filled(share: list[Row], budget: int) -> list[list[Row]]:
    """Rows into micro-batches one after the other, a new one where the next row does not fit."""
    pieces: list[list[Row]] = []
    for row in share:
        if row.tokens > budget:
            raise CannotRun(f"a row of {row.tokens} tokens does not fit {budget}")
        if pieces and sum(other.tokens for other in pieces[-1]) + row.tokens <= budget:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces


def _schedule(pieces: list[list[Row]], engine: Engine) -> list[list[Row]]:
    """An interleaved pipeline sends micro-batches through in groups of as many as it has stages."""
    if engine.kind == "fsdp2" or engine.virtual in (None, 1):
        return pieces
    if any(
        len(pieces[start : start + engine.pipeline]) < engine.pipeline
        for start in range(0, len(pieces), engine.pipeline)
    ):
        raise CannotRun(f"{len(pieces)} micro-batches leave a gap in a pipeline of {engine.pipeline} stages")
    return pieces


def _schedule_by_tokens(pieces: list[list[Row]], engine: Engine) -> list[list[Row]]:
    """Where the number of micro-batches is free, the largest are halved until the pipeline has no gap."""
    while True:
        try:
            return _schedule(pieces, engine)
        except CannotRun:
            largest = max(pieces, key=len)
            if len(largest) == 1:
                raise
        half = len(largest) // 2
        pieces = [piece for piece in pieces if piece is not largest] + [largest[:half], largest[half:]]


def _compute(rows: list[Row], engine: Engine, fill: Fill) -> int:
    """A pass that only computes; returns the number of data ranks. The last micro-batch may be short."""
    ranks = data_ranks(engine)
    budget = sum(fill.tokens for _ in range(engine.shares_a_row))
    for share in _share_for_compute(rows, ranks):
        if fill.dynamic:
            _filled(share, budget)
        elif fill.rows is None and max(row.tokens for row in share) > budget:
            raise CannotRun(f"not one row fits {budget} tokens")
    return ranks


def _share_for_compute(rows: list[Row], ranks: int) -> list[list[Row]]:
    """Rows dealt out in turn; ranks that get fewer repeat their last row, but a rank without any row has
    nothing to repeat."""
    shares = [rows[rank::ranks] for rank in range(ranks)]
    if not all(shares):
        raise CannotRun(f"{len(rows)} rows for {ranks} ranks")
    most = max(len(share) for share in shares)
    return [share + [share[-1]] * (most - len(share)) for share in shares]


def _equal_parts(items: list[T], parts: int, what: str) -> list[list[T]]:
    """Dealt out in turn; CannotRun where not everyone gets as many, or someone nothing."""
    dealt = [items[part::parts] for part in range(parts)]
    if len({len(part) for part in dealt}) != 1 or not dealt[0]:
        raise CannotRun(f"{len(items)} cannot be shared equally by {parts} {what}")
    return dealt
