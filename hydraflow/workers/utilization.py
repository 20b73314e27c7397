"""Model FLOPs utilization (MFU) of updates.

In: the rows of an update and its seconds. Out: a share of the peak. Only what the model needs is counted
(Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B): recomputed activations and padding do
not count, a prompt that neighbouring rows share counts for each of them. Left out on purpose: types of models
whose matrices are not known exactly (`memory/shape.py`), and sliding windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hydraflow.device import peak_flops
from hydraflow.errors import ConfigError
from hydraflow.memory.shape import FAMILIES, ModelShape, shape_of
from hydraflow.metrics import Metric, mean
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import load_config
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


@dataclass(frozen=True)
class ModelWork:
    """FLOPs of a model's passes."""

    shape: ModelShape
    outputs: int
    """Outputs of the head: the vocabulary size, or 1."""
    frozen: bool
    """Only adapters are trained, so weights get no gradient."""

    @staticmethod
    def of(model: ModelConfig, head: str, field: str) -> ModelWork | None:
        """None: the matrices of this model type are not known."""
        described = load_config(model, field=field).to_dict()
        if described.get("model_type") not in FAMILIES:
            return None
        try:
            shape = shape_of(described, field=field)
        except ConfigError:
            return None
        return ModelWork(shape, shape.vocabulary if head == "policy" else 1, model.lora_rank > 0)

    def update(self, prompts: torch.Tensor, responses: torch.Tensor) -> float:
        """FLOPs of a forward and a backward pass over rows of these lengths, (B,) each. The last token of a
        row is not read, and the head sees responses only. A product takes two more in the backward pass, or
        one where a factor is a frozen weight."""
        shape, tokens = self.shape, (prompts + responses - 1).double()  # (B,)
        matrices = 2 * shape.layers * shape.hidden * (shape.q_width + shape.kv_width)
        matrices += 3 * shape.dense_layers * shape.hidden * shape.intermediate
        chosen = shape.experts_per_token * shape.expert + shape.shared_expert + shape.hidden * shape.experts
        matrices += shape.sparse_layers * chosen
        # a query attends to its own and all earlier keys, and as many values
        attended = shape.layers * shape.q_width * float((tokens * (tokens + 1)).sum())
        head = shape.hidden * self.outputs * int(responses.sum())
        weights = 2 * (matrices * float(tokens.sum()) + head)
        return (2 if self.frozen else 3) * weights + 3 * (2 * attended)


class Utilization:
    """MFU of the updates of one process. `dtype` is the compute dtype."""

    def __init__(self, work: ModelWork | None, device: torch.device, dtype: torch.dtype):
        self._work, self._device, self._dtype = work, device, dtype

    def metric(self, batch: DataProto, seconds: float, *, passes: int, devices: int) -> Metric | None:
        """The MFU of `devices`, which share these rows, over `passes` updates on them; None: the model's
        FLOPs or the device's peak are not known."""
        peak = None if self._work is None else peak_flops(self._device, self._dtype)
        if self._work is None or peak is None:
            return None
        prompts, responses = (ragged.lengths(batch.get(name)) for name in ("prompts", "responses"))
        return mean(passes * self._work.update(prompts, responses) / (seconds * peak * devices))
