"""Configuration of the mathematics. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hydraflow.options import Implementation, Planned, Rule, Switch, no_effect_when, option, unless, unread


@dataclass(frozen=True)
class Estimator(Implementation):
    """An advantage estimator: a function whose other arguments are the keys that it reads, by name."""

    per_trajectory: bool = False
    """`f(scores) -> advantages`, (B,) each: one number per trajectory, which all its trained tokens get.
    Else `f(rewards, mask, lengths) -> (advantages, returns)`: lengths (B,), the others (N,), the tokens of
    all rows."""
    critic: bool = False
    """It is also given the critic's `values` (N,)."""
    groups: bool = False
    """It compares the responses to one prompt: it is also given `group_ids` (B,)."""


ESTIMATORS = {
    "gae": Estimator("hydraflow.algorithms.gae:gae", reads=("gamma", "lam"), critic=True),
    "grpo": Estimator(
        "hydraflow.algorithms.grpo:grpo",
        reads=("norm_adv_by_std_in_grpo",),
        per_trajectory=True,
        groups=True,
    ),
    "rloo": Estimator("hydraflow.algorithms.rloo:rloo", per_trajectory=True, groups=True),
    "reinforce_plus_plus": Estimator(
        "hydraflow.algorithms.reinforce_plus_plus:reinforce_plus_plus", reads=("gamma",)
    ),
}
"""By the name that `algorithm.adv_estimator` gives; `reads` are keys of `algorithm`."""

