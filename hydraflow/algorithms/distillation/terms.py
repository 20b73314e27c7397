"""On-policy distillation (Agarwal et al. 2024, https://arxiv.org/abs/2306.13649; Gu et al. 2024,
https://arxiv.org/abs/2306.08543): pulls the policy towards a teacher at every token that the policy sampled.

    term = coefficient * estimate of KL(policy || teacher)    of `kl.py`, on the sampled tokens
    term = coefficient * divergence of the two                of `divergence.py`, over the vocabulary

In: log-probabilities of both. Out: the term per token, for the loss; or the negative estimate, for the
advantages. With k1 the policy gradient of those is that of the KL. (With another estimate k, the mean of
k grad log p lacks the mean of grad k; with k3 it is only of second order where the two are close.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from hydraflow.algorithms.distillation.config import DIVERGENCES, DistillationLossConfig
from hydraflow.algorithms.distillation.divergence import with_rest
from hydraflow.algorithms.kl import KL_ESTIMATORS


@dataclass(frozen=True)
class Distillation:
    """The distillation loss with its settings."""

    config: DistillationLossConfig
    """Terms are `divergences` if it is `over_vocabulary`, else `terms`."""

    def terms(self, logp: Tensor, teacher: Tensor) -> Tensor:
        """Terms of the loss, in the shape of both.

        >>> import torch
        >>> mine, theirs = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
        >>> config = DistillationLossConfig(loss_mode="k1", distillation_loss_coef=2.0)
        >>> Distillation(config).terms(mine, theirs)  # 2 log 2
        tensor([1.3863])
        """
        return self._limited(KL_ESTIMATORS[self.config.loss_mode](logp, teacher))

    def divergences(self, policy: Tensor, teacher: Tensor) -> Tensor:
        """Terms of the loss (...) from log-probabilities of K tokens (..., K).

        >>> import torch
        >>> mine, theirs = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
        >>> config = DistillationLossConfig(loss_mode="reverse_kl_topk")
        >>> Distillation(config).divergences(mine, theirs)  # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75)
        tensor(0.1438)
        """
        both = [with_rest(one) for one in (policy, teacher)]
        if (least := self.config.log_prob_min_clamp) is not None:
            both = [one.clamp(min=least) for one in both]
        return self._limited(self._divergence(*both))

    def advantages(self, task: Tensor, logp: Tensor, teacher: Tensor) -> Tensor:
        """The task's advantages, or 0 without `use_task_rewards`, less the estimates."""
        return (task if self.config.use_task_rewards else 0.0 * task) - self.terms(logp, teacher)

    @cached_property
    def _divergence(self) -> Any:
        return DIVERGENCES[self.config.loss_mode].bound(self.config)

    def _limited(self, estimate: Tensor) -> Tensor:
        if (limit := self.config.loss_max_clamp) is not None:
            estimate = estimate.clamp(-limit, limit)
        return self.config.distillation_loss_coef * estimate
