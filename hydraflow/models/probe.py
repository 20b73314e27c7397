"""What the checks of a model at load time share: test rows, a model's own results, and when two results count
as different.

In: a vocabulary, a model of transformers, or numbers of the same tokens computed in two ways. Out: short rows
of random tokens, the same on every rank; log-probabilities by the model's own code; a difference, and the
tolerance for rounding. Left out on purpose: the checks (`engine/fsdp/parity.py`,
`engine/megatron/repeatable.py`, `generation/parity.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from hydraflow.protocol import ragged

ROWS = ((5, 6), (5, 11), (2, 3), (9, 7))
"""(prompt tokens, response tokens) of each row; the first two rows share their prompt."""
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3}
ROUNDED = 0.25
"""Tolerance for log-probabilities, or for hidden states relative to their size, by dtype; rounding stays
below a tenth of it."""
REFUSED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that model code raises for unsupported kinds of calls."""


def probe_rows(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and responses of random tokens, ragged."""
    draw = torch.Generator().manual_seed(0)
    tokens = [[torch.randint(vocabulary, (n,), generator=draw) for n in lengths] for lengths in ROWS]
    prompts = [tokens[0][0], tokens[0][0], *(prompt for prompt, _ in tokens[2:])]
    return ragged.from_rows(prompts), ragged.from_rows([response for _, response in tokens])


def own_log_probs(
    lm: Any, prompt: torch.Tensor, response: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """(R,) log-probabilities of a response by the model's own forward pass on that device, at least
    float32."""
    ids = torch.cat([prompt, response]).to(device)[None]
    logits = lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]  # (R, V)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def limit(dtype: torch.dtype) -> float:
    """The tolerance for rounding in this dtype."""
    return LIMITS.get(dtype, ROUNDED)


def difference(
    ours: torch.Tensor, theirs: torch.Tensor, row_lengths: torch.Tensor, dtype: torch.dtype
) -> float:
    """Difference of numbers (K,), or of hidden states (K, h) relative to their mean size: the largest median
    of a row, or in 16 bits the median over all tokens, because rounding may route some to another expert. inf
    if some are NaN.

    >>> mine, lengths = torch.tensor([0.0, 0.0, 0.0, 2.0]), torch.tensor([3, 1])
    >>> difference(mine, torch.zeros(4), lengths, torch.float32)
    2.0
    >>> difference(mine, torch.zeros(4), lengths, torch.bfloat16)
    0.0
    """
    off = (ours.double() - theirs.double()).abs().flatten(1) if ours.ndim > 1 else (ours - theirs).abs()
    parts = off.split(row_lengths.tolist()) if dtype in LIMITS else [off]
    found = torch.stack([part.double().quantile(0.5) for part in parts if part.numel()]).max()
    if ours.ndim > 1:
        found = found / theirs.double().abs().mean()
    return float(torch.nan_to_num(found, nan=float("inf")))
