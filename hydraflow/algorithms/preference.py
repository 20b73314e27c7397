"""Losses over pairs of responses to one prompt, of which one is preferred.

In: rows in pairs, the preferred one first (rows 2i and 2i + 1), right padded to (B, R). Out: the sum over
the pairs of a micro-batch, divided by the pairs of the whole mini-batch, and metrics. A loss looks at both
rows of a pair and at nothing else, so no gradient depends on how whole pairs were split. To add a loss
of the score gap of a pair: a function here and a line in `PREFERENCE_LOSSES` of `config.py`. Left out on
purpose: other losses (KTO, ORPO, SimPO, CPO), and keeping pairs together (`engine/micro_batcher.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hydraflow import metrics
from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.config import PREFERENCE_LOSSES, BradleyTerryConfig, PreferenceConfig
from hydraflow.algorithms.token_terms import LossPart, ModelOutput, keep
from hydraflow.metrics import Metric


class Objective(Protocol):
    """A pairwise objective: a score for each row, and a loss for the two scores of a pair."""

    head: ClassVar[str]
    """The model's head: policy or value."""

    def token_scores(self, outputs: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Each token's contribution to the score of its row, in the shape of `outputs`: the model's
        log-probabilities or values, padded or flat."""

    def losses(self, scores: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """(P,) for scores (2P,) of pairs, the preferred row first."""


def sigmoid(gaps: Tensor, *, label_smoothing: float) -> Tensor:
    """Direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7),
    with the share e of wrong labels of cDPO (Mitchell 2023, https://ericmitchell.ai/cdpo.pdf).

        loss = -(1 - e) log sigmoid(gap) - e log sigmoid(-gap)
    """
    return -(1 - label_smoothing) * F.logsigmoid(gaps) - label_smoothing * F.logsigmoid(-gaps)


def ipo(gaps: Tensor, *, beta: float) -> Tensor:
    """IPO (Azar et al. 2023, https://arxiv.org/abs/2310.12036, equation 17).

    loss = (gap / beta - 1 / (2 beta))^2
    """
    return (gaps / beta - 1 / (2 * beta)) ** 2


@dataclass(frozen=True)
class DirectPreference:
    """A policy's preference for one row of a pair over the other, measured against a reference.

    score = beta * sum over the response of (logp - ref)
    gap   = score of the preferred row - score of the other
    loss  = that of PREFERENCE_LOSSES, (P,) of gaps (P,)
    """

    config: PreferenceConfig
    head: ClassVar[str] = "policy"

    def token_scores(self, outputs: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """`beta * (logp - ref)`; reads ref_log_prob."""
        return self.config.beta * (outputs - columns["ref_log_prob"])

    def losses(self, scores: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """(P,) of scores (2P,).

        >>> DirectPreference(PreferenceConfig()).losses(torch.tensor([1.0, 1.0]), {})  # log 2
        tensor([0.6931])
        >>> DirectPreference(PreferenceConfig(loss_type="ipo", beta=0.5)).losses(torch.tensor([2.0, 1.0]), {})
        tensor([1.])
        """
        return self._loss(scores[0::2] - scores[1::2])

    @cached_property
    def _loss(self) -> Any:
        return PREFERENCE_LOSSES[self.config.loss_type].bound(self.config)


@dataclass(frozen=True)
class BradleyTerry:
    """A reward model (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 1), with the margins of
    Llama 2 (Touvron et al. 2023, https://arxiv.org/abs/2307.09288, equation 2) and scores that are kept
    around 0 (Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244).

        loss = -log sigmoid(score of the preferred row - score of the other - margin)
               + center_rewards_coefficient * (sum of both scores)^2
    """

    config: BradleyTerryConfig
    head: ClassVar[str] = "value"

    def token_scores(self, outputs: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The values. Only the row's last token has mask 1, so its value is the row's score."""
        return outputs

    def losses(self, scores: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """(P,) of scores (2P,); reads the margin of the preferred row, if there is one.

        >>> BradleyTerry(BradleyTerryConfig()).losses(torch.tensor([3.0, 1.0]), {"margin": torch.ones(2) * 2})
        tensor([0.6931])
        """
        chosen, rejected = scores[0::2], scores[1::2]
        margin = columns["margin"][0::2] if "margin" in columns else 0.0
        found = -F.logsigmoid(chosen - rejected - margin)
        if weight := self.config.center_rewards_coefficient:
            found = found + weight * (chosen + rejected) ** 2
        return found


@dataclass(frozen=True)
class PairLoss:
    """loss = sum of the objective's losses / pairs of the mini-batch. Metrics are means over pairs."""

    denominators: Denominators
    """Counts of the whole mini-batch, over all data ranks; each of its rows has a trained token."""
    objective: Objective

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> LossPart:
        outputs = output.log_probs if self.objective.head == "policy" else output.values
        assert outputs is not None, f"the loss needs the outputs of a {self.objective.head} model"
        scores = keep(self.objective.token_scores(outputs, columns), columns["response_mask"]).sum(1)  # (B,)
        losses = self.objective.losses(scores, columns)
        loss = losses.sum() / max(self.denominators.sequences / 2, 1.0)
        return loss, pair_metrics("train", losses, scores)


@torch.no_grad()
def pair_metrics(prefix: str, losses: Tensor, scores: Tensor) -> dict[str, Metric]:
    """Means over pairs: loss, fraction of pairs in which the preferred row has the higher score, score gap,
    and both scores. losses: (P,); scores: (2P,), in DPO the implicit rewards."""
    chosen, rejected = scores.double()[0::2], scores.double()[1::2]
    columns = {
        "loss": losses.double(),
        "accuracy": (chosen > rejected).double(),
        "margin": chosen - rejected,
        "chosen_score": chosen,
        "rejected_score": rejected,
    }
    means = torch.stack([column.mean() for column in columns.values()]).tolist()
    return {
        f"{prefix}/{name}": metrics.mean(value, weight=len(losses)) for name, value in zip(columns, means)
    }
