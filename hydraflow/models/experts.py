"""The number of rows with which the experts of transformers' mixtures multiply, on a CPU.

transformers' `grouped_mm` multiplies the rows of each expert together, however many these are. For bfloat16,
oneDNN compiles a product for each number of rows. That takes about 0.25 ms, as long as a small product
itself, and the numbers change in every step, so that oneDNN's cache of about a thousand products rarely
helps.
In: a model, and how many rows there should be for a given number. Out: the same model, in which rows of zeros
are routed to the experts that were chosen. Left out on purpose: GPUs, and models whose code multiplies
experts itself.

Legend: N tokens, H hidden size, E experts, K experts of each token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hydraflow.models.decoding_sizes import in_steps

_REPLACED = "grouped_mm"


def pad_experts(model: nn.Module, name: str, rows: Callable[[int], int]) -> None:
    """Pads each chosen expert from n rows to `rows(n)`; the one with the fewest gets a few more if their sum
    is no multiple of the experts of a token. `name` stands for this in transformers' table. Keeps the
    parameters, and the configuration, which other models may share."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, partial(_padded, rows))
    part: Any
    for part in model.modules():
        if hasattr(part, "_is_expert_parallel") and part.config._experts_implementation == _REPLACED:
            part.config = copy.deepcopy(part.config)
            part.config._experts_implementation = name


def one_of_few(rows: int) -> int:
    """A number of rows that others are likely to have, too: a multiple of a 32nd of the next power of two.

    >>> [one_of_few(n) for n in (1, 31, 33, 100, 600, 1024)]
    [1, 31, 34, 100, 608, 1024]
    """
    return in_steps(rows, 32, least=1)


def _padded(
    rows: Callable[[int], int], module: Any, hidden: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """transformers' experts function. hidden: (N, H); experts, weights: (N, K); returns (N, H)."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    tokens, chosen = experts.shape
    counts = torch.bincount(experts.flatten(), minlength=module.num_experts).tolist()
    wanted = [rows(count) if count else 0 for count in counts]
    if left := -sum(wanted) % chosen:
        wanted[wanted.index(min(filter(None, wanted)))] += left
    missing = [enough - count for enough, count in zip(wanted, counts, strict=True)]
    # an expert for each row of zeros
    slots = torch.repeat_interleave(torch.tensor(missing, device=hidden.device)).view(-1, chosen)
    if len(slots):
        hidden = torch.cat([hidden, hidden.new_zeros(len(slots), hidden.shape[1])])
        experts = torch.cat([experts, slots.to(experts.dtype)])
        weights = torch.cat([weights, weights.new_zeros(slots.shape)])
    found: Tensor = grouped_mm_experts_forward(module, hidden, experts, weights)
    return found[:tokens]
