"""Configuration of the mathematics. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hydraflow.options import Implementation, Planned, Switch, no_effect_when, option, unless, unread


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


@dataclass
class RolloutCorrectionConfig:
    """Correction for samples whose probabilities differ between the generation engine and the trainer."""

    rollout_is: str | None = option(None, choices=ROLLOUT_IS_LEVELS)
    """Truncated importance sampling: weight each token's policy loss by the ratio of the trainer's old
    probability to the generation engine's, of the token or of the whole sequence; null: no weights."""
    rollout_is_threshold: float = option(
        2.0,
        gt=0,
        no_effect=no_effect_when(
            lambda s: s.rollout_is is None, "{s}.rollout_is=null", "{s}.rollout_is=token"
        ),
    )
    """Upper limit of these weights."""


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
