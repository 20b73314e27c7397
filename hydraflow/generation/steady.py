"""Products in which a row's bits do not depend on the other rows, on a CPU.

In: a model for generation. Out: the same model, with two replacements. Products of few rows sum in another
order (`decode.py`): each chosen expert gets at least LEAST_ROWS (`models/experts.py`). A layer with one
output is a product with a vector, whose order depends on the number of rows: it is computed with two.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydraflow.models.decoding_sizes import LEAST_ROWS
from hydraflow.models.experts import pad_experts
from hydraflow.models.linear import is_plain

NAME = "hydraflow_steady"


def steady_products(model: PreTrainedModel) -> None:
    """Replaces the products of experts and those of layers with one output. Keeps the parameters, and the
    configuration, which other models may share."""
    if model.device.type != "cpu":
        return
    pad_experts(model, NAME, partial(max, LEAST_ROWS))
    for part in model.modules():
        if is_plain(part) and part.out_features == 1:
            part.__class__ = _OneOutput


class _OneOutput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        """(..., H) to (..., 1)."""
        bias = None if self.bias is None else self.bias.repeat(2)
        return F.linear(x, self.weight.repeat(2, 1), bias)[..., :1]
