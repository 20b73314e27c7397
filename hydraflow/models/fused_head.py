"""Log-probabilities and entropies of the requested tokens, from hidden states and a linear head's weights.

In: hidden states, the output matrix and its bias, the requested tokens. Out: two numbers for each token, and
the gradients of hidden states, matrix and bias. Logits exist for one chunk of tokens at a time, in memory
that the next chunk reuses. What is computed from them, in float32 or wider, exists for a few tokens at a time
on a CPU, so that it stays in the cache. The backward pass recomputes logits and turns them into their
gradient in place. If all tokens fit into one chunk and logits are not post-processed, nothing is recomputed:
log-probabilities are kept, or probabilities if the backward pass needs no more. Without a trained entropy
they become the gradient in place, if they have its dtype, so that there can be only one backward pass. The
gradient of the matrix is summed over chunks in its own dtype, as it is over micro-batches.
Left out on purpose: heads other than a plain linear layer (`heads.py`), kernels for a GPU (`kernel_head.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hydraflow.models.ask import Ask
from hydraflow.models.chunks import block_tokens, chunk_slices, equal_slices
from hydraflow.models.linear import add_product, gains, linear, multiply, multiply_back


@dataclass(frozen=True)
class HeadWork:
    """How a head computes its tokens."""

    ask: Ask
    process: Callable[[torch.Tensor], torch.Tensor]
    """Differentiable post-processing of logits; the tensor itself where there is none."""
    chunk: int
    """Tokens whose logits exist at one time."""
    trains: bool = True
    """Whether a backward pass follows."""

    def is_plain(self, hidden: torch.Tensor) -> bool:
        """Whether logits are not post-processed."""
        probe = hidden.new_zeros(1, 1)
        return self.process(probe) is probe


class FusedHead(torch.autograd.Function):
    """From hidden (K, h), weight (V, h), bias (V,) or None and targets (K,) or (K, M): the targets'
    log-probabilities, in their shape, and on request entropies or another column (K,), see `Ask`. At least
    float32.

    The gradient of logit j, with p = softmax, t the target, H the entropy, l and e the gradients of the two
    outputs: l (1[j = t] - p_j) - e p_j (log p_j + H); with several targets the first term for each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        work: HeadWork,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = _Logits(hidden, weight, bias, work)
        log_probs, more = [], []
        for part in chunk_slices(len(hidden), work.chunk):
            for block in logits.blocks(part):
                found, column = _columns(logits, block, targets[block.tokens], work.ask)
                log_probs.append(found)
                more.append(column)
            del block  # its logits would live while the next chunk's are computed
        second = torch.cat([column for column in more if column is not None]) if work.ask.more else None
        ctx.save_for_backward(hidden, weight, bias, targets, second, logits.kept)
        ctx.work = work
        ctx.set_materialize_grads(False)
        found = torch.cat(log_probs)
        if second is not None and not work.ask.trains_entropy:
            ctx.mark_non_differentiable(second, *([found] if work.ask.likeliest else []))
        return found, second

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_probs: torch.Tensor | None, of_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, kept = ctx.saved_tensors
        logits = _Logits(hidden, weight, bias, ctx.work, kept, backward=True)
        if of_log_probs is None:
            of_log_probs = entropies.new_zeros(targets.shape)

        def gradient_of(part: slice) -> torch.Tensor:
            for block in logits.blocks(part):
                logits.log_probs(block)
                at = block.tokens
                trained = None if of_entropies is None else (of_entropies[at], entropies[at])
                logits.gradient(block, targets[at], of_log_probs[at], trained)
            return logits.raw[: len(hidden[part])]

        return (*head_gradients(ctx, gradient_of), None, None)


