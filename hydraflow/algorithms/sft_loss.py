"""The loss of supervised training: negative log-likelihood, mean over the trained tokens of the whole
mini-batch.

In: a forward pass over a micro-batch and its `response_mask`, right padded to (B, R). Out: this micro-batch's
part of the loss (parts add up), and a metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.token_terms import LossPart, ModelOutput, keep, token_metrics


@dataclass(frozen=True)
class SFTLoss:
    """loss = -sum of log-probabilities of trained tokens / trained tokens of the mini-batch.

    Its metric is the mean per token, weighted by tokens: it merges exactly over micro-batches, ranks and
    steps.
    """

    denominators: Denominators
    """Counts of the whole mini-batch, over all data ranks."""

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> LossPart:
        assert output.log_probs is not None, "the loss needs log-probabilities"
        mask = columns["response_mask"]
        loss = -keep(output.log_probs, mask).sum() / max(self.denominators.tokens, 1.0)
        return loss, token_metrics(mask, {"train/loss": -output.log_probs}, {})