POLICY_LOSSES = {
    "vanilla": Implementation(
        "hydraflow.algorithms.policy_loss:vanilla",
        reads=("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    ),
    "gspo": Implementation("hydraflow.algorithms.gspo:gspo", reads=("clip_ratio_low", "clip_ratio_high")),
    "sapo": Implementation("hydraflow.algorithms.sapo:sapo", reads=("tau_pos", "tau_neg")),
}
"""By the name that `actor.policy_loss.loss_mode` gives; `reads` are keys of `actor`."""


class OldFrom(StrEnum):
    """Where a step takes the sampling policy's log-probabilities from."""

    ROLLOUT = "rollout"
    """The generation engine, which computes as the trainer does."""
    FIRST_PASS = "first pass"
    """The only optimizer step's own forward pass: until then the weights do not change."""
    RECOMPUTE = "recompute"
    """A forward pass of the actor before the first optimizer step."""


LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


@dataclass
class KLControlConfig:
    """Coefficient of the KL penalty in the reward."""

    type: str = option("fixed", choices=("fixed", "adaptive"))
    """fixed keeps kl_coef; adaptive (Ziegler et al. 2019) steers the KL towards target_kl."""
    kl_coef: float = option(0.001, ge=0)
    """Coefficient at the first step."""
    horizon: int = option(
        10000, ge=1, no_effect=unless("type", "adaptive", why="{s}.type=fixed keeps the coefficient")
    )
    """Trajectories over which the adaptive controller adjusts the coefficient."""
    target_kl: float = option(
        0.1, gt=0, no_effect=unless("type", "adaptive", why="{s}.type=fixed keeps the coefficient")
    )
    """Target KL per trained token, averaged over trajectories, of the adaptive controller."""


@dataclass
class PolicyLossConfig:
    """Choice of the policy loss."""

    loss_mode: str = option("vanilla", choices=POLICY_LOSSES)
    """Policy loss. vanilla: PPO's clipped objective with a dual clip."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): replaces prompts whose responses all score the same."""

    enable: bool = option(
        False,
        switch=Switch(off=False, remedy="{s}.enable=true"),
        planned=Planned(bool, "replace prompts whose responses all have the same {metric}"),
    )
    """Sample until a step holds data.train_batch_size prompts with different scores."""
    metric: str = option("acc", choices=("acc", "score", "seq_reward"))
    """Score that must differ within a group."""
    max_num_gen_batches: int = option(0, ge=0)
    """Maximum batches of data.gen_batch_size prompts sampled per step; 0: no limit."""


ROLLOUT_IS_LEVELS = ("token", "sequence")
REJECTION_RULES = (
    *(f"{over}_{form}" for over in ("token", "seq_sum", "seq_mean") for form in ("k1", "k2", "k3")),
    *("seq_max_k2", "seq_max_k3"),
)
BYPASS_LOSSES = {
    "ppo_clip": Implementation(),
    "reinforce": Implementation("hydraflow.algorithms.reinforce:reinforce"),
}
"""By the name that `rollout_correction.loss_type` gives; without code: the loss that
`actor.policy_loss.loss_mode` names."""


@dataclass(frozen=True)
class Bounds:
    """A threshold: one number, or two."""

    upper: float
    lower: float | None = None

    @classmethod
    def read(cls, value: Any) -> Bounds | None:
        """From a number or text; None where it is neither one positive number nor two in order.

        >>> Bounds.read("0.5_2.0"), Bounds.read(2), Bounds.read("2_1")
        (Bounds(upper=2.0, lower=0.5), Bounds(upper=2.0, lower=None), None)
        """
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        try:
            numbers = [float(part) for part in str(value).split("_")]
        except ValueError:
            return None
        if len(numbers) > 2 or not all(map(math.isfinite, numbers)):
            return None
        lower, upper = (None, *numbers)[-2:]
        if upper is None or upper <= 0 or (lower is not None and not 0 <= lower < upper):
            return None
        return cls(upper, lower)


def listed_in(value: Any) -> list[Any]:
    """The entries of a list, or of text with commas; one of anything else."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list) else [value]


def _are_rejection_rules(value: Any) -> bool:
    names = listed_in(value)
    return set(map(str, names)) <= set(REJECTION_RULES) and len(set(map(str, names))) == len(names) > 0


THRESHOLD = Rule(
    "must be a number above 0, or two bounds such as 0.5_5.0", lambda value: Bounds.read(value) is not None
)
THRESHOLDS = Rule(
    "must list numbers above 0, or pairs of bounds such as 0.5_2.0",
    lambda value: bool(listed_in(value)) and None not in map(Bounds.read, listed_in(value)),
    example="0.5_2.0",
)
REJECTIONS = Rule(
    f"must list rules, each once: {', '.join(REJECTION_RULES)}", _are_rejection_rules, REJECTION_RULES
)


RATIO_IN_LOSS = no_effect_when(
    lambda s: s.bypass_mode and s.loss_type == "ppo_clip",
    "{s}.bypass_mode=true with {s}.loss_type=ppo_clip has this ratio in the loss itself",
    "{s}.loss_type=reinforce",
)
NO_WEIGHTS = no_effect_when(lambda s: s.rollout_is is None, "{s}.rollout_is=null", "{s}.rollout_is=token")


@dataclass
class RolloutCorrectionConfig:
    """Correction for samples whose probabilities differ between the generation engine and the trainer. The
    ratio is the trainer's probability to the engine's."""

    rollout_is: str | None = option(None, choices=ROLLOUT_IS_LEVELS, no_effect=RATIO_IN_LOSS)
    """Importance sampling: weight each token's policy loss by the ratio, of the token or of the whole
    sequence; null: no weights."""
    rollout_is_threshold: Any = option(2.0, rule=THRESHOLD, no_effect=(NO_WEIGHTS, RATIO_IN_LOSS))
    """Upper limit of these weights (truncated importance sampling); or two bounds, such as 0.5_5.0, outside
    of which a weight is 0 (IcePop)."""
    rollout_is_batch_normalize: bool = option(False, no_effect=(NO_WEIGHTS, RATIO_IN_LOSS))
    """Divide these weights by their mean over the mini-batch, of tokens or of sequences."""
    rollout_rs: Any = option(None, rule=REJECTIONS)
    """Rejection sampling: rules that leave tokens or whole sequences out of the policy's loss, in a list or
    separated by commas; null: none."""
    rollout_rs_threshold: Any = option(
        None,
        rule=THRESHOLDS,
        no_effect=no_effect_when(
            lambda s: s.rollout_rs is None, "{s}.rollout_rs=null", "{s}.rollout_rs=token_k1"
        ),
    )
    """For each rule, or for all of them: bounds of the ratio, such as 0.5_2.0, for k1 (of a single number the
    lower bound is the reciprocal), the largest divergence for k2 and k3."""
    bypass_mode: bool = False
    """Take the engine's log-probabilities for the old ones, so that the trainer does not compute them again.
    The ratio is then that of the policy being trained."""
    loss_type: str = option("ppo_clip", choices=tuple(BYPASS_LOSSES), no_effect=unless("bypass_mode"))
    """Policy loss of bypass_mode: ppo_clip, the actor's own loss; or reinforce, without a clip."""


def is_corrected(section: RolloutCorrectionConfig) -> bool:
    """Whether any of it is on."""
    return section.bypass_mode or section.rollout_is is not None or section.rollout_rs is not None


def bounded_rules(section: RolloutCorrectionConfig) -> list[tuple[str, Bounds]]:
    """The rejection rules with their thresholds, one for all of them repeated."""
    if section.rollout_rs is None:
        return []
    rules, thresholds = listed_in(section.rollout_rs), listed_in(section.rollout_rs_threshold)
    found = [bounds for bounds in map(Bounds.read, thresholds) if bounds is not None]
    return list(zip(rules, found * len(rules) if len(found) == 1 else found))


@dataclass
class AlgorithmConfig:
    """Advantages and rewards."""

    adv_estimator: str = option("gae", choices=ESTIMATORS)
    """Advantage estimator."""
    gamma: float = option(1.0, ge=0, le=1, no_effect=unread(ESTIMATORS, "adv_estimator"))
    """Discount factor per token."""
    lam: float = option(1.0, ge=0, le=1, no_effect=unread(ESTIMATORS, "adv_estimator"))
    """Lambda of generalized advantage estimation (GAE)."""
    norm_adv_by_std_in_grpo: bool = option(True, no_effect=unread(ESTIMATORS, "adv_estimator"))
    """Divide GRPO's advantages by the group's standard deviation; false is Dr. GRPO."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from every token's reward."""
    kl_penalty: str = option("kl", choices=KL_ESTIMATORS, no_effect=unless("use_kl_in_reward"))
    """Estimator of that penalty: kl (also k1), abs, mse (k2) or low_var_kl (k3)."""
    kl_ctrl: KLControlConfig = option(factory=KLControlConfig, no_effect=unless("use_kl_in_reward"))
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
