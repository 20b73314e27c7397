"""The number of rows with which the experts of transformers' mixtures multiply, on a CPU.

transformers' `grouped_mm` multiplies the rows of each expert together, however many these are. For bfloat16,
oneDNN compiles a product for each number of rows, and keeps about a thousand: a quarter of a millisecond for
products that take as long, where hundreds of tokens choose among some experts anew in every step.
In: a model, and the rows that a given number is filled up to. Out: the same model, in which rows of zeros are
routed to the experts that were chosen. Left out on purpose: GPUs, and models whose code multiplies experts
itself.

Legend: N tokens, H hidden size, E experts, K experts of each token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_REPLACED = "grouped_mm"


def pad_experts(model: nn.Module, name: str, rows: Callable[[int], int]) -> None:
    """Fills the rows of each expert up to `rows` of their number, which is at least one. `name` stands for
    this function in transformers' table. Keeps the parameters, and the configuration, which other models may
    share."""
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
    step = max(1, 2 ** (rows - 1).bit_length() // 32)
    return -(-rows // step) * step


def _padded(
    rows: Callable[[int], int], module: Any, hidden: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """transformers' experts function. hidden: (N, H); experts, weights: (N, K); returns (N, H)."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    tokens, chosen = experts.shape
    counts = torch.bincount(experts.flatten(), minlength=module.num_experts).tolist()
    missing = torch.tensor([rows(count) - count if count else 0 for count in counts], device=hidden.device)
    slots = torch.repeat_interleave(missing)  # an expert for each row of zeros
    if len(slots):
        slots = torch.cat([slots, slots[-1:].expand(-len(slots) % chosen)]).view(-1, chosen)
        hidden = torch.cat([hidden, hidden.new_zeros(len(slots), hidden.shape[1])])
        experts = torch.cat([experts, slots.to(experts.dtype)])
        weights = torch.cat([weights, weights.new_zeros(slots.shape)])
    found: Tensor = grouped_mm_experts_forward(module, hidden, experts, weights)
    return found[:tokens]
