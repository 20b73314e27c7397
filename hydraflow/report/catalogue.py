"""Titles, units and groups of metrics on the page. A metric that is not listed is shown by its name, in
the group of its prefix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_AGAINST = "Generation against training"
GROUPS = (
    "Validation",
    "Reward",
    "Policy",
    "Critic",
    "Supervised training",
    "Lengths",
    _AGAINST,
    "Speed",
    "Faults",
    "Other metrics",
)
"""Groups in the order of the page."""
FOLDED = ("Other metrics",)
"""Groups that are closed at first."""


@dataclass(frozen=True)
class MetricDisplay:
    """How a metric is shown."""

    title: str
    unit: str
    group: str
    rank: int
    """Place within its group."""


_ROWS = (
    ("Reward", "critic/score/mean", "Score, mean", "score"),
    ("Reward", "critic/rewards/mean", "Reward with penalties, mean", "reward"),
    ("Reward", "critic/score/max", "Score, maximum", "score"),
    ("Reward", "critic/score/min", "Score, minimum", "score"),
    ("Reward", "critic/advantages/mean", "Advantage, mean", "advantage"),
    ("Reward", "critic/advantages/max", "Advantage, maximum", "advantage"),
    ("Reward", "critic/advantages/min", "Advantage, minimum", "advantage"),
    ("Reward", "critic/returns/mean", "Return, mean", "return"),
    ("Reward", "critic/groups/no_signal_ratio", "Groups whose responses all score alike", "share of groups"),
    ("Policy", "actor/pg_loss", "Policy loss", "loss"),
    ("Policy", "actor/entropy", "Entropy", "nats per token"),
    ("Policy", "actor/ppo_kl", "KL of one update", "nats per token"),
    ("Policy", "actor/kl_loss", "KL to the reference, in the loss", "nats per token"),
    ("Policy", "actor/kl_coef", "KL coefficient of the loss", "factor"),
    ("Policy", "actor/reward_kl_penalty", "KL to the reference, in the reward", "nats per token"),
    ("Policy", "actor/reward_kl_penalty_coeff", "KL coefficient of the reward", "factor"),
    ("Policy", "actor/pg_clipfrac", "Clip fraction", "share of tokens"),
    ("Policy", "actor/pg_clipfrac_lower", "Clip fraction, lower bound", "share of tokens"),
    ("Policy", "actor/grad_norm", "Gradient norm, mean", "norm"),
    ("Policy", "actor/grad_norm_max", "Gradient norm, maximum", "norm"),
    ("Policy", "actor/lr", "Learning rate", "per optimizer step"),
    ("Critic", "critic/vf_loss", "Value loss", "loss"),
    ("Critic", "critic/vf_explained_var", "Explained variance of the values", "share"),
    ("Critic", "critic/vf_clipfrac", "Value clip fraction", "share of tokens"),
    ("Critic", "critic/vpred_mean", "Value, mean", "return"),
    ("Critic", "critic/values/mean", "Old value, mean", "return"),
    ("Critic", "critic/grad_norm", "Gradient norm, mean", "norm"),
    ("Critic", "critic/grad_norm_max", "Gradient norm, maximum", "norm"),
    ("Critic", "critic/lr", "Learning rate", "per optimizer step"),
    ("Supervised training", "train/loss", "Training loss", "nats per token"),
    ("Supervised training", "train/grad_norm", "Gradient norm, mean", "norm"),
    ("Supervised training", "train/grad_norm_max", "Gradient norm, maximum", "norm"),
    ("Supervised training", "train/lr", "Learning rate", "per optimizer step"),
    ("Validation", "val/accuracy", "Held-out accuracy", "share of conversations"),
    ("Validation", "val/loss", "Held-out loss", "nats per token"),
    ("Lengths", "response_length/mean", "Response length, mean", "tokens"),
    ("Lengths", "response_length/max", "Response length, maximum", "tokens"),
    ("Lengths", "response_length/min", "Response length, minimum", "tokens"),
    ("Lengths", "response_length/clip_ratio", "Responses truncated at the limit", "share of responses"),
    ("Lengths", "prompt_length/mean", "Prompt length, mean", "tokens"),
    ("Lengths", "prompt_length/max", "Prompt length, maximum", "tokens"),
    (_AGAINST, "training/rollout_probs_diff_mean", "Difference of probabilities, mean", "probability"),
    (_AGAINST, "training/rollout_probs_diff_max", "Difference of probabilities, maximum", "probability"),
    (_AGAINST, "rollout_corr/kl", "KL from the generation engine's policy", "nats per token"),
    (_AGAINST, "rollout_corr/rollout_is_mean", "Importance weight, mean", "factor"),
    (_AGAINST, "rollout_corr/rollout_rs_masked_fraction", "Rejected tokens", "share of tokens"),
    ("Speed", "perf/throughput", "Throughput", "tokens per second and device"),
    ("Speed", "timing_s/step", "Time of a step", "seconds"),
    ("Speed", "perf/total_num_tokens", "Tokens of a step", "tokens"),
    ("Speed", "perf/mfu/actor", "Model FLOPs of the actor's updates", "share of the peak"),
    ("Speed", "perf/mfu/actor_infer", "Model FLOPs of the actor's log-probs", "share of the peak"),
    ("Speed", "perf/mfu/critic", "Model FLOPs of the critic's updates", "share of the peak"),
    ("Speed", "perf/mfu/critic_infer", "Model FLOPs of the critic's values", "share of the peak"),
    ("Speed", "perf/mfu/ref_infer", "Model FLOPs of the reference's log-probs", "share of the peak"),
    ("Speed", "perf/mfu/teacher_infer", "Model FLOPs of the teachers' log-probs", "share of the peak"),
    ("Speed", "perf/mfu/reward_model_infer", "Model FLOPs of the reward model's scores", "share of the peak"),
    ("Speed", "perf/mfu/train", "Model FLOPs of the updates", "share of the peak"),
    ("Speed", "perf/dispatch_share", "Time without a running worker", "share of the step"),
    ("Speed", "perf/controller_bytes_per_trajectory", "Through the controller", "bytes per trajectory"),
    ("Lengths", "rollout/truncated_rows", "Responses without an end", "rows"),
    ("Faults", "rollout/faulted_rows", "Rows that ended in a fault", "rows"),
    ("Faults", "reward/failed_rows", "Rows without a score", "rows"),
    ("Faults", "actor/skipped_steps", "Skipped optimizer steps of the actor", "optimizer steps"),
    ("Faults", "critic/skipped_steps", "Skipped optimizer steps of the critic", "optimizer steps"),
    ("Faults", "train/skipped_steps", "Skipped optimizer steps", "optimizer steps"),
    ("Faults", "actor/oom_splits", "Splits after out-of-memory, actor", "splits"),
    ("Faults", "critic/oom_splits", "Splits after out-of-memory, critic", "splits"),
    ("Faults", "train/oom_splits", "Splits after out-of-memory", "splits"),
    ("Faults", "training/restarts", "Restarts after a worker failed", "restarts"),
)
_KNOWN = {
    name: MetricDisplay(title, unit, group, rank) for rank, (group, name, title, unit) in enumerate(_ROWS)
}
_OF_REWARDS = ("score", "rewards", "advantages", "returns", "groups", "overlong")
_PREFIXES = {
    "Validation": ("val",),
    "Reward": ("gdpo/", *(f"critic/{part}" for part in _OF_REWARDS)),
    "Policy": ("actor/",),
    "Critic": ("critic/",),
    "Supervised training": ("train/",),
    "Lengths": ("prompt_length/", "response_length/"),
}
"""Group -> prefixes of its metrics; the first match counts."""
HIDDEN = ("training/global_step", "perf/time_per_step", "perf/seconds_since_launch")
"""Metrics without a curve: the step itself, and what another metric or the time axis shows."""
_VALIDATION = re.compile(r"val-core/(?P<source>.+)/(?P<what>acc|reward)/mean@(?P<n>\d+)")


def metric(name: str) -> MetricDisplay:
    """How the metric is shown.

    >>> metric("val-core/gsm8k/acc/mean@4")
    MetricDisplay(title='gsm8k: accuracy, mean of 4', unit='share of responses', group='Validation', rank=-2)
    """
    if name in _KNOWN:
        return _KNOWN[name]
    if found := _VALIDATION.fullmatch(name):
        accuracy = found["what"] == "acc"
        of = "" if found["n"] == "1" else f" of {found['n']}"
        title = f"{found['source']}: {'accuracy' if accuracy else 'reward'}, mean{of}"
        unit, rank = ("share of responses", -2) if accuracy else ("score", -1)
        return MetricDisplay(title, unit, "Validation", rank)
    group = next((group for group, starts in _PREFIXES.items() if name.startswith(starts)), "Other metrics")
    return MetricDisplay(name, "", group, len(_ROWS))


def is_shown(name: str) -> bool:
    """Whether a metric has its own curve; phase times share one picture."""
    return name not in HIDDEN and (not name.startswith("timing_s/") or name == "timing_s/step")
