"""Oracle of the advantage estimators: plain loops over padded tables in float64, and how far the code is from
them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hydraflow.algorithms.advantages import estimate_advantages
from hydraflow.algorithms.config import AlgorithmConfig


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Step:
    """The rows of a step, each with one score, one group and a list of tokens, and what some estimators are
    given besides."""

    scores: list[float]
    groups: list[int]
    rewards: list[list[float]]
    values: list[list[float]]
    mask: list[list[int]]
    baselines: list[float]
    parts: list[list[float]]
    log_probs: list[list[float]]
    pi_squared: list[list[float]]

    @classmethod
    def of(cls, scores: list[float], groups: list[int]) -> Step:
        """Rows of one trained token each, of probability 1/2 in a vocabulary of two."""
        zero, half = [[0.0]] * len(scores), [[0.5]] * len(scores)
        rewards, logs = [[score] for score in scores], [[math.log(0.5)]] * len(scores)
        parts = [[score, 2 * score] for score in scores]
        return cls(scores, groups, rewards, zero, [[1]] * len(scores), scores, parts, logs, half)

    def rows(self, order: list[int]) -> Step:
        """These rows in that order."""
        return Step(*([column[row] for row in order] for column in vars(self).values()))

    def estimated(self, config: AlgorithmConfig) -> list[list[list[float]]]:
        """Advantages and returns, row by row, as the code computes them."""
        lengths = [len(row) for row in self.mask]
        flat = (self.rewards, self.values, self.mask, self.log_probs, self.pi_squared)
        rewards, values, mask, log_probs, pi_squared = (
            f64([x for row in rows for x in row]) for rows in flat
        )
        found = estimate_advantages(
            config,
            f64(self.scores),
            rewards,
            mask,
            torch.tensor(lengths),
            values=values,
            group_ids=torch.tensor(self.groups),
            reward_baselines=f64(self.baselines),
            reward_parts=f64(self.parts),
            old_log_probs=log_probs,
            sum_pi_squared=pi_squared,
        )
        assert all(column.dtype == torch.float64 for column in found)
        return [[row.tolist() for row in column.split(lengths)] for column in found]


def drawn_step(seed: int, rows: int = 24, longest: int = 40) -> Step:
    """Ragged rows with holes in their masks, in groups of about four."""
    draw = np.random.default_rng(seed)
    mask = [(draw.random(draw.integers(1, longest + 1)) < 0.8).astype(int).tolist() for _ in range(rows)]

    def like_mask(low: float, high: float) -> list[list[float]]:
        return [draw.uniform(low, high, len(row)).tolist() for row in mask]

    def per_row(*shape: int) -> list[Any]:
        return draw.uniform(-5, 5, (rows, *shape)).tolist()

    groups = draw.integers(0, rows // 4, rows).tolist()
    given = per_row(), groups, like_mask(-5, 5), like_mask(-5, 5), mask, per_row(), per_row(2)
    log_probs, squared = like_mask(-8, -0.125), like_mask(0.125, 1)
    return Step(*given, log_probs, possible(log_probs, squared))


def possible(log_probs: list[list[float]], squared: list[list[float]]) -> list[list[float]]:
    """Sums of squared probabilities, each at least the square of its token's own."""
    return [[max(x, math.exp(2 * p)) for x, p in zip(*row)] for row in zip(squared, log_probs)]


def oracle_difference(name: str) -> float:
    """The largest difference from the padded tables in 20 drawn steps, absolute, or relative where a value
    is above 1."""
    config = AlgorithmConfig(
        adv_estimator=name, gamma=0.9, lam=0.95, gdpo_reward_weights=[1.0, 0.5], gdpo_reward_keys=["a", "b"]
    )
    worst = 0.0
    for step in (suited(config, drawn_step(seed)) for seed in range(20)):
        for found, expected in zip(step.estimated(config), reference(config, step)):
            for row, wanted in zip(found, expected):
                wanted = wanted[: len(row)]
                apart = np.abs(np.array(row) - wanted) / np.maximum(1, np.abs(wanted))
                worst = max(worst, float(apart.max()))
    return worst


