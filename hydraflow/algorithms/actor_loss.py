"""The actor's loss: policy loss minus an entropy bonus plus a KL penalty against the reference.

In: a forward pass over a micro-batch and its columns, right padded to (B, R). Out: this micro-batch's part of
the mini-batch's loss (parts add up), and metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hydraflow import metrics
from hydraflow.algorithms.aggregate import Denominators, token_weights
from hydraflow.algorithms.correction import Correction
from hydraflow.algorithms.correction_metrics import correction_metrics
from hydraflow.algorithms.distillation.terms import Distillation
from hydraflow.algorithms.kl import KL_ESTIMATORS
from hydraflow.algorithms.policy_loss import PolicyLoss, bounded_log_ratio
from hydraflow.algorithms.token_terms import LossPart, ModelOutput, TokenInputs, keep, token_metrics
from hydraflow.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class ActorLoss:
    """loss = sum of weights * (policy loss - entropy_coeff * entropy + kl_coef * KL + distillation), for one
    mini-batch.

    Columns read: response_mask, old_log_probs, advantages; and, with
    - `kl_coef`: ref_log_prob;
    - `distillation`: teacher_log_probs, or teacher_top_log_probs for a loss over the vocabulary;
    - `correction`: rollout_log_probs, or rollout_is_weights if it needs the mini-batch;
    - a policy loss that selects tokens: chosen_tokens;
    - `loss_columns`: the columns that it names.

    Metrics: actor/pg_loss and actor/kl_loss are sums (parts of the mini-batch's loss), the others means over
    tokens; actor/ppo_kl is the mean of `old_log_probs - log_probs`.
    """

    denominators: Denominators
    """Counts of the whole mini-batch, over all data ranks."""
    scale_factor: float
    """Divisor of seq-mean-token-sum-norm; unused in other modes."""
    policy_loss: PolicyLoss
    loss_columns: tuple[str, ...] = ()
    """Columns that the policy loss takes by name."""
    old_is_this_pass: bool = False
    """Fully on-policy: this pass's own log-probabilities are the old ones; old_log_probs is not read."""
    agg_mode: str = "token-mean"
    """A name of LOSS_AGG_MODES."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus; if it is not 0, `output.entropy` is required."""
    kl_coef: float | None = None
    """Weight of the KL penalty; None: no KL term."""
    kl_type: str = "low_var_kl"
    """A name of KL_ESTIMATORS."""
    distillation: Distillation | None = None
    """Distillation term; None: there is none, or it is part of the advantages."""
    correction: Correction | None = None
    """Rollout correction of the policy loss; its whole-mini-batch part ran before
    (`workers/correcting.py`)."""

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> LossPart:
        assert output.log_probs is not None, "the actor's loss needs log-probabilities"
        mask = columns["response_mask"]
        logp = keep(output.log_probs, mask)  # (B, R)
        # detached: the ratio is then exactly 1 but keeps its gradient
        old_logp = logp.detach() if self.old_is_this_pass else keep(columns["old_log_probs"], mask)
        advantages = keep(columns["advantages"], mask)
        weights = token_weights(mask, self.agg_mode, self.denominators, self.scale_factor, dtype=logp.dtype)
        chosen = columns["chosen_tokens"] & mask.bool() if "chosen_tokens" in columns else None
        tokens = TokenInputs(logp, old_logp, advantages, mask, chosen)
        terms = self.policy_loss(tokens, **{name: keep(columns[name], mask) for name in self.loss_columns})
        stats = {"actor/ppo_kl": -bounded_log_ratio(tokens).detach()} | terms.stats
        importance, found = self._importance(columns, logp, old_logp)
        policy = keep(terms.loss, mask)
        if importance is not None:
            policy = policy * importance
        loss = (policy * weights).sum()
        sums = {"actor/pg_loss": loss}
        if self.distillation is not None:
            distilled, mass = self._distilled(self.distillation, logp, output, columns)
            stats |= mass
            task = sums if self.distillation.config.use_task_rewards else {}
            sums = {**task, "actor/distillation_loss": (distilled * weights).sum()}
            loss = sums["actor/distillation_loss"] + (loss if task else 0.0)
        if output.entropy is not None:
            stats["actor/entropy"] = output.entropy
        if self.entropy_coeff:
            assert output.entropy is not None, "entropy_coeff needs the entropy"
            loss = loss - self.entropy_coeff * (keep(output.entropy, mask) * weights).sum()
        if self.kl_coef is not None:
            kl = KL_ESTIMATORS[self.kl_type](logp, keep(columns["ref_log_prob"], mask))
            sums["actor/kl_loss"] = (kl * weights).sum()
            loss = loss + self.kl_coef * sums["actor/kl_loss"]
            found["actor/kl_coef"] = metrics.mean(self.kl_coef)
        return loss, token_metrics(mask, stats, sums) | found

    def _distilled(
        self, distillation: Distillation, logp: Tensor, output: ModelOutput, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Distillation terms (B, R), and metrics: the probability mass of the compared tokens."""
        mask = columns["response_mask"]
        if not distillation.config.over_vocabulary:
            return distillation.terms(logp, keep(columns["teacher_log_probs"], mask)), {}
        assert output.target_log_probs is not None, "this distillation loss needs target_log_probs"
        each = mask[..., None]
        policy, teacher = keep(output.target_log_probs, each), keep(columns["teacher_top_log_probs"], each)
        mass = {"policy": policy.detach(), "teacher": teacher}
        stats = {f"actor/distillation_{name}_mass": one.exp().sum(-1) for name, one in mass.items()}
        return distillation.divergences(policy, teacher), stats

    def _importance(
        self, columns: Mapping[str, Tensor], logp: Tensor, old_logp: Tensor
    ) -> tuple[Tensor | None, dict[str, Metric]]:
        """Importance weights (B, R) of the policy loss, detached, or None; and metrics."""
        if self.correction is None:
            return None, {}
        weighting, mask = self.correction.weighting, columns["response_mask"]
        if self.correction.needs_mini_batch:
            return None if weighting is None else keep(columns["rollout_is_weights"], mask), {}
        trained = logp.detach() if self.correction.of_current_policy else old_logp
        sampled = keep(columns["rollout_log_probs"], mask)
        found = correction_metrics(self.correction, trained, sampled, mask)
        return None if weighting is None else weighting.weights(weighting.ratios(trained - sampled)), found
