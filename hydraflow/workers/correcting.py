"""Corrects a mini-batch before its optimizer step: rejects tokens, and normalizes importance weights.

In: one data rank's rows of a mini-batch. Out: the rows with a smaller `response_mask`, from which the
denominators are counted, and with `rollout_is_weights`. The sums behind a mean weight run over all data
ranks, so nothing depends on how rows were split. Left out on purpose: weights that depend only on their
row, which the loss computes (`algorithms/actor_loss.py`).

If the ratio is that of the policy being trained, its log-probabilities come from a forward pass over the
mini-batch, because rejections must be known before the gradient's first micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hydraflow.algorithms.correction import Correction
from hydraflow.algorithms.correction_metrics import PREFIX, correction_metrics
from hydraflow.algorithms.token_terms import keep
from hydraflow.engine.base import TrainEngine
from hydraflow.metrics import Metric, mean
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import from_parts, parts, to_padded


@dataclass(frozen=True)
class Corrector:
    """A correction of whole mini-batches."""

    correction: Correction
    engine: TrainEngine
    log_probs: Callable[[DataProto], Tensor]
    """Log-probabilities of the responses under the current weights, ragged (B, R)."""

    def __call__(self, rows: DataProto) -> tuple[DataProto, dict[str, Metric]]:
        """The corrected rows, and metrics. Every data rank calls it at the same time."""
        of_current = self.correction.of_current_policy
        trained = self.log_probs(rows) if of_current else rows.get("old_log_probs")
        mask = _padded(rows.get("response_mask")).bool()
        logp, sampled = (
            keep(_padded(column).double(), mask) for column in (trained, rows.get("rollout_log_probs"))
        )
        metrics = correction_metrics(self.correction, logp, sampled, mask)
        kept = self.correction.kept(logp - sampled, mask)
        changed = {"response_mask": _ragged(kept, rows.get("response_mask"))}
        if self.correction.weighting is not None:
            weights, factor = self._weights(logp - sampled, kept)
            changed["rollout_is_weights"] = _ragged(weights, trained)
            metrics |= factor
        return rows.with_columns(changed), metrics

    def _weights(self, log_ratio: Tensor, kept: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        """Weights (B, R), and as a metric the mean that they were divided by, if they are normalized."""
        weighting = self.correction.weighting
        assert weighting is not None, "there are weights"
        weights = weighting.weights(weighting.ratios(log_ratio))
        if not weighting.normalized:
            return weights, {}
        total, count = self.engine.reduce(
            torch.tensor(weighting.total(weights, kept), dtype=torch.float64)
        ).tolist()
        factor = total / count if total else 1.0
        return weights / factor, {f"{PREFIX}/rollout_is_batch_norm_factor": mean(factor)}


def _padded(column: Tensor) -> Tensor:
    # at least one token wide: the maximum over an empty dimension is an error
    return to_padded(column, max(1, int(ragged.lengths(column).max())))


def _ragged(values: Tensor, like: Tensor) -> Tensor:
    """Padded `values` (B, R) as a ragged column with the row lengths and dtype of `like`."""
    given, lengths = parts(like)
    inside = torch.arange(values.shape[1]) < lengths[:, None]
    return from_parts(values[inside].to(given.dtype), lengths)
