"""Cuts the rows of one kind of pass into micro-batches: a fixed number of rows each, or as many as a token
budget holds; smaller ones after an out-of-memory error.

In: rows with ragged prompts and responses, and a function of their micro-batches. Out: its result. The size
that fits is kept for the rest of the run. It changes on all data ranks alike, because every pass is a
collective: all ranks need the same number of passes, whichever rank ran out of memory. Left out on purpose:
growing again, the sizes themselves (`batch_plan`), a micro-batch as the model reads it (`models/packing.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.engine.base import OomReport, OutOfMemory, TrainEngine
from hydraflow.errors import DoesNotFit
from hydraflow.models.packing import row_tokens
from hydraflow.protocol.balance import token_bins
from hydraflow.protocol.batch import DataProto

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class MicroBatches:
    """Parts of a batch, and where their rows came from."""

    parts: list[DataProto]
    """At least one row each."""
    order: np.ndarray
    """(B,) row of the batch for each row of the parts, one part after the other."""

    def restore(self, rows: DataProto) -> DataProto:
        """Reorders rows from the parts' order to the batch's."""
        if bool((self.order[:-1] < self.order[1:]).all()):
            return rows
        return rows.select_idxs(np.argsort(self.order))


class MicroBatcher:
    """The micro-batches of one kind of pass; `what` names it in messages, as in "update of the actor"."""

    def __init__(self, plan: MicroPlan, what: str):
        self.plan, self.what = plan, what
        self._planned = plan
        self._splits = 0

    def work(
        self, engine: TrainEngine, rows: DataProto, passes: Callable[[Sequence[DataProto]], Result]
    ) -> tuple[Result, MicroBatches]:
        """Runs `passes` over the micro-batches of these rows; over smaller ones again if memory runs out.
        Returns the result and the micro-batches.

        Raises DoesNotFit, on every rank, when a single row does not fit.
        """
        while True:
            micro = split(engine, rows, self._fitting(rows))
            try:
                return passes(micro.parts), micro
            except OutOfMemory as error:
                reports = error.reports  # not the error: its frames keep the passes' tensors alive
            self._make_smaller(engine, rows, reports)

    def take_splits(self) -> int:
        """Number of splits since the last call; the same on every rank."""
        splits, self._splits = self._splits, 0
        return splits

    def _fitting(self, rows: DataProto) -> MicroPlan:
        """The current size; a row longer than the remembered number of tokens is a micro-batch of its own."""
        if self.plan is self._planned or self.plan.max_tokens is None:
            return self.plan
        return MicroPlan(rows=None, max_tokens=max(self.plan.max_tokens, int(row_tokens(rows).max())))

    def _make_smaller(self, engine: TrainEngine, rows: DataProto, reports: Sequence[OomReport]) -> None:
        alone = next((report for report in reports if report.rows == 1), None)
        if alone is not None:
            raise DoesNotFit(
                f"{self.what}: rank {alone.rank} has no memory for a single row of {alone.tokens} tokens."
                " What makes room: fewer tokens (data.max_prompt_length, data.max_response_length),"
                " model.enable_gradient_checkpointing=true, fsdp_config.offload_policy=true, a smaller"
                " fsdp_config.head_chunk_tokens, more devices, also for each row"
                " (fsdp_config.ulysses_sequence_parallel_size)."
            )
        self.plan = self._half(engine, rows, max(report.tokens for report in reports))
        self._splits += 1
        found = "; ".join(map(str, reports))
        unit = "row" if self.plan.max_tokens is None else "token"
        logger.warning(
            "%s: %s; micro-batches of up to %d %ss from now on",
            self.what,
            found,
            self.plan.rows or self.plan.max_tokens,
            unit,
        )

    def _half(self, engine: TrainEngine, rows: DataProto, tokens: int) -> MicroPlan:
        """`tokens`: size of the largest micro-batch that did not fit."""
        if self.plan.rows is not None:
            return MicroPlan(rows=-(-min(self.plan.rows, len(rows)) // 2), max_tokens=None)
        assert self.plan.max_tokens is not None, "a micro-batch plan counts rows or tokens"
        too_many = min(self.plan.max_tokens, tokens)
        longest = int(engine.reduce(torch.tensor([float(row_tokens(rows).max())]), "max"))
        fewer = max(-(-too_many // 2), longest)
        return (
            MicroPlan(rows=None, max_tokens=fewer) if fewer < too_many else MicroPlan(rows=1, max_tokens=None)
        )


def split(engine: TrainEngine, batch: DataProto, micro: MicroPlan) -> MicroBatches:
    """Micro-batches as planned, the same number on every data rank, without the dead rows that they can do
    without."""
    if micro.rows is not None:
        cut = split_rows(batch, micro.rows)
    else:
        assert micro.max_tokens is not None, "a micro-batch plan counts rows or tokens"
        cut = split_tokens(batch, micro.max_tokens, lambda values: engine.reduce(values, "max"))
    return replace(cut, parts=list(map(_at_least_one, cut.parts))) if "live" in batch.keys() else cut


def live_rows(rows: DataProto) -> DataProto:
    """The rows that are not dead, perhaps none."""
    if "live" not in rows.keys():
        return rows
    return rows.select_idxs(rows.get("live")).select([name for name in rows.keys() if name != "live"])


def _at_least_one(rows: DataProto) -> DataProto:
    """The live rows, or one dead row where there are none, because a pass is a collective."""
    if bool(rows.get("live").any()):
        return live_rows(rows)
    return rows.select_idxs([0]).select([name for name in rows.keys() if name != "live"])


def split_rows(data: DataProto, size: int) -> MicroBatches:
    """Micro-batches of `size` rows in order; the last may have fewer. Ranks with the same number of
    rows get the same number of parts."""
    assert size >= 1, size
    order = np.arange(len(data))
    if size >= len(data):
        return MicroBatches([data], order)
    return MicroBatches(
        [data.slice(first, min(first + size, len(data))) for first in range(0, len(data), size)], order
    )


def split_tokens(
    data: DataProto, max_tokens: int, reduce_max: Callable[[torch.Tensor], torch.Tensor]
) -> MicroBatches:
    """Micro-batches of at most `max_tokens` tokens each, prompts and responses together.

    `reduce_max` gives the largest value over data ranks: all get the number of parts of the rank that needs
    the most, because every forward pass is a collective. Raises ValueError for a row that is longer than the
    budget."""
    lengths = row_tokens(data).numpy()
    needed = len(token_bins(lengths, max_tokens))
    agreed = int(reduce_max(torch.tensor([float(needed)])))
    bins = token_bins(lengths, max_tokens, min_bins=agreed)
    assert len(bins) == agreed, (
        f"{len(data)} rows cannot be split into {agreed} micro-batches: ranks hold different numbers of rows"
    )
    if agreed == 1:
        return MicroBatches([data], np.arange(len(data)))
    rows = [np.sort(np.asarray(chosen)) for chosen in bins]
    return MicroBatches([data.select_idxs(chosen) for chosen in rows], np.concatenate(rows))
