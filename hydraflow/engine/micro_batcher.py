"""Runs passes over any number of rows in micro-batches: a fixed number of rows each, or as many as fit a
token budget; split further after an out-of-memory error.

In: rows with ragged prompts and responses. Out: an engine's results for their micro-batches. The reduced size
is kept for the rest of the run. It changes on all data ranks alike, because every pass is a collective: all
ranks need the same number of passes, whichever rank ran out of memory. An engine that cannot resynchronise
its ranks after such an error lets it propagate. Left out on purpose: increasing the size again, choosing it
(`batch_plan`), packing a micro-batch for the model (`models/packing.py`).
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.engine.base import LossFn, OomReport, OutOfMemory, TrainEngine
from hydraflow.errors import DoesNotFit
from hydraflow.metrics import Metric
from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.models.packing import row_tokens
from hydraflow.protocol.balance import token_bins
from hydraflow.protocol.batch import DataProto

logger = logging.getLogger(__name__)
Reduce = Callable[[torch.Tensor, str], torch.Tensor]
"""`TrainEngine.reduce`."""
ReduceMax = Callable[[torch.Tensor], torch.Tensor]
"""The largest value over data ranks."""


@dataclass(frozen=True)
class MicroBatches:
    """Parts of a batch, and which of its rows they hold."""

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

    def cut(self, rows: DataProto, reduce: Reduce) -> MicroBatches:
        """Micro-batches of the current size, the same number on every data rank, with dead rows dropped where
        possible."""
        size = self._fitting(rows)
        if size.whole_groups:
            found = split_groups(rows, size, lambda own: reduce(own, "max"))
        elif size.rows is not None:
            found = split_rows(rows, size.rows)
        else:
            assert size.max_tokens is not None, "a micro-batch plan counts rows or tokens"
            found = split_tokens(rows, size.max_tokens, lambda own: reduce(own, "max"), unit=size.unit)
        if "live" not in rows.keys():
            return found
        return replace(found, parts=list(map(_at_least_one, found.parts)))

    def take_splits(self) -> int:
        """Number of splits since the last call; the same on every rank."""
        splits, self._splits = self._splits, 0
        return splits

    def _fitting(self, rows: DataProto) -> MicroPlan:
        """The current size; a row longer than the reduced token budget gets its own micro-batch."""
        if self.plan is self._planned or self.plan.max_tokens is None:
            return self.plan
        longest = int(unit_tokens(rows, self.plan.unit).max())
        return replace(self.plan, max_tokens=max(self.plan.max_tokens, longest))

    def make_smaller(self, rows: DataProto, reports: Sequence[OomReport], reduce: Reduce) -> None:
        """Halves the size after micro-batches of these rows were too large. Raises DoesNotFit, on every rank,
        when a single row was."""
        alone = next((report for report in reports if report.rows <= self.plan.unit), None)
        if alone is not None:
            least = "row" if self.plan.unit == 1 else "pair"
            raise DoesNotFit(
                f"{self.what}: rank {alone.rank} has no memory for a single {least} of {alone.tokens} tokens."
                " To save memory: fewer tokens (data.max_prompt_length, data.max_response_length),"
                " model.enable_gradient_checkpointing=true, fsdp_config.offload_policy=true, a smaller"
                " head_chunk_tokens of the engine, more devices, or more devices per row"
                " (fsdp_config.ulysses_sequence_parallel_size, megatron.context_parallel_size)."
            )
        self.plan = self._half(rows, max(report.tokens for report in reports), reduce)
        self._splits += 1
        logger.warning(
            "%s: %s; micro-batches of up to %d %s from now on",
            self.what,
            "; ".join(map(str, reports)),
            self.plan.rows or self.plan.max_tokens,
            "rows" if self.plan.max_tokens is None else "tokens",
        )

    def _half(self, rows: DataProto, tokens: int, reduce: Reduce) -> MicroPlan:
        """Half the size that was too large. tokens: of the largest micro-batch that did not fit."""
        unit = self.plan.unit
        if self.plan.rows is not None:
            units = min(self.plan.rows, len(rows)) // unit
            return replace(self.plan, rows=-(-units // 2) * unit)
        assert self.plan.max_tokens is not None, "a micro-batch plan counts rows or tokens"
        too_many = min(self.plan.max_tokens, tokens)
        longest = int(reduce(torch.tensor([float(unit_tokens(rows, unit).max())]), "max"))
        fewer = max(-(-too_many // 2), longest)
        if fewer < too_many:
            return replace(self.plan, max_tokens=fewer)
        return replace(self.plan, rows=unit, max_tokens=None)


class InMicroBatches:
    """Mixin of engines: passes over any number of rows, see `TrainEngine`."""

    def forward_rows(
        self: TrainEngine,
        rows: DataProto,
        micro_batcher: MicroBatcher,
        ask: Ask = LOG_PROBS,
        *,
        adapter: bool = True,
    ) -> DataProto:
        while True:
            micro = micro_batcher.cut(rows, self.reduce)
            try:
                return micro.restore(self.forward(micro.parts, ask, adapter=adapter))
            except OutOfMemory as error:
                reports = error.reports  # not the error: its frames keep the passes' tensors alive
            micro_batcher.make_smaller(rows, reports, self.reduce)

    def forward_backward_rows(
        self: TrainEngine,
        rows: DataProto,
        micro_batcher: MicroBatcher,
        loss_fn: LossFn,
        ask: Ask = LOG_PROBS,
    ) -> dict[str, Metric]:
        while True:
            micro = micro_batcher.cut(rows, self.reduce)
            try:
                return self.forward_backward(micro.parts, loss_fn, ask)
            except OutOfMemory as error:
                reports = error.reports
            micro_batcher.make_smaller(rows, reports, self.reduce)


def live_rows(rows: DataProto) -> DataProto:
    """The rows that are not dead; may be empty."""
    if "live" not in rows.keys():
        return rows
    return rows.select_idxs(rows.get("live")).select([name for name in rows.keys() if name != "live"])


def _at_least_one(rows: DataProto) -> DataProto:
    """The live rows, or one dead row if there are none, because a pass is a collective."""
    if bool(rows.get("live").any()):
        return live_rows(rows)
    return rows.select_idxs([0]).select([name for name in rows.keys() if name != "live"])


def split_rows(data: DataProto, size: int) -> MicroBatches:
    """Micro-batches of `size` rows in order; the last may have fewer. Ranks with the same number of
    rows get the same number of parts."""
    order = np.arange(len(data))
    if size >= len(data):
        return MicroBatches([data], order)
    return MicroBatches(data.split(size), order)


def unit_tokens(data: DataProto, unit: int) -> torch.Tensor:
    """Tokens of each `unit` neighbouring rows together: int64 (B / unit,)."""
    return row_tokens(data).view(-1, unit).sum(1)


def split_tokens(data: DataProto, max_tokens: int, reduce_max: ReduceMax, *, unit: int = 1) -> MicroBatches:
    """Micro-batches of at most `max_tokens` tokens each, prompts and responses together; each `unit`
    neighbouring rows stay together.

    All ranks make as many parts as the rank that needs most, because every forward pass is a collective.
    Raises ValueError for a row that exceeds the budget."""
    units = list(np.arange(len(data)).reshape(-1, unit))
    tokens = unit_tokens(data, unit).numpy()
    agreed = _agreed(len(token_bins(tokens, max_tokens)), reduce_max)
    return _in_bins(data, units, token_bins(tokens, max_tokens, min_bins=agreed), agreed)


def split_groups(data: DataProto, size: MicroPlan, reduce_max: ReduceMax) -> MicroBatches:
    """Micro-batches of neighbouring rows with the same `group`, at most `size.rows` rows or `size.max_tokens`
    tokens each; dead rows count nothing. A group is divided only if it alone exceeds that, or if another rank
    makes more micro-batches than this one has groups."""
    limit = size.max_tokens if size.rows is None else size.rows
    assert limit is not None, "a micro-batch plan counts rows or tokens"
    costs = row_tokens(data).numpy() if size.rows is None else np.ones(len(data), dtype=np.int64)
    group, live = data.get("group").numpy(), np.ones(len(data), dtype=bool)
    if "live" in data.keys():
        live = data.get("live").numpy()
        costs = costs * live
    starts = 1 + np.flatnonzero((group[1:] != group[:-1]) | (live[1:] != live[:-1]))
    units = _divided(np.split(np.arange(len(data)), starts), costs, most=limit)
    agreed = _agreed(len(token_bins(_totals(units, costs), limit)), reduce_max)
    units = _divided(units, costs, least=agreed)
    bins = token_bins(_totals(units, costs), limit, min_bins=agreed)
    return _in_bins(data, units, bins, agreed)


def _totals(units: Sequence[np.ndarray], costs: np.ndarray) -> list[int]:
    return [int(costs[unit].sum()) for unit in units]


def _agreed(needed: int, reduce_max: ReduceMax) -> int:
    """The largest number of micro-batches that a rank needs."""
    return int(reduce_max(torch.tensor([float(needed)])))


def _divided(
    units: Sequence[np.ndarray], costs: np.ndarray, *, most: float = math.inf, least: int = 0
) -> list[np.ndarray]:
    """The units, in order, the costliest halved until none of several rows costs more than `most` and there
    are `least`."""
    heap = [(-int(costs[unit].sum()), int(unit[0]), unit) for unit in units]
    heapq.heapify(heap)
    rows: list[np.ndarray] = []
    while heap and (-heap[0][0] > most or len(heap) + len(rows) < least):
        unit = heapq.heappop(heap)[2]
        if len(unit) == 1:
            rows.append(unit)
            continue
        for part in np.array_split(unit, 2):
            heapq.heappush(heap, (-int(costs[part].sum()), int(part[0]), part))
    return sorted([*rows, *(unit for _, _, unit in heap)], key=lambda unit: int(unit[0]))


def _in_bins(
    data: DataProto, units: Sequence[np.ndarray], bins: Sequence[Sequence[int]], agreed: int
) -> MicroBatches:
    """A micro-batch of each bin's units of neighbouring rows."""
    assert len(bins) == agreed, (
        f"{len(data)} rows cannot be split into {agreed} micro-batches: ranks hold different numbers of rows"
    )
    if agreed == 1:
        return MicroBatches([data], np.arange(len(data)))
    rows = [np.concatenate([units[number] for number in chosen]) for chosen in bins]
    return MicroBatches([data.select_idxs(chosen) for chosen in rows], np.concatenate(rows))
