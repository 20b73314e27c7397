"""The batch plan of supervised training: the smaller sister of `batch_plan.py`, and like it a reader of batch-size keys.

In: the configuration, how many processes and conversations there are. Out: one `SFTPlan`, or one `ConfigError` with every
broken rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from hydraflow.batch_plan_parts import (
    MicroRequest,
    Quantity,
    RolePlan,
    nearest,
    not_positive,
    options,
    provenance,
    warmup_problems,
    warmup_steps,
)
from hydraflow.errors import ConfigError, Problem
from hydraflow.schema import SFTConfig

_BATCH = "data.train_batch_size"


@dataclass(frozen=True)
class SFTPlan:
    """Every number that supervised training takes from the batch-size keys."""

    conversations_per_step: int
    """Conversations in one optimizer step, over all data ranks; a training step is one optimizer step."""
    role: RolePlan
    """How the model's update cuts them; a conversation is a prompt with one response."""
    steps_per_epoch: int
    """Whole batches in one pass over the data; 0: the number of conversations is not known."""
    total_steps: int
    """Training steps of the run; 0: not known."""
    quantities: tuple[Quantity, ...]
    """All of it again for people: unit, formula, provenance."""
    notes: tuple[str, ...]
    """Keys that were given and have no effect."""

    def to_json(self) -> str:
        """The content of `plan.json`."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


@dataclass(frozen=True)
class _Request:
    config: SFTConfig
    processes: int
    conversations: int | None
    micro: MicroRequest

    @property
    def batch(self) -> int:
        return self.config.data.train_batch_size

    @property
    def steps_per_epoch(self) -> int:
        return (self.conversations or 0) // self.batch

    @property
    def total_steps(self) -> int:
        return self.config.trainer.total_training_steps or self.steps_per_epoch * self.config.trainer.total_epochs


def resolve_sft_plan(config: SFTConfig, *, processes: int, conversations: int | None, given: Collection[str] = ()) -> SFTPlan:
    """The plan of a run on `processes` devices over so many training conversations (None: not known yet).

    Raises ConfigError with all broken rules and the nearest legal values.

    >>> config = SFTConfig()
    >>> config.data.train_batch_size = 8
    >>> plan = resolve_sft_plan(config, processes=2, conversations=100)
    >>> plan.role.rows_per_rank, plan.total_steps
    (4, 12)
    """
    if problems := not_positive(_sizes(config)):
        raise ConfigError(problems)
    request = _Request(config, processes, conversations, _read_micro(config))
    if problems := [problem for rule in RULES for problem in rule(request)]:
        raise ConfigError(problems)
    return _plan(request, given)


def _sizes(config: SFTConfig) -> list[tuple[str, int | None]]:
    data, trainer = config.data, config.trainer
    return [
        (_BATCH, data.train_batch_size),
        ("data.micro_batch_size_per_gpu", data.micro_batch_size_per_gpu),
        ("data.max_token_len_per_gpu", data.max_token_len_per_gpu),
        ("data.max_length", data.max_length),
        ("trainer.total_epochs", trainer.total_epochs),
        ("trainer.total_training_steps", trainer.total_training_steps),
    ]


def _read_micro(config: SFTConfig) -> MicroRequest:
    return MicroRequest(
        purpose="the update",
        rows=config.data.micro_batch_size_per_gpu,
        rows_key="data.micro_batch_size_per_gpu",
        dynamic=config.data.use_dynamic_bsz,
        max_tokens=config.data.max_token_len_per_gpu,
        tokens_key="data.max_token_len_per_gpu",
        switch_key="data.use_dynamic_bsz",
    )


def _ranks_share_the_batch(request: _Request) -> Iterator[Problem]:
    if request.batch % request.processes == 0:
        return
    multiples = [request.processes * k for k in range(1, request.batch // request.processes + 2)]
    yield Problem(
        _BATCH,
        request.batch,
        f"conversations cannot be shared equally by {request.processes} data ranks",
        options(_BATCH, nearest(request.batch, multiples)),
    )


def _micro_batches_fill_a_rank(request: _Request) -> Iterator[Problem]:
    rows, left = divmod(request.batch, request.processes)
    if left == 0:
        yield from request.micro.divisor_problems(rows, f"{request.batch}/{request.processes}")


def _token_budget_holds_a_row(request: _Request) -> Iterator[Problem]:
    yield from request.micro.token_budget_problems(request.config.data.max_length, "data.max_length")


def _conversations_make_a_step(request: _Request) -> Iterator[Problem]:
    if request.conversations is None or request.conversations >= request.batch:
        return
    rule = f"is more than the {request.conversations} training conversations that there are, so no step can be taken"
    largest = request.conversations // request.processes * request.processes
    yield Problem(_BATCH, request.batch, rule, f"{_BATCH}={largest}" if largest else "more data, or fewer processes")


def _warmup_ends(request: _Request) -> Iterator[Problem]:
    yield from warmup_problems(request.config.optim, "optim", request.total_steps)


RULES: list[Callable[[_Request], Iterator[Problem]]] = [
    _ranks_share_the_batch,
    _micro_batches_fill_a_rank,
    _token_budget_holds_a_row,
    _conversations_make_a_step,
    _warmup_ends,
]


def _plan(request: _Request, given: Collection[str]) -> SFTPlan:
    rows = request.batch // request.processes
    micro = request.micro.plan(rows_per_rank=rows, row_tokens=request.config.data.max_length, exact=True)
    role = RolePlan(
        data_ranks=request.processes,
        mini_batch_prompts=request.batch,
        mini_batch_trajectories=request.batch,
        rows_per_rank=rows,
        epochs=1,
        shuffle=False,
        micro=micro,
        optimizer_steps_per_step=1,
        warmup_steps=warmup_steps(request.config.optim, request.total_steps),
    )
    return SFTPlan(
        conversations_per_step=request.batch,
        role=role,
        steps_per_epoch=request.steps_per_epoch,
        total_steps=request.total_steps,
        quantities=tuple(_quantities(request, role, given)),
        notes=tuple(request.micro.notes()),
    )


def _quantities(request: _Request, role: RolePlan, given: Collection[str]) -> Iterator[Quantity]:
    origin = partial(provenance, request.config, SFTConfig(), given=given)
    batch, dp, trainer = request.batch, request.processes, request.config.trainer
    yield Quantity("conversations per step", "conversations", batch, "", origin(key=_BATCH))
    yield Quantity("data ranks dp", "processes", dp, "one per process", "derived")
    yield Quantity("rows per data rank", "conversations", role.rows_per_rank, f"{batch}/{dp}", "derived")
    yield request.micro.quantity(role.micro, origin(key=request.micro.deciding_key))
    if request.conversations is not None:
        formula = f"⌊{request.conversations}/{batch}⌋"
        yield Quantity("steps per epoch", "steps", request.steps_per_epoch, formula, "derived")
    if trainer.total_training_steps is not None:
        yield Quantity("training steps", "steps", trainer.total_training_steps, "", origin(key="trainer.total_training_steps"))
    elif request.total_steps:
        formula = f"steps per epoch · epochs = {request.steps_per_epoch}·{trainer.total_epochs}"
        yield Quantity("training steps", "steps", request.total_steps, formula, "derived")
    if role.warmup_steps:
        yield Quantity("warm-up", "steps", role.warmup_steps, "", "derived")
