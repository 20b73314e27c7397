"""Model FLOPs utilization (MFU) of updates, and of the passes without gradients between them.

In: the rows and the seconds. Out: a share of the peak. Only what the model needs is counted (Chowdhery et al.
2022, https://arxiv.org/abs/2204.02311, appendix B): recomputed activations and padded tokens do not count, a
prompt that neighbouring rows share counts for each of them. Left out on purpose: types of models whose
matrices are not known exactly (`memory/shape.py`), sliding windows, and generation, which memory bandwidth
limits (`perf/throughput` describes it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    def update(self, prompts: Tensor, responses: Tensor) -> float:
        """FLOPs of a forward and a backward pass over rows of these lengths, (B,) each. A product takes two
        more in the backward pass, or one where a factor is a frozen weight."""
        weights, attended = self._products(prompts, responses)
        return (2 if self.frozen else 3) * weights + 3 * attended

    def forward(self, prompts: Tensor, responses: Tensor) -> float:
        """FLOPs of a forward pass; the last token of a row is not read, and the head sees responses only."""
        return sum(self._products(prompts, responses))

    def _products(self, prompts: Tensor, responses: Tensor) -> tuple[float, float]:
        """FLOPs of a forward pass: of products with weights, and of queries with keys and values."""
        shape, tokens = self.shape, (prompts + responses - 1).double()  # (B,)
        matrices = 2 * shape.layers * shape.hidden * (shape.q_width + shape.kv_width)
        matrices += 3 * shape.dense_layers * shape.hidden * shape.intermediate
        chosen = shape.experts_per_token * shape.expert + shape.shared_expert + shape.hidden * shape.experts
        matrices += shape.sparse_layers * chosen
        # a query attends to its own and all earlier keys, and as many values
        attended = shape.layers * shape.q_width * float((tokens * (tokens + 1)).sum())
        head = shape.hidden * self.outputs * int(responses.sum())
        return 2 * (matrices * float(tokens.sum()) + head), 2 * attended


class Utilization:
    """MFU of one process. `dtype` is the compute dtype; `devices` share the work on a row. Nothing is
    reported if `work` or the device's peak is not known."""

    def __init__(self, work: ModelWork | None, device: torch.device, dtype: torch.dtype, devices: int):
        self._work, self._device, self._dtype, self._devices = work, device, dtype, devices
        self._done: dict[str, tuple[float, float]] = {}
        """FLOPs and seconds of what has not been reported yet, by name."""

    def note(self, name: str, rows: DataProto, seconds: float, *, updates: int = 0) -> None:
        """Notes `updates` updates on these rows, or if there are none a pass without gradients over them.
        Replaces what was noted under this name."""
        if self._work is not None:
            lengths = ragged.lengths(rows.get("prompts")), ragged.lengths(rows.get("responses"))
            flops = updates * self._work.update(*lengths) if updates else self._work.forward(*lengths)
            self._done[name] = flops, seconds

    def metrics(self) -> dict[str, Metric]:
        """`perf/mfu/<name>` of all that was noted since the last call."""
        done, self._done = self._done, {}
        peak = peak_flops(self._device, self._dtype) if done else None
        if peak is None:
            return {}
        return {
            f"perf/mfu/{name}": mean(flops / (lasted * peak * self._devices))
            for name, (flops, lasted) in done.items()
        }
