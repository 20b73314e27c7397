"""Model FLOPs utilization (MFU) of updates, and of the passes without gradients between them.

In: the rows and the seconds. Out: a share of the peak. Only what the model needs is counted (Chowdhery et al.
2022, https://arxiv.org/abs/2204.02311, appendix B): recomputed activations, padded tokens and keys that a
query does not see do not count, a prompt that neighbouring rows share counts for each of them. Left out on
purpose: types of models that `models/flops.py` does not know, and generation, which memory bandwidth limits
(`perf/throughput` describes it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydraflow.device import peak_flops
from hydraflow.metrics import Metric, mean
from hydraflow.models.config import ModelConfig
from hydraflow.models.flops import LayerFlops, layer_flops
from hydraflow.models.loading import load_config
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


@dataclass(frozen=True)
class ModelWork:
    """FLOPs of a model's passes."""

    layers: LayerFlops
    head: int
    """FLOPs of one token with the output matrix."""
    frozen: bool
    """Only adapters are trained, so weights get no gradient."""

    @staticmethod
    def of(model: ModelConfig, head: str, field: str) -> ModelWork | None:
        """None: the products of this model type are not known."""
        config = load_config(model, field=field).get_text_config()
        layers = layer_flops(config)
        if layers is None:
            return None
        outputs = config.vocab_size if head == "policy" else 1
        return ModelWork(layers, 2 * config.hidden_size * outputs, model.lora_rank > 0)

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
        tokens = (prompts + responses - 1).double()  # (B,)
        weights = self.layers.per_token * float(tokens.sum()) + self.head * int(responses.sum())
        attended = sum(flops * _pairs(tokens, window) for window, flops in self.layers.per_pair.items())
        return weights, attended


def _pairs(tokens: Tensor, window: int | None) -> float:
    """Pairs of a query with a key that it sees, in rows of these lengths, (B,): its own and all earlier ones,
    or the last `window` of them.

    >>> _pairs(torch.tensor([4.0]), None), _pairs(torch.tensor([4.0]), 2)  # 1 + 2 + 3 + 4, 1 + 2 + 2 + 2
    (10.0, 7.0)
    """
    beyond = torch.zeros_like(tokens) if window is None else (tokens - window).clamp(min=0)
    return float((tokens * (tokens + 1) - beyond * (beyond + 1)).sum()) / 2


class Utilization:
    """MFU of one process. `dtype` is that of the products; `devices` share the work on a row. Nothing is
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
