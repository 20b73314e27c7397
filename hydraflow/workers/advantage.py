"""Turns scores into advantages for a whole step at once, so that group and batch statistics are exact.

In: trajectories with scores, and log-probabilities and values where the method uses them. Out:
`token_level_rewards`, `advantages`, `returns`, and the step's data metrics. The columns come from the object
store, not through the controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hydraflow.algorithms.advantages import estimate_advantages
from hydraflow.algorithms.config import ESTIMATORS, AlgorithmConfig, compares_groups
from hydraflow.algorithms.diagnostics import probs_diff_name, rollout_probs_diff
from hydraflow.algorithms.distillation.terms import Distillation
from hydraflow.algorithms.groups import Groups
from hydraflow.algorithms.kl import kl_penalty
from hydraflow.algorithms.kl_control import KLController
from hydraflow.algorithms.running import RunningMoments
from hydraflow.algorithms.samples import numbered
from hydraflow.algorithms.shaping import OverlongBuffer, shape_scores
from hydraflow.algorithms.token_terms import keep
from hydraflow.algorithms.trained_tokens import row_sums
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.worker import ProcessContext, Worker
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.fields import FINISH_REASONS
from hydraflow.protocol.ragged import from_parts, parts


@dataclass(frozen=True)
class AdvantageSpec:
    """Constructor arguments of an AdvantageWorker."""

    algorithm: AlgorithmConfig
    response_tokens: int
    """Longest response, for `response_length/clip_ratio`."""
    drop_failed: bool = True
    """Leave out rows that the reward function failed on."""
    needs_function: bool = True
    """Rows that the reward function failed on have no score; False: a reward model scores them, or they learn
    from teachers alone."""
    overlong: OverlongBuffer | None = None
    """Penalty for long responses; None: no penalty."""
    distillation: Distillation | None = None
    """Distillation as a part of the advantages; None: none, or it is a term of the loss."""


@dataclass(frozen=True)
class RolloutComparison:
    """Compares the generation engine's probabilities of the trained tokens with the trainer's; empty if no
    token is trained."""

    metrics: dict[str, float]
    of_replicas: dict[str, float]
    """Metrics of each generation process."""
    by_replica: dict[int, float]
    """Mean difference of the probabilities, by generation process."""


class AdvantageWorker(Worker):
    """Computes advantages; holds the KL controller and the running moments of scores. On rank 0 only."""

    def __init__(self, process: ProcessContext, spec: AdvantageSpec):
        super().__init__(process)
        self.spec = spec
        self.kl = KLController(spec.algorithm.kl_ctrl)
        self.scores = RunningMoments()

    @register(dispatch_mode=Dispatch.RANK_ZERO, read_only=True)
    def compute(self, batch: DataProto, scored: DataProto) -> DataProto:
        """From `score` in `scored`: `advantages` and `returns` of the rows that are trained on.

        `meta_info["metrics"]` describes the step's data, `meta_info["state"]` is the state for
        `load_state_dict`. `meta_info["unscored"]` counts the rows without a score, `meta_info["left_out"]`
        lists the excluded rows: faulted ones, those without a score unless failures are scored, and the last
        remaining sample of a group, which has nothing to be compared with.
        """
        reasons = batch.get("finish_reason")
        no_number = ~_are_numbers(scored)
        failed = scored.get("failed") | no_number
        unscored = failed if self.spec.needs_function else no_number
        unusable = is_faulted(reasons) | (unscored if self.spec.drop_failed else no_number)
        if compares_groups(self.spec.algorithm):
            unusable = unusable | is_without_peers(batch.get("group"), batch.get("sample"), unusable)
        left_out = unusable.nonzero()[:, 0].tolist()
        if left_out:
            batch, scored = batch.select_idxs(~unusable), scored.select_idxs(~unusable)
        answer = self._compute(batch, scored) if len(batch) else DataProto(meta_info={"metrics": {}})
        answer.meta_info["metrics"] |= count_ends(reasons) | {"reward/failed_rows": float(failed.sum())}
        state = {"kl": self.kl.state_dict(), "scores": self.scores.state_dict()}
        answer.meta_info |= {"state": state, "left_out": left_out, "unscored": int(unscored.sum())}
        return answer

    def _compute(self, batch: DataProto, scored: DataProto) -> DataProto:
        algorithm = self.spec.algorithm
        columns, (mask, lengths) = batch.flat_columns(), parts(batch.get("response_mask"))
        mask, values = mask.bool(), columns.get("values")
        metrics: dict[str, float] = {}
        given: dict[str, Any] = dict(scored.items())
        scores = given["score"]
        shaped = self._shaped(batch, given, lengths)
        rewards, totals = on_last_trained_token(shaped, mask, lengths), shaped
        if algorithm.use_kl_in_reward:
            penalty, metrics = self._kl_penalty(columns, mask, lengths)
            rewards, totals = rewards - penalty, (shaped - row_sums(penalty, lengths)).to(scores.dtype)
        advantages, returns = estimate_advantages(
            algorithm,
            totals,
            rewards,
            mask,
            lengths,
            values=values,
            group_ids=batch.get("group"),
            samples=batch.get("sample"),
            reward_baselines=given.get("reward_baselines"),
            reward_parts=given.get("reward_parts"),
            old_log_probs=columns.get("old_log_probs"),
            sum_pi_squared=columns.get("sum_pi_squared"),
        )
        if self.spec.distillation is not None:
            logp, teacher = (keep(columns[name], mask) for name in ("old_log_probs", "teacher_log_probs"))
            advantages = self.spec.distillation.advantages(advantages, logp, teacher)
        metrics |= _data_metrics(scores, totals, advantages, returns, values, mask)
        metrics |= self._reward_metrics(shaped, batch.get("group"), given, lengths)
        metrics |= spread("response_length", lengths)
        metrics["response_length/clip_ratio"] = float((lengths >= self.spec.response_tokens).float().mean())
        metrics |= spread("prompt_length", parts(batch.get("prompts"))[1])
        return DataProto.from_dict(
            tensors={
                "token_level_rewards": from_parts(rewards.float(), lengths),
                "advantages": from_parts(advantages.float(), lengths),
                "returns": from_parts(returns.float(), lengths),
            },
            meta_info={"metrics": metrics},
        )

    def _reward_metrics(
        self, shaped: torch.Tensor, group: torch.Tensor, given: Mapping[str, Any], lengths: torch.Tensor
    ) -> dict[str, float]:
        """Metrics of groups, overlong penalties and GDPO's rewards, where the run has them."""
        algorithm, metrics = self.spec.algorithm, dict[str, float]()
        if ESTIMATORS[algorithm.adv_estimator].groups:
            metrics |= _group_metrics(shaped, group)
        if self.spec.overlong is not None and self.spec.overlong.log:
            penalties = self.spec.overlong.penalty(lengths)
            metrics |= spread("critic/overlong_reward", penalties)
            metrics["critic/overlong"] = float((penalties < 0).float().mean())
        if ESTIMATORS[algorithm.adv_estimator].several_rewards:
            for name, reward in zip(algorithm.gdpo_reward_keys or (), given["reward_parts"].unbind(1)):
                metrics |= spread(f"gdpo/{name}", reward)
        return metrics

    @register(dispatch_mode=Dispatch.RANK_ZERO, read_only=True)
    def compare_with_rollout(self, batch: DataProto) -> RolloutComparison:
        """Compares `old_log_probs` with `rollout_log_probs`; adds the sampling policy's entropy per token, if
        the batch has it."""
        columns = batch.flat_columns()
        mask, lengths = columns["response_mask"].bool(), parts(batch.get("response_mask"))[1]
        if not mask.any():
            return RolloutComparison({}, {}, {})
        ours, theirs = columns["old_log_probs"], columns["rollout_log_probs"]
        replica = torch.repeat_interleave(batch.get("replica"), lengths)[mask]  # (trained tokens,)
        gap = (ours[mask].double().exp() - theirs[mask].double().exp()).abs()
        entropy = {"actor/entropy": float(columns["entropys"][mask].mean())} if "entropys" in columns else {}
        of_replica = {int(number): gap[replica == number] for number in replica.unique()}
        by_replica = {number: float(gaps.mean()) for number, gaps in of_replica.items()}
        metrics = rollout_probs_diff(ours, theirs, mask) | entropy
        means = {probs_diff_name("mean", number): value for number, value in by_replica.items()}
        greatest = {probs_diff_name("max", number): float(gaps.max()) for number, gaps in of_replica.items()}
        return RolloutComparison(metrics, means | greatest, by_replica)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Restores the KL controller and the moments of scores; an empty state changes nothing."""
        if state["kl"]:
            self.kl.load_state_dict(state["kl"])
        if state["scores"]:
            self.scores.load_state_dict(state["scores"])

    def _shaped(self, batch: DataProto, given: Mapping[str, Any], lengths: torch.Tensor) -> torch.Tensor:
        """The scores (B,), shaped as the configuration says."""
        scores = given["score"]
        accuracies = given.get("acc", scores)
        return shape_scores(
            self.spec.algorithm,
            scores,
            lengths=lengths,
            right=torch.where(accuracies.isnan(), scores, accuracies) > 0,
            group_ids=batch.get("group"),
            samples=batch.get("sample"),
            seen=self.scores,
            overlong=self.spec.overlong,
        )

    def _kl_penalty(
        self, columns: dict[str, torch.Tensor], mask: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The KL penalty (N,) to subtract from the rewards, and its metrics; updates the KL controller."""
        coefficient, kind = self.kl.value, self.spec.algorithm.kl_penalty
        old, ref = columns["old_log_probs"], columns["ref_log_prob"]
        penalty, kl = kl_penalty(old, ref, mask, lengths, kind=kind)
        self.kl.update(kl, len(lengths))
        metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
        return coefficient * penalty, metrics