def _columns(
    logits: _Logits, block: _Block, targets: torch.Tensor, ask: Ask
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is asked of a block: log-probabilities, and the other column. `targets`: (k,) or (k, M)."""
    every = logits.log_probs(block)
    if ask.likeliest:
        top = every[:, : ask.among].topk(ask.likeliest)
        return top.values, top.indices
    wanted = several(targets)
    found = every.gather(-1, wanted).view(targets.shape)
    if ask.greedy_match:
        best = block.scaled.argmax(-1, keepdim=True)
        return found, (best == wanted[:, :1])[:, 0].to(every.dtype)
    if ask.entropy:
        probs = logits.probs(block)
        product = probs.mul_(every) if ask.entropy_is_trained else every.mul_(probs)
        return found, -product.sum(-1)
    return found, logits.probs(block).square_().sum(-1) if ask.sum_pi_squared else None


def head_gradients(
    ctx: Any, gradient_of: Callable[[slice], torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of hidden states, matrix and bias, as far as needed, from those of each chunk's logits
    (k, V). `ctx`: of an autograd function with the arguments of `FusedHead`, whose first saved tensors are
    the hidden states and the matrix."""
    hidden, weight = ctx.saved_tensors[:2]
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    of_hidden = torch.empty_like(hidden) if needs_hidden else None
    of_weight = of_bias = None
    for part in chunk_slices(len(hidden), ctx.work.chunk):
        gradient = gradient_of(part)
        if of_hidden is not None:
            multiply_back(gradient, weight, out=of_hidden[part])
        if needs_weight:
            of_weight = add_product(of_weight, gradient, hidden[part])
        if needs_bias:
            of_bias = gradient.sum(0) if of_bias is None else of_bias.add_(gradient.sum(0))
        del gradient  # otherwise it would live while the next chunk is computed
    return of_hidden, of_weight, of_bias


def keeps_probs(ask: Ask) -> bool:
    """Whether a single chunk's probabilities are kept, and not their logarithms."""
    return ask.entropy and not ask.trains_entropy


def several(targets: torch.Tensor) -> torch.Tensor:
    """(K, M) from (K, M), or from (K,) with M = 1."""
    return targets[:, None] if targets.ndim == 1 else targets


@dataclass
class _Block:
    """A few tokens of a chunk, k of them; all tensors are (k, V)."""

    tokens: slice
    """Among all K."""
    raw: torch.Tensor
    """The head's output, and at last its gradient."""
    scaled: torch.Tensor
    """Logits divided by the temperature, then probabilities; at least float32."""
    every: torch.Tensor
    """Log-probabilities of the whole vocabulary, or the probabilities kept; at least float32."""
    graph: tuple[torch.Tensor, torch.Tensor] | None = None
    """Logits after and before their post-processing."""


class _Logits:
    """Logits of a chunk, in memory that chunks share, and what is computed from them, in memory that blocks
    share. `kept`: what the forward pass kept, in the backward pass."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        work: HeadWork,
        kept: torch.Tensor | None = None,
        *,
        backward: bool = False,
    ):
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._work, self._backward = work, backward
        self._wide = torch.promote_types(hidden.dtype, torch.float32)
        chunk, vocabulary = min(len(hidden), work.chunk), len(weight)
        block = block_tokens(vocabulary, self._wide.itemsize, hidden.device.type)
        self._block = min(chunk, block * torch.get_num_threads())  # each thread has a cache of its own
        self._is_kept = backward and kept is not None
        self._by_onednn = not self._is_kept and gains(hidden, weight)
        """Whether each chunk's logits are a new tensor."""
        self.raw = (
            kept
            if kept is not None and kept.dtype == hidden.dtype and not work.ask.trains_entropy
            else hidden.new_empty((0 if self._by_onednn else chunk, vocabulary))
        )
        """(chunk, V) output of the head; in the backward pass its gradient."""
        self._is_plain = work.is_plain(hidden)
        self._keeps = not backward and work.trains and self._is_plain and len(hidden) <= work.chunk
        self.kept = kept
        """(K, V) log-probabilities of a single chunk for the backward pass, or see `keeps_probs`."""

    def blocks(self, part: slice) -> Iterator[_Block]:
        """The blocks of a chunk, whose logits are computed first."""
        rows = self._hidden[part]
        if not self._is_kept:
            self._multiply(rows)
        if self._keeps:
            in_place = keeps_probs(self._work.ask) and self.raw.dtype == self._wide
            self.kept = self.raw if in_place else torch.empty_like(self.raw, dtype=self._wide)
        for some in equal_slices(len(rows), max(1, self._block)):
            raw = self.raw[: len(rows)][some]
            tokens = slice(part.start + some.start, part.start + some.start + len(raw))
            scaled, every = self._room(raw, tokens)
            yield _Block(tokens, raw, scaled, every)

    def _multiply(self, rows: torch.Tensor) -> None:
        if self._by_onednn:
            self.raw = self.raw.new_empty(0)  # freed first
            self.raw = linear(rows, self._weight, self._bias)
        else:
            multiply(rows, self._weight, self._bias, out=self.raw[: len(rows)])

    def _room(self, raw: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for a block's logits and log-probabilities; what is kept is computed in its final place."""
        in_place = raw.dtype == self._wide and self._is_plain
        if self.kept is None:
            scaled = raw if in_place else self._some_scaled[: len(raw)]
            return scaled, self._some_every[: len(raw)]
        kept = self.kept[tokens]
        if not keeps_probs(self._work.ask):
            return raw if in_place else self._some_scaled[: len(raw)], kept
        # the backward pass needs no log-probabilities
        return kept, kept if self._is_kept else self._some_every[: len(raw)]

    @cached_property
    def _some_scaled(self) -> torch.Tensor:
        return self.raw.new_empty((self._block, len(self._weight)), dtype=self._wide)

    @cached_property
    def _some_every(self) -> torch.Tensor:
        return self.raw.new_empty((self._block, len(self._weight)), dtype=self._wide)

    def log_probs(self, block: _Block) -> torch.Tensor:
        """(k, V) log-probabilities of the whole vocabulary for each token, or the probabilities kept."""
        if self._is_kept:
            return block.every
        with torch.set_grad_enabled(self._backward):
            before = block.raw.detach().requires_grad_(self._backward)
            after = self._work.process(before)
        if self._backward and not self._is_plain:
            block.graph = after, before
        if block.scaled.data_ptr() != block.raw.data_ptr():
            block.scaled.copy_(after.detach())
        if self._work.ask.temperature != 1.0:
            block.scaled.div_(self._work.ask.temperature)
        return torch.log_softmax(block.scaled, -1, out=block.every)

    def probs(self, block: _Block) -> torch.Tensor:
        """(k, V) probabilities, kept or in the memory of the logits, after `log_probs`."""
        if self._is_kept and keeps_probs(self._work.ask):
            return block.scaled
        return torch.exp(block.every, out=block.scaled)

    def gradient(
        self,
        block: _Block,
        targets: torch.Tensor,
        of_log_probs: torch.Tensor,
        trained: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Makes `block.raw` the gradient of the head's output. `trained`: the gradient of the entropies, and
        the entropies; None: no entropy term."""
        temperature = self._work.ask.temperature
        of_targets, probs = several(of_log_probs / temperature), self.probs(block)
        of_target = of_targets.sum(1, keepdim=True)
        if trained is None:
            gradient = torch.mul(probs, -of_target, out=self._unkept(block))
        else:
            of_entropy, entropies = (trained[0] / temperature)[:, None], trained[1][:, None]
            offset, out = -of_target - of_entropy * entropies, self._some_every[: len(probs)]
            gradient = torch.addcmul(offset, block.every, of_entropy, value=-1, out=out).mul_(probs)
        gradient.scatter_add_(-1, several(targets), of_targets)
        if block.graph is not None:
            (gradient,) = torch.autograd.grad(*block.graph, gradient.to(block.raw.dtype))
            block.graph = None
        if gradient is not block.raw:
            block.raw.copy_(gradient)

    def _unkept(self, block: _Block) -> torch.Tensor:
        """(k, V) memory for the gradient: that of the probabilities, unless kept ones have another type."""
        if not self._is_kept or not keeps_probs(self._work.ask):
            return block.scaled
        return block.raw if block.raw.dtype == self._wide else self._some_every[: len(block.raw)]