def padded(rows: list[list[float]], width: int) -> np.ndarray:
    return np.array([row + [0.0] * (width - len(row)) for row in rows], dtype=np.float64)  # (B, R)


def recursion(
    step: Step, gamma: float, decay: float | np.ndarray, *, with_values: bool
) -> tuple[np.ndarray, ...]:
    """Sums of the discounted deltas over the trained tokens from each one on, values, and mask, (B, R).
    `decay`: of all rows, or (B,)."""
    width = max(map(len, step.mask))
    rewards, values, mask = (padded(rows, width) for rows in (step.rewards, step.values, step.mask))
    values = values * with_values
    sums = np.zeros_like(rewards)
    ahead, next_value = np.zeros(len(rewards)), np.zeros(len(rewards))
    for t in reversed(range(width)):
        on = mask[:, t] > 0
        ahead = np.where(on, rewards[:, t] + gamma * next_value - values[:, t] + decay * ahead, ahead)
        next_value = np.where(on, values[:, t], next_value)
        sums[:, t] = ahead
    return sums, values, mask > 0


def whitened(table: np.ndarray, mask: np.ndarray) -> np.ndarray:
    picked = table[mask]
    variance = picked.var(ddof=1) if len(picked) > 1 else 0.0
    mean = picked.mean() if len(picked) else 0.0
    return np.where(mask, (table - mean) / math.sqrt(variance + 1e-8), 0.0)


def of_group(step: Step, row: int) -> tuple[float, list[float]]:
    """A row's score, and those of the others of its group."""
    others = [
        score
        for other, score in enumerate(step.scores)
        if step.groups[other] == step.groups[row] and other != row
    ]
    return step.scores[row], others


