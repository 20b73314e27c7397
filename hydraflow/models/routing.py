"""Routing replay: the experts of each token are recorded in one pass and replayed in another.

In: a column `routed_experts`. Out: the same indices in the order of a packed line, and back. A token whose
experts change between the pass for the old log-probabilities and the update looks as if the policy had moved.
With R2 (Zheng et al. 2025, arXiv:2507.18071) the experts are those of the pass before the update, with R3 (Ma
et al. 2025, arXiv:2510.11370) those of the generation engine; their weights are always the trained router's,
with a gradient. Left out on purpose: the routers themselves (`routers.py`, and Megatron-Core's).

Legend: B rows, N tokens of the line, n of them on this rank, E experts, K experts of a token, L layers with
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hydraflow.models.packing import PackedBatch, read_tokens
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

ROUTES = "routed_experts"
OWN_CHOICE = -1
"""Replaces an expert index: use the router's own choice."""


def stored_as(experts: int) -> torch.dtype:
    """Dtype of the column for layers with `experts` experts.

    >>> stored_as(128), stored_as(512)
    (torch.uint8, torch.int16)
    """
    return torch.uint8 if experts <= 256 else torch.int16


def on_line(routes: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """int16 (N, L, K) on the CPU: the rows' experts where their tokens are in the line."""
    experts, _ = ragged.parts(routes)
    line = torch.full((batch.input_ids.numel(), *experts.shape[1:]), OWN_CHOICE, dtype=torch.int16)
    line[batch.places] = experts.to(torch.int16)
    return line


def of_rows(
    micro_batches: Sequence[DataProto], lines: Sequence[tuple[torch.Tensor, PackedBatch]]
) -> torch.Tensor:
    """The column of all rows, from each line's experts (N, L, K)."""
    read = torch.cat(list(map(read_tokens, micro_batches)))
    return ragged.from_parts(torch.cat([line[batch.places] for line, batch in lines]), read)


@dataclass
class Tally:
    """Counts of asked tokens with prescribed experts, once per layer."""

    changed: torch.Tensor | float = 0.0
    """Tokens whose router would have chosen other experts."""
    replayed: torch.Tensor | float = 0.0
    """All tokens."""


@dataclass
class LineRoutes:
    """The experts of the tokens that a pass computes on this rank, by layer index."""

    given: dict[int, torch.Tensor] = field(default_factory=dict)
    """(n, K) experts to take, or OWN_CHOICE."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    """(n, K) experts that were chosen freely."""
    tally: Tally | None = None
    """None: nothing is counted."""
    asked: torch.Tensor | None = None
    """(n,) number of asked tokens that each token predicts, if they are counted."""
    counted: set[int] = field(default_factory=set)
    """Layers that have been counted; recomputation must not count twice."""


@dataclass(eq=False)
class RouterReplay:
    """Recording and replaying for one router."""

    layer: int = 0
    """Its number."""
    line: LineRoutes | None = None
    """The line that the router computes. None: it chooses freely."""

    def choose(
        self, scores: torch.Tensor, values: torch.Tensor, own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and indices of the selected experts, (n, K) each, from the scores (n, E) of all; the
        router's own choice is `own`, with scores `values`."""
        line = self.line
        if line is None:
            return values, own
        if self.layer not in line.given:
            line.chosen[self.layer] = own
            return values, own
        given = line.given[self.layer].long()
        taken = torch.where(given == OWN_CHOICE, own, given)
        if line.tally is not None and line.asked is not None and self.layer not in line.counted:
            line.counted.add(self.layer)
            differs = (taken.sort(-1).values != own.sort(-1).values).any(-1)
            line.tally.changed += (differs * line.asked).sum()
            line.tally.replayed += line.asked.sum()
        return scores.gather(1, taken), taken
