"""Products in which a row's bits do not depend on the other rows, on a CPU.

In: a model for generation. Out: the same model, with two replacements. transformers' `grouped_mm` multiplies
the rows of each expert together, and products of few rows sum in another order (`decode.py`): rows of zeros
are routed to every chosen expert until it has LEAST_ROWS. A layer with one output is a product with a vector,
whose order depends on the number of rows: it is computed with two. Left out on purpose: GPUs, and models
whose code multiplies experts itself.

Legend: N tokens, H hidden size, E experts, K experts of each token.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydraflow.models.decoding_sizes import LEAST_ROWS
from hydraflow.models.linear import is_plain

NAME, _REPLACED = "hydraflow_steady", "grouped_mm"


def steady_products(model: PreTrainedModel) -> None:
    """Replaces the products of experts and those of layers with one output. Keeps the parameters, and the
    configuration, which other models may share."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if model.device.type != "cpu":
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, padded_experts)
    part: Any
    for part in model.modules():
        if is_plain(part) and part.out_features == 1:
            part.__class__ = _OneOutput
        elif hasattr(part, "_is_expert_parallel") and part.config._experts_implementation == _REPLACED:
            part.config = copy.deepcopy(part.config)
            part.config._experts_implementation = NAME


def padded_experts(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts function. hidden: (N, H); experts, weights: (N, K); returns (N, H)."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    tokens, chosen = experts.shape
    counts = torch.bincount(experts.flatten(), minlength=module.num_experts)  # (E,)
    missing = (LEAST_ROWS - counts).clamp_(min=0).masked_fill_(counts == 0, 0)
    slots = torch.repeat_interleave(missing)  # an expert for each row of zeros
    if len(slots):
        slots = torch.cat([slots, slots[-1:].expand(-len(slots) % chosen)]).view(-1, chosen)
        hidden = torch.cat([hidden, hidden.new_zeros(len(slots), hidden.shape[1])])
        experts = torch.cat([experts, slots.to(experts.dtype)])
        weights = torch.cat([weights, weights.new_zeros(slots.shape)])
    found: Tensor = grouped_mm_experts_forward(module, hidden, experts, weights)
    return found[:tokens]


class _OneOutput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        """(..., H) to (..., 1)."""
        bias = None if self.bias is None else self.bias.repeat(2)
        return F.linear(x, self.weight.repeat(2, 1), bias)[..., :1]
