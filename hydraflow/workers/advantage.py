"""Turns scores into advantages for a whole step at once, so that group and batch statistics are exact.

In: trajectories with scores, and log-probabilities and values where the method uses them. Out:
`token_level_rewards`, `advantages`, `returns`, and the step's data metrics. The columns come from the object
store, not through the controller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hydraflow.algorithms.advantages import estimate_advantages
from hydraflow.algorithms.config import ESTIMATORS, AlgorithmConfig
from hydraflow.algorithms.diagnostics import rollout_probs_diff
from hydraflow.algorithms.groups import group_scores
from hydraflow.algorithms.kl import apply_kl_penalty
from hydraflow.algorithms.kl_control import make_kl_controller
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.worker import ProcessContext, Worker
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import from_padded, parts, to_padded


@dataclass(frozen=True)
class AdvantageSpec:
    """Constructor arguments of an AdvantageWorker."""

    algorithm: AlgorithmConfig
    response_tokens: int
    """Longest response: responses of that length were truncated."""


class AdvantageWorker(Worker):
    """Holds the KL controller and computes advantages."""

    def __init__(self, process: ProcessContext, spec: AdvantageSpec):
        super().__init__(process)
        self.spec = spec
        control = spec.algorithm.kl_ctrl
        self.kl = make_kl_controller(
            control.type, kl_coef=control.kl_coef, target_kl=control.target_kl, horizon=control.horizon
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False, read_only=True)
    def compute(self, batch: DataProto, scored: DataProto) -> DataProto:
        """From `score` in `scored`: `advantages` and `returns`.

        `meta_info["metrics"]` describes the step's data, `meta_info["kl"]` is the KL controller's state after
        it.
        """
        algorithm = self.spec.algorithm
        lengths = parts(batch.get("response_mask"))[1]
        padded = {
            name: to_padded(batch.get(name)) for name in batch.keys() if name not in ("prompts", "group")
        }
        mask = padded["response_mask"].to(torch.float32)
        metrics: dict[str, float] = {}
        scores = scored.get("score")
        rewards, totals = on_last_trained_token(scores, mask, lengths), scores
        if algorithm.use_kl_in_reward:
            rewards, metrics = self._take_kl_off(padded, rewards, mask)
            totals = rewards.sum(1)
        advantages, returns = estimate_advantages(
            algorithm, totals, rewards, mask, values=padded.get("values"), group_ids=batch.get("group")
        )
        metrics |= _data_metrics(padded, scores, rewards, advantages, returns, mask)
        if ESTIMATORS[algorithm.adv_estimator].groups:
            metrics |= _group_metrics(scores, batch.get("group"))
        metrics |= _length_metrics(parts(batch.get("prompts"))[1], lengths, self.spec.response_tokens)
        columns = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
        return DataProto.from_dict(
            tensors={name: from_padded(column.float(), lengths) for name, column in columns.items()},
            meta_info={"metrics": metrics, "kl": self.kl.state_dict()},
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO, read_only=True)
    def compare_with_rollout(self, batch: DataProto) -> dict[str, float]:
        """How far `old_log_probs` are from `rollout_log_probs`, and the sampling policy's entropy per
        token."""
        padded = {name: to_padded(batch.get(name)) for name in batch.keys()}
        mask = padded["response_mask"].bool()
        entropy = {"actor/entropy": float(padded["entropys"][mask].mean())}
        return rollout_probs_diff(padded["old_log_probs"], padded["rollout_log_probs"], mask) | entropy

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the KL controller's state."""
        self.kl.load_state_dict(state)

    def _take_kl_off(
        self, padded: dict[str, torch.Tensor], scores: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        coefficient = self.kl.value
        rewards, kl = apply_kl_penalty(
            scores,
            padded["old_log_probs"],
            padded["ref_log_prob"],
            mask,
            kind=self.spec.algorithm.kl_penalty,
            coefficient=coefficient,
        )
        self.kl.update(kl, len(scores))
        return rewards, {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}


def on_last_trained_token(scores: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Scores (B,) as rewards (B, R), each on the row's last token that the mask selects. In a row without
    one it is on the last token: only sums over the row see it there, by which groups are compared.

    >>> mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    >>> on_last_trained_token(torch.tensor([0.5, 2.0]), mask, torch.tensor([3, 2]))
    tensor([[0.0000, 0.5000, 0.0000],
            [0.0000, 2.0000, 0.0000]])
    """
    if mask.shape[1] == 0:
        return torch.zeros_like(mask)
    positions = torch.arange(1, mask.shape[1] + 1)
    last = (positions * mask.bool()).amax(1)  # 0: none
    last = torch.where(last > 0, last, lengths.clamp(min=1)) - 1
    return torch.zeros_like(mask).scatter(1, last[:, None], scores[:, None].to(mask.dtype))


def _data_metrics(
    padded: dict[str, torch.Tensor],
    scores: torch.Tensor,
    rewards: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, float]:
    """Means, largest and smallest values under verl's names; token columns count trained tokens only."""
    trained = mask.bool()
    columns = {
        "critic/score": scores,
        "critic/rewards": rewards.sum(1),
        "critic/advantages": advantages[trained],
        "critic/returns": returns[trained],
    }
    metrics: dict[str, float] = {}
    if (values := padded.get("values")) is not None:
        columns["critic/values"] = values[trained]
        if int(trained.sum()) > 1:
            unexplained = (returns[trained] - values[trained]).var()
            metrics["critic/vf_explained_var"] = float(1.0 - unexplained / (returns[trained].var() + 1e-5))
    for name, column in columns.items():
        metrics |= spread(name, column)
    return metrics


def _group_metrics(scores: torch.Tensor, ids: torch.Tensor) -> dict[str, float]:
    """The share of groups (the responses to one prompt) whose scores are all equal, which
    therefore give no learning signal. Single rows are no groups; {} if there are no others."""
    group = group_scores(scores, ids)
    of_row = (group.size > 1) / group.size  # a group's rows count as one
    if not of_row.any():
        return {}
    return {"critic/groups/no_signal_ratio": float((of_row * (group.std == 0)).sum() / of_row.sum())}


def _length_metrics(
    prompt_lengths: torch.Tensor, response_lengths: torch.Tensor, response_tokens: int
) -> dict[str, float]:
    return {
        **spread("response_length", response_lengths),
        "response_length/clip_ratio": float((response_lengths >= response_tokens).float().mean()),
        **spread("prompt_length", prompt_lengths),
    }


def spread(name: str, column: torch.Tensor) -> dict[str, float]:
    """Mean, largest and smallest value under that name; {} of no values."""
    column = column.float()
    if not column.numel():
        return {}
    return {
        f"{name}/mean": float(column.mean()),
        f"{name}/max": float(column.max()),
        f"{name}/min": float(column.min()),
    }
