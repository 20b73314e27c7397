"""Shared by the checks of a model at load time: test rows, a model's own results, and when two results count
as different.

In: a vocabulary, a model of transformers, or numbers of the same tokens computed in two ways. Out: short rows
of random tokens, the same on every rank; log-probabilities by the model's own code; a difference, and whether
it is rounding. Left out on purpose: the checks (`engine/fsdp/parity.py`, `engine/megatron/repeatable.py`,
`generation/parity.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hydraflow.device import ran_out_of_memory
from hydraflow.protocol import ragged

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ROWS: tuple[tuple[int, int], ...] = ((5, 6), (5, 11), (2, 3), (9, 7))
"""(prompt tokens, response tokens) of each row; the first two rows share their prompt."""
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Tolerance for log-probabilities, or for hidden states relative to their size; rounding stays below a tenth
of it."""
UNSUSPICIOUS, ROUNDED, BEYOND = 0.05, 0.25, 2.5
"""For 16-bit dtypes. If no row's median is off by more than UNSUSPICIOUS, it is rounding. If one is, the
median of all tokens must not be off by more than ROUNDED, nor by more than BEYOND times what another
attention kernel changes in the model's own forward pass. The medians of single rows are not held to that:
rounding may route tokens of a row to another expert."""
REFUSED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that model code raises for unsupported kinds of calls."""


def probe_rows(vocabulary: int, most: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and responses of random tokens, ragged; together at most `most` tokens, but two at least."""
    draw = torch.Generator().manual_seed(0)
    fitting = ROWS
    if most is not None:
        lengths = [max(1, min(prompt, most - 1)) for prompt, _ in ROWS]
        fitting = tuple((n, max(1, min(response, most - n))) for n, (_, response) in zip(lengths, ROWS))
    tokens = [[torch.randint(vocabulary, (n,), generator=draw) for n in row] for row in fitting]
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


def is_exact(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether rounding changes no token visibly: in float32 and float64, unless it may route tokens to
    another expert."""
    names = (f"{name} {type(part).__name__}".lower() for name, part in model.named_modules())
    return dtype in LIMITS and not any("expert" in name or "moe" in name for name in names)


def deviation(
    ours: torch.Tensor, theirs: torch.Tensor, row_lengths: torch.Tensor, *, exact: bool
) -> tuple[float, float]:
    """How far numbers (K,), or hidden states (K, h) relative to their mean size, are off: the worst token if
    `exact`, otherwise the largest median of a row; and the median of all tokens. inf if some are NaN.

    >>> mine, lengths = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0]), torch.tensor([3, 2])
    >>> [deviation(mine, torch.zeros(5), lengths, exact=exact) for exact in (True, False)]
    [(3.0, 1.0), (2.5, 1.0)]
    """
    size = theirs.double().abs().mean() if ours.ndim > 1 else 1.0
    tokens = (ours.double() - theirs.double()).abs() / size
    if exact:
        candidates = tokens.mean(1) if ours.ndim > 1 else tokens
    else:
        parts = tokens.split(row_lengths.tolist())
        candidates = torch.stack([part.quantile(0.5) for part in parts if part.numel()])
    found = torch.stack([candidates.max(), tokens.quantile(0.5)])
    worst, middle = torch.nan_to_num(found, nan=float("inf")).tolist()
    return worst, middle


def within_tolerance(worst: float, middle: float, dtype: torch.dtype) -> bool | None:
    """Whether such a deviation is rounding; None: `is_rounding` decides.

    >>> [within_tolerance(*off, torch.bfloat16) for off in ((0.04, 0.04), (0.3, 0.04), (0.3, 0.3))]
    [True, None, False]
    """
    if dtype in LIMITS:
        return worst <= LIMITS[dtype]
    if worst <= UNSUSPICIOUS:
        return True
    return None if middle <= ROUNDED else False


def is_rounding(
    ours: torch.Tensor, theirs: torch.Tensor, config: PreTrainedConfig, again: Callable[[], torch.Tensor]
) -> bool:
    """Whether `ours` is at most BEYOND times as far from `theirs` as `again()`, which recomputes `theirs`,
    here with another attention kernel. By medians and by means. False if that kernel cannot compute the
    model.

    Where transformers' own kernel is `eager`, because of a cap on scores that `sdpa` ignores, the other one
    changes more than the rounding: the check is then less strict.
    """
    usual = config._attn_implementation
    config._attn_implementation = "sdpa" if usual == "eager" else "eager"
    try:
        rounded = again()
    except REFUSED as error:
        if ran_out_of_memory(error):
            raise
        return False
    finally:
        config._attn_implementation = usual
    far, rounding = (ours - theirs).double().abs(), (rounded - theirs).double().abs()
    pairs = ((far.median(), rounding.median()), (far.mean(), rounding.mean()))
    return bool(torch.isfinite(rounding).all()) and all(mine <= BEYOND * its for mine, its in pairs)
