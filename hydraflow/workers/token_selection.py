"""Selects tokens of a mini-batch before its optimizer step, for losses that treat a few of them differently.

In: one data rank's rows of a mini-batch. Out: the rows with `chosen_tokens`. Means and the selection span all
data ranks, and each token's random draw is tied to its trajectory, so the result does not depend on how rows
are split. Log-probabilities are those of the policy being trained, from a forward pass over the mini-batch.
Left out on purpose: the mathematics (`algorithms/covariance.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from torch import Tensor

from hydraflow.algorithms.covariance import TokenChoice, covariances, moments, number_chosen
from hydraflow.engine.base import TrainEngine
from hydraflow.metrics import Metric
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import from_parts, parts


@dataclass(frozen=True)
class TokenSelector:
    """Selects tokens for each optimizer step of one training step."""

    choice: TokenChoice
    engine: TrainEngine
    log_probs: Callable[[DataProto], Tensor]
    """Log-probabilities of the responses under the current weights, ragged (B, R)."""
    seed: tuple[int, int]
    """Seed of the draws: the run's seed and the training step."""
    _numbers: count[int] = field(default_factory=count)
    """Number of optimizer steps so far."""

    def __call__(self, rows: DataProto) -> tuple[DataProto, dict[str, Metric]]:
        """The rows with `chosen_tokens`, and no metrics. Every data rank calls it at the same time."""
        mask, lengths = parts(rows.get("response_mask"))
        trained = mask.bool()
        logp, advantages = (
            parts(column)[0].double()[trained] for column in (self.log_probs(rows), rows.get("advantages"))
        )
        draws = self._draws(rows, lengths)[trained]
        total = self.engine.reduce(moments(logp, advantages))
        chosen = torch.zeros_like(trained)
        if total[0]:
            scores, share = self.choice(covariances(logp, advantages, total), draws)
            score, draw = self._last(scores, draws, number_chosen(share, int(total[0])))
            chosen[trained] = (scores > score) | ((scores == score) & (draws >= draw))
        return rows.with_columns({"chosen_tokens": from_parts(chosen, lengths)}), {}

    def _draws(self, rows: DataProto, lengths: Tensor) -> Tensor:
        """(N,) float64 random draws; a row's draws do not depend on its rank."""
        number = next(self._numbers)
        ids = zip(rows.get("group").tolist(), rows.get("sample").tolist(), lengths.tolist())
        drawn = [
            np.random.default_rng([*self.seed, number, group, sample]).random(length)
            for group, sample, length in ids
        ]
        return torch.from_numpy(np.concatenate(drawn))

    def _last(self, scores: Tensor, draws: Tensor, wanted: int) -> tuple[float, float]:
        """Score and draw of the last selected token: tokens of all ranks are ordered by score, ties (of equal
        responses) by draw, and the first `wanted` are selected, or fewer if there are no more."""
        # only this rank's `wanted` largest, with ties, can be among those of all ranks
        possible = scores[scores > -torch.inf]
        least = possible.topk(min(wanted, len(possible))).values[-1:]  # empty: this rank has none
        is_candidate = scores >= (least if len(least) else torch.inf)
        mine = torch.stack([scores, draws])[:, is_candidate]  # (2, candidates)
        place = self.engine.coordinates()
        counts = torch.zeros(place.data_size, dtype=torch.float64)
        counts[place.data_rank] = mine.shape[1]
        ends = self.engine.reduce(counts).cumsum(0).long()
        everyone = torch.zeros(2, int(ends[-1]), dtype=torch.float64)
        if not everyone.shape[1]:
            return torch.inf, 0.0
        end = int(ends[place.data_rank])
        everyone[:, end - mine.shape[1] : end] = mine
        every_score, every_draw = self.engine.reduce(everyone).numpy()
        last = np.lexsort((every_draw, every_score))[::-1][:wanted][-1]
        return float(every_score[last]), float(every_draw[last])