def on_last_trained_token(scores: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Scores (B,) as rewards (N,), each on the row's last token that the mask (N,) selects; if it selects
    none, on the row's last token.

    >>> mask = torch.tensor([1, 1, 0, 0, 0])
    >>> on_last_trained_token(torch.tensor([0.5, 2.0, 3.0]), mask, torch.tensor([3, 2, 0]))
    tensor([0.0000, 0.5000, 0.0000, 0.0000, 2.0000])
    """
    ends = lengths.cumsum(0)
    trained = torch.cat([torch.tensor([-1]), mask.nonzero().squeeze(1)])  # (1 + trained tokens,)
    # the last trained token before the row's end, which may be in an earlier row
    last = trained[torch.searchsorted(trained, ends) - 1]
    last = torch.where(last >= ends - lengths, last, ends - 1)
    filled = lengths > 0
    return scores.new_zeros(len(mask)).index_put_((last[filled],), scores[filled])


def _are_numbers(scored: DataProto) -> torch.Tensor:
    """Which rows (B,) have only finite numbers in the score columns."""
    finite = torch.isfinite(scored.get("score"))
    if "reward_baselines" in scored.keys():
        finite = finite & torch.isfinite(scored.get("reward_baselines"))
    if "reward_parts" in scored.keys():
        finite = finite & torch.isfinite(scored.get("reward_parts")).all(1)
    return finite


def is_faulted(reasons: torch.Tensor) -> torch.Tensor:
    """Which rows (B,) ended by a fault."""
    return reasons == FINISH_REASONS.index("fault")


def is_without_peers(group: torch.Tensor, sample: torch.Tensor, unusable: torch.Tensor) -> torch.Tensor:
    """Which rows (B,) belong to the only usable sample of a group that had several.

    >>> group, sample = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 0, 0, 1])
    >>> is_without_peers(group, sample, torch.tensor([True, False, False, False, False])).tolist()
    [False, True, False, False, False]
    """
    if not unusable.any():
        return unusable
    index, of_sample = numbered(group, sample)
    usable = torch.zeros(len(of_sample)).index_add(0, index, (~unusable).float()) > 0
    before = torch.bincount(of_sample)
    after = torch.bincount(of_sample[usable], minlength=len(before))
    alone: torch.Tensor = ((before > 1) & (after == 1))[of_sample[index]]
    return alone & ~unusable


def count_ends(reasons: torch.Tensor) -> dict[str, float]:
    """Numbers of rows that ended at the token limit and by a fault."""
    truncated = (reasons == FINISH_REASONS.index("length")).sum()
    return {
        "rollout/truncated_rows": float(truncated),
        "rollout/faulted_rows": float(is_faulted(reasons).sum()),
    }


def _data_metrics(
    scores: torch.Tensor,
    totals: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor | None,
    mask: torch.Tensor,
) -> dict[str, float]:
    """Mean, max and min of each under verl's names. `scores` and `totals` are per row (B,), the others per
    token (N,), of which only those that the mask selects count."""
    returns = returns[mask]
    columns = {
        "critic/score": scores,
        "critic/rewards": totals,
        "critic/advantages": advantages[mask],
        "critic/returns": returns,
    }
    metrics: dict[str, float] = {}
    if values is not None:
        columns["critic/values"] = values = values[mask]
        if len(values) > 1:
            unexplained = (returns - values).var()
            metrics["critic/vf_explained_var"] = float(1.0 - unexplained / (returns.var() + 1e-5))
    for name, column in columns.items():
        metrics |= spread(name, column)
    return metrics


def _group_metrics(scores: torch.Tensor, ids: torch.Tensor) -> dict[str, float]:
    """The share of groups (the responses to one prompt) whose scores are all equal, so that they give no
    learning signal. Single rows do not count as groups; {} if there are no others."""
    groups = Groups(ids)
    of_row = (groups.size > 1) / groups.size  # a group's rows count as one
    if not of_row.any():
        return {}
    share = (of_row * (groups.std(scores) == 0)).sum() / of_row.sum()
    return {"critic/groups/no_signal_ratio": float(share)}


def spread(name: str, column: torch.Tensor) -> dict[str, float]:
    """Mean, max and min, named `<name>/mean` and so on; {} for an empty column."""
    column = column.float()
    if not column.numel():
        return {}
    return {
        f"{name}/mean": float(column.mean()),
        f"{name}/max": float(column.max()),
        f"{name}/min": float(column.min()),
    }
