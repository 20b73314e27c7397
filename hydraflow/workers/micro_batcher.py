"""Cuts the rows of one kind of pass into micro-batches: as planned, and smaller ones after an out-of-memory
error.

In: rows, and a function of their micro-batches. Out: its result. The size that fits is kept for the rest of
the run. It changes on all data ranks alike, because every pass is a collective: all ranks need the same
number of passes, whichever rank ran out of memory. Left out on purpose: growing again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.engine.base import OomReport, OutOfMemory, TrainEngine
from hydraflow.engine.micro_batches import MicroBatches, row_tokens, split_rows, split_tokens
from hydraflow.errors import DoesNotFit
from hydraflow.protocol.batch import DataProto

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


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
                " model.enable_gradient_checkpointing=true, fsdp_config.param_offload=true, a smaller"
                " fsdp_config.head_chunk_tokens, more devices."
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
    return replace(cut, parts=list(map(without_dead_rows, cut.parts))) if "live" in batch.keys() else cut


def without_dead_rows(rows: DataProto) -> DataProto:
    """Only the rows that `live` says; one dead row where there is no other, because a pass is a
    collective."""
    if "live" not in rows.keys():
        return rows
    live = rows.get("live")
    return rows.select_idxs(live if bool(live.any()) else [0]).select(
        [name for name in rows.keys() if name != "live"]
    )
