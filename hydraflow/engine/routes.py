"""Routing replay on the ranks of a training engine, each of which computes some tokens or layers of a line.

In: packed lines, optionally with the experts that their tokens must take. Out: the column `routed_experts`,
gathered from ranks that have a share of a line's tokens, or some of its layers. Left out on purpose: routers
(`models/routing.py`).

Legend: n tokens of this rank's share, N tokens of the line, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hydraflow.engine import process_group
from hydraflow.metrics import Metric, mean
from hydraflow.models import routing
from hydraflow.models.packing import PackedBatch
from hydraflow.models.routing import LineRoutes, Tally
from hydraflow.protocol.batch import DataProto


@dataclass(kw_only=True)
class PackedRoutes(LineRoutes):
    """The experts of a packed line, and of this rank's share of it."""

    batch: PackedBatch
    """All of the line."""
    own: slice
    """This rank's share of it."""


@dataclass(frozen=True)
class Routes:
    """Records and replays experts on one rank."""

    layers: Sequence[int]
    """Numbers of all layers with experts, including those on other ranks."""
    experts: int
    """Number of experts of a layer."""
    chosen: int
    """K."""
    device: torch.device
    part: int = 0
    """Index of this rank's share of each line."""
    parts: int = 1
    """Number of equal shares of a line; the last ones may be shorter."""
    groups: Sequence[dist.ProcessGroup] = ()
    """Process groups of the ranks that compute a line together; summing over one after the other sums over
    all ranks."""

    def share_of(self, tokens: int) -> slice:
        """This rank's slice of a line of that many tokens; it may end beyond the line."""
        size = -(-tokens // self.parts)
        return slice(self.part * size, (self.part + 1) * size)

    def begin(
        self, batch: PackedBatch, given: torch.Tensor | None, tally: Tally | None = None
    ) -> PackedRoutes:
        """Starts a line. given: its rows' `routed_experts`; None: record them."""
        size = batch.input_ids.numel()
        own = self.share_of(size)
        missing = own.stop - own.start - len(range(size)[own])
        found = PackedRoutes(batch=batch, own=own, tally=tally)
        if given is not None:
            experts = routing.on_line(given, batch)[own]
            assert experts.shape[1:] == (len(self.layers), self.chosen), "experts of a different model"
            filled = F.pad(experts, (0, 0, 0, 0, 0, missing), value=routing.OWN_CHOICE).to(self.device)
            found.given = dict(zip(self.layers, filled.unbind(1), strict=True))
        if tally is not None:
            found.asked = F.pad(torch.bincount(batch.predicts_at, minlength=size)[own], (0, missing))
        return found

    def column(self, micro_batches: Sequence[DataProto], recorded: Sequence[PackedRoutes]) -> torch.Tensor:
        """`routed_experts` of the rows, on all ranks that computed their lines; collective."""
        lines = [(self._gathered(line), line.batch) for line in recorded]
        return routing.of_rows(micro_batches, lines)

    def changed_share(self, tally: Tally) -> Metric:
        """Share of tokens whose replayed experts differ from the router's choice: a mean over layers and over
        the data rank's requested tokens. Collective."""
        counts = torch.tensor([float(tally.changed), float(tally.replayed)], dtype=torch.float64)
        for group in self.groups:
            counts = process_group.all_reduce(counts, "sum", group)
        changed, replayed = counts.tolist()
        return mean(changed / replayed if replayed else 0.0, weight=replayed)

    def _gathered(self, line: PackedRoutes) -> torch.Tensor:
        """(N, L, K) on the CPU. Each number is written by one rank and is 0 on all others, so they are
        summed."""
        shape = line.batch.input_ids.numel(), len(self.layers), self.chosen
        whole = torch.zeros(shape, dtype=routing.stored_as(self.experts), device=self.device)
        here = whole[line.own]
        for at, layer in enumerate(self.layers):
            if layer in line.chosen:
                here[:, at] = line.chosen[layer][: len(here)].to(whole.dtype)
        for group in self.groups:
            # as bytes, because NCCL has no int16; nothing carries, since all ranks but one have 0
            dist.all_reduce(whole.view(torch.uint8), group=group)
        return whole.cpu()
