"""Log-probabilities and entropies of the requested tokens, from hidden states and a linear head's weights.

In: hidden states, the output matrix and its bias, the requested tokens. Out: two numbers for each token, and
the gradients of hidden states, matrix and bias. Logits exist for one chunk of tokens at a time, in memory
that the next chunk reuses. The backward pass recomputes them and turns them into their gradient in place. If
all tokens fit into one chunk and logits are not post-processed, nothing is recomputed: log-probabilities are
kept, or probabilities if the backward pass needs no more. The gradient of the matrix is summed over chunks in
its own dtype, as it is over micro-batches.
Left out on purpose: heads other than a plain linear layer (`heads.py`), kernels for a GPU (`kernel_head.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hydraflow.models.ask import Ask
from hydraflow.models.chunks import chunk_slices
from hydraflow.models.linear import add_product, gains, linear, multiply


@dataclass(frozen=True)
class HeadWork:
    """How a head computes its tokens."""

    ask: Ask
    process: Callable[[torch.Tensor], torch.Tensor]
    """Differentiable post-processing of logits; the tensor itself where there is none."""
    chunk: int
    """Tokens whose logits exist at one time."""


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
            every = logits.log_probs(part)
            if work.ask.likeliest:
                top = every[:, : work.ask.among].topk(work.ask.likeliest)
                log_probs.append(top.values)
                more.append(top.indices)
                continue
            wanted = several(targets[part])
            log_probs.append(every.gather(-1, wanted).view(targets[part].shape))
            if work.ask.greedy_match:
                best = logits.scaled[: len(every)].argmax(-1, keepdim=True)
                more.append((best == wanted[:, :1])[:, 0].to(every.dtype))
            elif work.ask.entropy:
                probs = logits.probs(every)
                product = probs.mul_(every) if work.ask.entropy_is_trained else every.mul_(probs)
                more.append(-product.sum(-1))
            elif work.ask.sum_pi_squared:
                more.append(logits.probs(every).square_().sum(-1))
        second = torch.cat(more) if more else None
        kept = None
        if len(log_probs) == 1 and not logits.processed:
            kept = probs if keeps_probs(work.ask) else every
        ctx.save_for_backward(hidden, weight, bias, targets, second, kept)
        ctx.work = work
        ctx.set_materialize_grads(False)
        found = torch.cat(log_probs)
        if second is not None and not (work.ask.entropy and work.ask.entropy_is_trained):
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
            every = logits.log_probs(part)
            trained = None if of_entropies is None else (of_entropies[part], entropies[part])
            return logits.gradient(every, targets[part], of_log_probs[part], trained)

        return (*head_gradients(ctx, gradient_of), None, None)


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
            multiply(gradient, weight.t(), out=of_hidden[part])
        if needs_weight:
            of_weight = add_product(of_weight, gradient, hidden[part])
        if needs_bias:
            of_bias = gradient.sum(0) if of_bias is None else of_bias.add_(gradient.sum(0))
        del gradient  # otherwise it would live while the next chunk is computed
    return of_hidden, of_weight, of_bias


def keeps_probs(ask: Ask) -> bool:
    """Whether a single chunk's probabilities are kept, and not their logarithms."""
    return ask.entropy and not ask.entropy_is_trained


def several(targets: torch.Tensor) -> torch.Tensor:
    """(K, M) from (K, M), or from (K,) with M = 1."""
    return targets[:, None] if targets.ndim == 1 else targets


class _Logits:
    """Logits of a chunk and what is computed from them, in memory that chunks share. `kept`: what the forward
    pass saved of a single chunk, see `keeps_probs`."""

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
        self._work, self._kept, self._backward = work, kept, backward
        self.processed = False
        """Whether logits have been post-processed."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self._by_onednn = kept is None and gains(hidden, weight)
        """Whether each chunk's logits are a new tensor."""
        rows = 0 if self._by_onednn else min(len(hidden), work.chunk)
        self.scaled = hidden.new_empty((rows, len(weight)), dtype=wide)
        """(chunk, V) logits divided by the temperature."""
        self._raw = self.scaled if hidden.dtype == wide else torch.empty_like(self.scaled, dtype=hidden.dtype)
        shape = min(len(hidden), work.chunk), len(weight)
        self._every = self.scaled.new_empty(shape) if kept is None else kept
        self._graph: tuple[torch.Tensor, torch.Tensor] | None = None
        """Logits after and before their post-processing."""

    def log_probs(self, part: slice) -> torch.Tensor:
        """(k, V) log-probabilities of the whole vocabulary for each token of the chunk, or what was kept."""
        if self._kept is not None:
            return self._kept
        rows = self._hidden[part]
        self._graph = None  # freed first: the previous chunk's takes as much memory again
        if self._by_onednn:
            self.scaled = self._raw = self.scaled.new_empty(0)
            self.scaled = self._raw = linear(rows, self._weight, self._bias)
        raw, scaled, every = (whole[: len(rows)] for whole in (self._raw, self.scaled, self._every))
        if not self._by_onednn:
            multiply(rows, self._weight, self._bias, out=raw)
        with torch.set_grad_enabled(self._backward):
            before = raw.detach().requires_grad_(self._backward)
            after = self._work.process(before)
        self.processed = after is not before
        if self.processed and self._backward:
            self._graph = after, before
        if after.data_ptr() != scaled.data_ptr():
            scaled.copy_(after.detach())
        if self._work.ask.temperature != 1.0:
            scaled.div_(self._work.ask.temperature)
        return torch.log_softmax(scaled, -1, out=every)

    def probs(self, every: torch.Tensor) -> torch.Tensor:
        """(k, V) probabilities, kept or in the memory of the logits; `every` is what `log_probs` returned."""
        if self._kept is not None and keeps_probs(self._work.ask):
            return every
        return torch.exp(every, out=self.scaled[: len(every)])

    def gradient(
        self,
        every: torch.Tensor,
        targets: torch.Tensor,
        of_log_probs: torch.Tensor,
        trained: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """(k, V) gradient of the head's raw output. `trained`: the gradient of the entropies, and the
        entropies; None: no entropy term."""
        temperature = self._work.ask.temperature
        of_targets, probs = several(of_log_probs / temperature), self.probs(every)
        of_target = of_targets.sum(1, keepdim=True)
        if trained is None:
            gradient = torch.mul(probs, -of_target, out=self.scaled[: len(every)])
        else:
            of_entropy, entropies = (trained[0] / temperature)[:, None], trained[1][:, None]
            out = every if self._kept is None else torch.empty_like(every)
            offset = -of_target - of_entropy * entropies
            gradient = torch.addcmul(offset, every, of_entropy, value=-1, out=out).mul_(probs)
        gradient.scatter_add_(-1, several(targets), of_targets)
        if self._raw is not self.scaled:
            gradient = self._raw[: len(every)].copy_(gradient)
        if self._graph is not None:
            (gradient,) = torch.autograd.grad(*self._graph, gradient)
            self._graph = None
        return gradient
