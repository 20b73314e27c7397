"""Ulysses sequence parallelism: neighbouring ranks share the tokens of their rows (Jacobs et al. 2023,
arXiv:2309.14509).

In: a packed batch, the same on all ranks of a group. Out: on each of them, what the model gives for all its
asked tokens. Each rank's layers see a slice of the line. Before attention an all-to-all turns slices with all
heads into the whole line with a share of the heads, and another one after it turns the result back. Targets
are chosen before the line is cut, so a token at the end of a slice is scored on the slice of the token before
it.

Every rank then computes the loss of whole rows, but its gradient flows through its own tokens only: FSDP's
sum over ranks counts each token once.

All-to-alls are counted like FSDP's collectives, in both directions, so that a rank whose memory ran out keeps
in step (`oom_recovery.py`). torch's differentiable all-to-all has no place for that.
Left out on purpose: the work of the head is not balanced over a group's ranks.

Legend: U ranks of a group, N tokens of the line, S = ceil(N / U) tokens of a slice, K asked tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hydraflow.batch_plan.parts import divisors
from hydraflow.engine.fsdp.oom_recovery import CollectiveCounter
from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import causal_class, packable
from hydraflow.models.packing import PackedBatch
from hydraflow.options import listed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY = "fsdp_config.ulysses_sequence_parallel_size"
"""Within the section of a role."""
Output = tuple[torch.Tensor, torch.Tensor | None]
"""One or two columns for the asked tokens of a batch, (K, ...) each."""


def require_shareable(
    config: PreTrainedConfig, model: ModelConfig, size: int, *, field: str, key: str = KEY
) -> None:
    """Raises ConfigError for a model whose rows `size` ranks cannot share. `field`: the key of `model`;
    `key`: that of the size."""
    if size == 1:
        return
    if not model.use_remove_padding:
        packs, rule = f"{field}.use_remove_padding", f"{key}={size} divides packed rows"
        raise ConfigError.one(packs, "false", rule, f"{packs}=true or {key}=1")
    if not packable(config, causal_class(config, model, field=field)):
        raise not_shareable(config, size, "more than plain attention mixes their tokens", key=key)
    heads = config.get_text_config().num_attention_heads
    if heads % size:
        legal = divisors(heads)
        rule = f"must divide the {heads} attention heads of the model: {listed(list(map(str, legal)))}"
        raise ConfigError.one(key, size, rule, f"{key}={max(n for n in legal if n < size)}")


def not_shareable(config: PreTrainedConfig, size: int, why: str, *, key: str = KEY) -> ConfigError:
    """Of a model whose rows cannot be packed."""
    rule = f"divides packed rows, and those of a {config.model_type} model cannot be packed: {why}"
    return ConfigError.one(key, size, rule, f"{key}=1")


@dataclass(frozen=True)
class Ulysses:
    """This rank among those that share the tokens of their rows."""

    group: dist.ProcessGroup
    collectives: CollectiveCounter | None = None
    """None: this rank does not catch up with the others if its memory runs out."""

    def compute(
        self, batch: PackedBatch, model: Callable[[PackedBatch], Output], real: PackedBatch | None = None
    ) -> Output:
        """What `model`, which is given this rank's slice, gives for all asked tokens of the batch.

        real: what the other ranks compute, where this one only stands in with a smaller batch; the results
        mean nothing then.
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
        main, more = model(part)
        whole = partial(self._whole, mine=mine, asked=len(batch.targets), real=len(real.targets))
        return whole(main), None if more is None else whole(more)

    def _whole(self, own: torch.Tensor, *, mine: torch.Tensor, asked: int, real: int) -> torch.Tensor:
        """(K, ...) from the numbers of all ranks, of which those at `mine` are this rank's. Only they carry a
        gradient."""
        found = own.new_zeros(asked, *own.shape[1:]).index_copy(0, mine, own.detach())
        summed = found if real == asked else own.new_zeros(real, *own.shape[1:])
        if self.is_due():
            dist.all_reduce(summed, group=self.group)
        return found.index_copy(0, mine, own)

    def is_due(self) -> bool:
        """Whether to make the next collective."""
        return self.collectives is None or self.collectives.is_due()


class _Slices:
    """A line in slices: the `TokenExchange` of one pass. real: tokens of the line that the other ranks
    have."""

    def __init__(self, ranks: Ulysses, line: int, real: int):
        self._ranks, self._size, self._line = ranks, ranks.group.size(), line
        self._real = -(-real // self._size)
        self.tokens = -(-line // self._size)
        """S."""

    def cut(self, column: torch.Tensor) -> torch.Tensor:
        """This rank's slice (1, S) of a column (1, N). What is missing at the end is 0 and nobody's."""
        filled = F.pad(column, (0, self._missing))
        return filled[:, self._ranks.group.rank() * self.tokens :][:, : self.tokens]

    def to_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `TokenExchange`. Heads of keys are repeated until each rank gets as many; which a head of
        queries needs stays the same, because the number of ranks divides those of queries."""
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
        """See `TokenExchange`."""
        filled = F.pad(out.flatten(1), (0, 0, 0, self._missing)).unflatten(0, (self._size, self.tokens))
        heads = _Exchange.apply(filled, self).unflatten(2, out.shape[1:])  # (U, S, h / U, d)
        return heads.transpose(0, 1).flatten(1, 2)

    def exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """x (U, S, f): part u is for rank u, and comes from rank u."""
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
    """An exchange is its own way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slices: _Slices) -> torch.Tensor:
        ctx.slices = slices
        return slices.exchanged(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.slices.exchanged(grads[0]), None
