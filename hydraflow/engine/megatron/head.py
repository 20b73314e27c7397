"""Vocabulary-parallel head: log-probabilities and entropies with a shard of the vocabulary on each rank.

In: hidden states and ids of the requested tokens, and this rank's rows of the output matrix. Out: the results
of `models/fused_head.py`, equal on all ranks, and gradients. Logits are never gathered: ranks exchange three
or four numbers per token. Logits exist for one chunk of tokens at a time and are recomputed in the backward
pass. Left out on purpose: post-processing of logits (no supported family has any).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hydraflow.models.ask import Ask
from hydraflow.models.chunks import chunk_slices
from hydraflow.models.fused_head import several
from hydraflow.models.linear import add_product, linear, multiply_back


@dataclass(frozen=True)
class VocabularyShare:
    """The vocabulary shard of this rank."""

    group: dist.ProcessGroup
    first: int
    """First token id of the shard."""
    real: int
    """Rows of the shard that are tokens; the rest is padding."""
    chunk: int
    """Chunk size: tokens whose logits exist at one time."""


class VocabularyParallelHead(torch.autograd.Function):
    """From hidden (K, h), weight (V / TP, h) and targets (K,) or (K, M): the targets' log-probabilities, in
    their shape, and on request entropies or another column (K,), see `Ask`. At least float32. The gradient of
    `hidden` is this rank's part of a sum over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        ask: Ask,
        share: VocabularyShare,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scores, normalizers, more = [], [], []
        for part in chunk_slices(len(hidden), share.chunk):
            logits = _logits(hidden[part], weight, ask, share)
            top = logits.amax(-1)
            # all ranks must subtract the same maximum, or their sums of exponentials would not add up
            dist.all_reduce(top, dist.ReduceOp.MAX, share.group)
            powers = torch.exp(logits - top[:, None])
            if ask.likeliest:
                total = powers.sum(-1)
                dist.all_reduce(total, group=share.group)
                best, ids = _likeliest(logits, ask, share)
                normalizers.append(top + total.log())
                scores.append(best - normalizers[-1][:, None])
                more.append(ids)
                continue
            column, is_here = _columns(targets[part], share)
            summed = [powers.sum(-1), *logits.gather(-1, column).where(is_here, 0.0).unbind(1)]
            if ask.entropy:
                summed.append((powers[:, : share.real] * logits[:, : share.real]).sum(-1))
            elif ask.sum_pi_squared:
                summed.append(powers.square().sum(-1))
            together = torch.stack(summed)
            dist.all_reduce(together, group=share.group)
            normalizer = top + together[0].log()
            scores.append((together[1 : 1 + column.shape[1]] - normalizer).t())
            normalizers.append(normalizer)
            if ask.entropy:
                more.append(normalizer - together[-1] / together[0])
            elif ask.sum_pi_squared:
                more.append(together[-1] / together[0].square())
            elif ask.greedy_match:
                more.append(_is_best(logits, top, several(targets[part])[:, 0], share))
        log_probs, second = torch.cat(scores), torch.cat(more) if more else None
        if not ask.likeliest:
            log_probs = log_probs.view(targets.shape)
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalizers), second)
        ctx.ask, ctx.share = ask, share
        ctx.set_materialize_grads(False)
        if second is not None and not ask.entropy:
            ctx.mark_non_differentiable(second, *([log_probs] if ask.likeliest else []))
        return log_probs, second

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_probs: torch.Tensor | None, of_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalizers, entropies = ctx.saved_tensors
        ask, share = ctx.ask, ctx.share
        if of_log_probs is None:
            of_log_probs = normalizers.new_zeros(targets.shape)
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for part in chunk_slices(len(hidden), share.chunk):
            logits = _logits(hidden[part], weight, ask, share)
            every = logits.sub_(normalizers[part, None])  # log-probabilities
            column, is_here = _columns(targets[part], share)
            of_targets = several(of_log_probs[part])
            wanted = of_targets.sum(1, keepdim=True)
            gradient = torch.exp(every)
            if of_entropies is None:
                gradient.mul_(-wanted)
            else:
                of_entropy = of_entropies[part, None]
                every[:, share.real :] = 0.0  # padding rows are -inf, and 0 * -inf is NaN
                gradient.mul_(-wanted - of_entropy * (every + entropies[part, None]))
            gradient.scatter_add_(-1, column, of_targets.where(is_here, 0.0))
            narrow = gradient.div_(ask.temperature).to(hidden.dtype)
            multiply_back(narrow, weight, out=of_hidden[part])
            add_product(of_weight, narrow, hidden[part])
        return of_hidden, of_weight, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, ask: Ask, share: VocabularyShare) -> torch.Tensor:
    """(k, V / TP) logits divided by the temperature; -inf for padding rows."""
    logits = linear(hidden, weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if ask.temperature != 1.0:
        wide = wide.div_(ask.temperature)
    wide[:, share.real :] = -torch.inf
    return wide


def _columns(targets: torch.Tensor, share: VocabularyShare) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, M) local column of each target, 0 if it is on another rank, and whether it is on this rank."""
    column = several(targets) - share.first
    is_here = (column >= 0) & (column < share.real)
    return column.where(is_here, 0), is_here


def _is_best(
    logits: torch.Tensor, top: torch.Tensor, targets: torch.Tensor, share: VocabularyShare
) -> torch.Tensor:
    """(k,) 1 where the target is the most probable token; among equals, the first."""
    best, at = logits.max(-1)
    first = torch.where(best == top, at + share.first, torch.iinfo(torch.int64).max)
    dist.all_reduce(first, dist.ReduceOp.MIN, share.group)
    return (first == targets).to(logits.dtype)


def _likeliest(logits: torch.Tensor, ask: Ask, share: VocabularyShare) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (k, M) and ids of the top-k tokens over all ranks, from the top-k of each."""
    own = logits[:, : max(0, min(share.real, ask.among - share.first))]
    best = logits.new_full((len(logits), ask.likeliest), -torch.inf)
    ids = torch.full(best.shape, -1, device=logits.device)
    found = own.topk(min(ask.likeliest, own.shape[1]))
    width = found.values.shape[1]
    best[:, :width], ids[:, :width] = found.values, found.indices + share.first
    every_best, every_id = ([torch.empty_like(one) for _ in range(share.group.size())] for one in (best, ids))
    dist.all_gather(every_best, best, share.group)
    dist.all_gather(every_id, ids, share.group)
    top = torch.cat(every_best, 1).topk(ask.likeliest)
    return top.values, torch.cat(every_id, 1).gather(1, top.indices)
