"""`fused_head.FusedHead` with GPU kernels: a chunk's logits exist once, in the model's dtype.

In and out as there. Left out on purpose: requests that the kernels do not support (`suits`), which
`FusedHead` handles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hydraflow.models.chunks import chunk_slices
from hydraflow.models.fused_head import HeadWork, head_gradients
from hydraflow.models.gpu_kernels import kernels_for
from hydraflow.models.linear import linear


def suits(hidden: torch.Tensor, targets: torch.Tensor, work: HeadWork) -> bool:
    """Whether `KernelHead` supports the request: one target per token, its log-probability and perhaps the
    entropy, without post-processing of logits."""
    if kernels_for(hidden) is None or targets.ndim > 1:
        return False
    return work.ask.more in (None, "entropys") and work.is_plain(hidden)


class KernelHead(torch.autograd.Function):
    """As `FusedHead`. Keeps the logsumexp of each token, and the logits if they are one chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        work: HeadWork,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kernels: Any = kernels_for(hidden)
        scored, logits = [], None
        for part in chunk_slices(len(hidden), work.chunk):
            logits = None  # the previous chunk's, freed first
            logits = linear(hidden[part], weight, bias)
            scored.append(kernels.score(logits, targets[part], work.ask.temperature))
        log_probs, entropies, sums = (torch.cat(column) for column in zip(*scored, strict=True))
        kept = logits if len(scored) == 1 else None
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, sums, kept)
        ctx.work = work
        ctx.set_materialize_grads(False)
        second = entropies if work.ask.entropy else None
        if second is not None and not work.ask.entropy_is_trained:
            ctx.mark_non_differentiable(second)
        return log_probs, second

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_probs: torch.Tensor | None, of_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, sums, kept = ctx.saved_tensors
        kernels: Any = kernels_for(hidden)
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(sums)
        of_log_probs = of_log_probs.contiguous()
        of_entropies = None if of_entropies is None else of_entropies.contiguous()

        def gradient_of(part: slice) -> torch.Tensor:
            logits = linear(hidden[part], weight, bias) if kept is None else kept
            return kernels.score_gradient(
                logits,
                targets[part],
                (entropies[part], sums[part]),
                of_log_probs[part],
                None if of_entropies is None else of_entropies[part],
                ctx.work.ask.temperature,
                logits if kept is None else torch.empty_like(logits),
            )

        return (*head_gradients(ctx, gradient_of), None, None)