def leave_one_out(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    return score - np.mean(others) if others else score


def group_relative(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    group = np.array([score, *others])
    return (score - group.mean()) / (group.std(ddof=1) + 1e-6) if others else score / (1 + 1e-6)


def less_the_mean(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    return score - np.mean([score, *others]) if others else score


def less_the_mean_by_tokens(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    tokens = [sum(mask) for group, mask in zip(step.groups, step.mask) if group == step.groups[row]]
    scores = [score for group, score in zip(step.groups, step.scores) if group == step.groups[row]]
    return score - np.average(scores, weights=tokens) if others and sum(tokens) else score


def policy_gradient_of_groups(step: Step, row: int) -> float:
    nonzero = sum(score != 0 for score in step.scores)
    return less_the_mean(step, row) * len(step.scores) / max(nonzero, 1)


def over_the_second_best(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    return max(0.0, score - max(others)) if others else 0.0


def over_the_second_best_divided(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    if not others:
        return 0.0
    return over_the_second_best(step, row) / (np.std([score, *others], ddof=1) + 1e-6)


def of_success_rate(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    mean = np.mean([score, *others])
    return (score - mean) / mean if mean > 0 else 0.0


def less_the_price_of_reach(step: Step, row: int) -> float:
    """With the temperature 1."""
    score, others = of_group(step, row)
    return score - math.log(np.mean(np.exp([score, *others]))) if others else score


def less_a_lower_mean(step: Step, row: int) -> float:
    return less_the_mean(step, row) + 0.1 if of_group(step, row)[1] else step.scores[row]


def share_of_the_best(step: Step, row: int) -> float:
    score, others = of_group(step, row)
    best = [one for one in (score, *others) if one == max(score, *others, -math.inf)]
    return 1 / len(best) if score in best and len(best) < 1 + len(others) else 0.0


OF_ROW = {
    "grpo": group_relative,
    "grpo_vectorized": group_relative,
    "grpo_passk": over_the_second_best_divided,
    "rloo": leave_one_out,
    "rloo_vectorized": lambda step, row: leave_one_out(step, row) if of_group(step, row)[1] else 0.0,
    "reinforce_plus_plus_baseline": less_the_mean,
    "opo": less_the_mean_by_tokens,
    "gpg": policy_gradient_of_groups,
    "maxrl": of_success_rate,
    "opmd": less_the_price_of_reach,
    "asymre": less_a_lower_mean,
    "raft": share_of_the_best,
    "gdpo": lambda step, row: sum_of_comparisons(step, row, group_relative),
}
"""Estimators of one number for each row."""
UNDIVIDED = OF_ROW | {
    "grpo": less_the_mean,
    "grpo_vectorized": less_the_mean,
    "grpo_passk": over_the_second_best,
    "gdpo": lambda step, row: sum_of_comparisons(step, row, less_the_mean),
}
"""With norm_adv_by_std_in_grpo=false."""


def token_baselines(step: Step, *, tools: bool) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns (B, R) of the optimal token baseline; `tools`: places among trained tokens."""
    returns, _, mask = recursion(step, 1.0, 1.0, with_values=False)
    advantages = np.where(mask, returns, 0.0)
    at: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for row, group in enumerate(step.groups):
        energy, trained = 0.0, 0
        for t, on in enumerate(step.mask[row]):
            if on:
                energy += 1 - 2 * math.exp(step.log_probs[row][t]) + step.pi_squared[row][t]
                at.setdefault((group, trained if tools else t), []).append((row, t, energy))
                trained += 1
    for (group, _), tokens in at.items():
        if step.groups.count(group) == 1 or (tools and len(tokens) == 1):
            continue
        baseline = sum(w * returns[row, t] for row, t, w in tokens) / (sum(w for *_, w in tokens) + 1e-8)
        for row, t, _ in tokens:
            advantages[row, t] -= baseline
    return advantages, np.where(mask, returns, 0.0)


def sum_of_comparisons(step: Step, row: int, compared: Callable[[Step, int], float]) -> float:
    """With the weights 1 and 1/2."""
    first, second = (compared(replace(step, scores=list(column)), row) for column in zip(*step.parts))
    return first + 0.5 * second


def reference(config: AlgorithmConfig, step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns (B, R)."""
    gamma, lam = config.gamma, config.lam
    if config.adv_estimator in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        return token_baselines(step, tools=config.adv_estimator.startswith("tir"))
    if config.adv_estimator == "remax":
        sums, _, mask = recursion(step, 1.0, 1.0, with_values=False)
        baselines = np.array(step.baselines)[:, None]
        return np.where(mask, sums - baselines, 0.0), np.where(mask, sums, 0.0)
    if config.adv_estimator == "gae":
        of_policy: float | np.ndarray = lam
        if config.lam_length_alpha is not None:
            trained = np.array([max(sum(mask), 1) for mask in step.mask])
            of_policy = np.maximum(0, 1 - 1 / (config.lam_length_alpha * trained))
        sums, values, mask = recursion(step, gamma, gamma * of_policy, with_values=True)
        gamma = gamma if config.critic_gamma is None else config.critic_gamma
        lam = lam if config.critic_lam is None else config.critic_lam
        ahead, _, _ = recursion(step, gamma, gamma * lam, with_values=True)
        return whitened(sums, mask), np.where(mask, ahead + values, 0.0)
    if config.adv_estimator in ("reinforce", "reinforce_plus_plus"):
        sums, _, mask = recursion(step, gamma, gamma, with_values=False)
        returns = np.where(mask, sums, 0.0)
        return whitened(sums, mask) if config.adv_estimator == "reinforce_plus_plus" else returns, returns
    of_row = (OF_ROW if config.norm_adv_by_std_in_grpo else UNDIVIDED)[config.adv_estimator]
    numbers = np.array([of_row(step, row) for row in range(len(step.scores))])
    mask = padded(step.mask, max(map(len, step.mask)))
    table = numbers[:, None] * mask
    if config.adv_estimator in ("reinforce_plus_plus_baseline", "gdpo"):
        table = whitened(table, mask > 0)
    return table, table


def suited(config: AlgorithmConfig, step: Step) -> Step:
    """The step with scores of 0 and 1 where the estimator is made for those."""
    if config.adv_estimator != "maxrl":
        return step
    return replace(step, scores=[float(score > 0) for score in step.scores])
