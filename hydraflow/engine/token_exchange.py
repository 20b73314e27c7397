"""Ulysses sequence parallelism: neighbouring ranks share the tokens of their rows (Jacobs et al. 2023,
arXiv:2309.14509).

In: a packed batch, the same on all ranks of a group. Out: on each of them, the model's output for all
requested tokens. Each rank's layers see a slice of the line. Before attention an all-to-all turns slices with
all heads into the whole line with a share of the heads; another one after attention reverses this. Targets
are selected before the line is cut, so a slice's first token is scored by the rank of the preceding slice.

Every rank then computes the loss of whole rows, but its gradient flows through its own tokens only: the sum
of gradients over ranks counts each token once.

All-to-alls can be counted like FSDP's collectives, in both directions, so that a rank that ran out of memory
stays in step (`fsdp/oom_recovery.py`). torch's differentiable all-to-all has no hook for that.
Left out on purpose: balancing the head's work over a group's ranks.

Legend: U ranks of a group, N tokens of the line, S = ceil(N / U) tokens of a slice, K requested tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hydraflow.models.packing import PackedBatch

Output = tuple[torch.Tensor, torch.Tensor | None]
"""One or two columns for the requested tokens of a batch, (K, ...) each."""


@dataclass(frozen=True)
class Ulysses:
    """This rank in a group that shares the tokens of rows."""

    group: dist.ProcessGroup
    is_due: Callable[[], bool] = lambda: True
    """Whether to make the next collective; a rank that ran out of memory skips those that it made before."""

    def compute(
        self, batch: PackedBatch, model: Callable[[PackedBatch], Output], real: PackedBatch | None = None
    ) -> Output:
        """Runs `model` on this rank's slice; returns the output for all requested tokens of the batch."""
        share = self.share(batch, real)
        return share.whole(model(share.part))

    def share(self, batch: PackedBatch, real: PackedBatch | None = None) -> Share:
        """This rank's slice of a batch.

        real: the batch that the other ranks compute, if this rank only takes part with a smaller one; its
        results are then meaningless.
        """
        assert batch.plan is not None, "padded rows are not shared"
        real = batch if real is None else real
        slices = _Slices(self, batch.input_ids.numel(), real.input_ids.numel())
        start = self.group.rank() * slices.tokens
        at = batch.predicts_at - start
        mine = ((at >= 0) & (at < slices.tokens)).nonzero()[:, 0]
        part = replace(
            batch,
            input_ids=slices.cut(batch.input_ids),
            position_ids=slices.cut(batch.position_ids),
            plan=replace(batch.plan, exchange=slices),
            predicts_at=at[mine],
            targets=batch.targets[mine],
            cells=batch.cells[mine],
        )
        return Share(self, part, mine, len(batch.targets), len(real.targets))


@dataclass(frozen=True)
class Share:
    """A rank's slice of a batch."""

    ranks: Ulysses
    part: PackedBatch
    """What the model computes here."""
    mine: torch.Tensor
    """Indices of the requested tokens that it predicts."""
    asked: int
    """K."""
    real: int
    """K of the batch that the other ranks compute."""

    def whole(self, output: Output) -> Output:
        """The model's output for all requested tokens, from its output for the slice."""
        main, more = output
        return self._whole(main), None if more is None else self._whole(more)

    def _whole(self, own: torch.Tensor) -> torch.Tensor:
        """(K, ...) from the numbers of all ranks; this rank's are those at `mine`, and only they carry a
        gradient."""
        found = own.new_zeros(self.asked, *own.shape[1:]).index_copy(0, self.mine, own.detach())
        # a rank with a smaller batch sends zeros in the size that the others expect; allocated before the
        # collective is counted, because it may run out of memory
        summed = found if self.real == self.asked else own.new_zeros(self.real, *own.shape[1:])
        if self.ranks.is_due():
            dist.all_reduce(summed, group=self.ranks.group)
        return found.index_copy(0, self.mine, own)


@dataclass(frozen=True)
class Alone:
    """The share of a rank that has whole lines."""

    part: PackedBatch

    def whole(self, output: Output) -> Output:
        """The output itself, which already has all of its lines' tokens."""
        return output


class _Slices:
    """A line in slices: the `TokenExchange` of one pass. real: length of the line that the other ranks
    compute."""

    def __init__(self, ranks: Ulysses, line: int, real: int):
        self._ranks, self._size, self._line = ranks, ranks.group.size(), line
        self._real = -(-real // self._size)
        self.tokens = -(-line // self._size)
        """S."""

    def cut(self, column: torch.Tensor) -> torch.Tensor:
        """This rank's slice (1, S) of a column (1, N). It is padded with 0 beyond the end of the line."""
        filled = F.pad(column, (0, self._missing))
        return filled[:, self._ranks.group.rank() * self.tokens :][:, : self.tokens]

    def to_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `TokenExchange`. Key-value heads are repeated until they divide evenly among ranks; each query
        head still meets its own key head, because the number of ranks divides that of query heads."""
        if q.shape[1] % self._size:
            raise ValueError(f"{q.shape[1]} attention heads cannot be divided among {self._size} devices")
        repeats = self._size // gcd(self._size, k.shape[1])
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        shares = [x.unflatten(1, (self._size, -1)).transpose(0, 1).flatten(2) for x in (q, k, v)]
        line = _Exchange.apply(torch.cat(shares, 2), self).flatten(0, 1)[: self._line]
        found = line.split([share.shape[2] for share in shares], 1)
        return tuple(x.unflatten(1, (-1, like.shape[2])) for x, like in zip(found, (q, k, v), strict=True))

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        filled = F.pad(out.flatten(1), (0, 0, 0, self._missing)).unflatten(0, (self._size, self.tokens))
        heads = _Exchange.apply(filled, self).unflatten(2, out.shape[1:])  # (U, S, h / U, d)
        return heads.transpose(0, 1).flatten(1, 2)

    def exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """x (U, S, f) to the same shape: part u goes to rank u, and is replaced by rank u's."""
        # as in `Share._whole`: zeros of the expected size, allocated before the collective is counted
        sent = x.contiguous() if self._real == self.tokens else x.new_zeros(len(x), self._real, x.shape[2])
        received = torch.empty_like(sent)
        if not self._ranks.is_due():
            return torch.zeros_like(x)
        dist.all_to_all_single(received, sent, group=self._ranks.group)
        return received if self._real == self.tokens else torch.zeros_like(x)

    @property
    def _missing(self) -> int:
        """Tokens that fill up the last slices."""
        return self._size * self.tokens - self._line


class _Exchange(torch.autograd.Function):
    """An exchange is its own inverse, so its backward pass is another exchange."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slices: _Slices) -> torch.Tensor:
        ctx.slices = slices
        return slices.exchanged(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.slices.exchanged(grads[0]), None
