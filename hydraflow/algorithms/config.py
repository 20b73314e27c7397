"""Configuration of losses, advantages and rewards. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from hydraflow.options import (
    FINITE,
    Implementation,
    OwnChoices,
    Planned,
    Rule,
    Switch,
    listed,
    named_only,
    no_effect_when,
    option,
    ordered,
    required,
    unless,
    unread,
)


@dataclass(frozen=True)
class Estimator(Implementation):
    """An advantage estimator. The keyword arguments of its function have the names of the keys that it reads
    and of the columns that it asks for."""

    per_trajectory: bool = False
    """`f(scores) -> advantages`, (B,) each: one number per trajectory, shared by all its trained tokens.
    Otherwise `f(rewards, mask, lengths) -> (advantages, returns)`: lengths (B,), the others (N,) over the
    tokens of all rows."""
    critic: bool = False
    """Takes the critic's `values` (N,)."""
    groups: bool = False
    """Compares the responses to one prompt: takes `group_ids` (B,)."""
    counts: bool = False
    """Takes `trained_tokens` (B,), the number of trained tokens of each trajectory."""
    whitened: bool = False
    """Its advantages are whitened over all trained tokens of the step."""
    greedy_baseline: bool = False
    """Takes `reward_baselines` (B,): the score of a greedy response to each prompt."""
    divides_by_mean: bool = False
    """Divides by the mean of a group's scores."""
    sum_pi_squared: bool = False
    """Takes the actor's `old_log_probs` and `sum_pi_squared`, (N,) each."""
    several_rewards: bool = False
    """Its scores are (B, K): the reward function's outputs that `gdpo_reward_keys` names."""


OF_LOSSES = ("rollout_log_probs", "ref_log_prob")
"""Columns that a policy loss may take by name, (B, R) each."""


@dataclass(frozen=True)
class Loss(Implementation):
    """A policy loss: a function of `TokenInputs`. Its keyword arguments have the names of the keys that it
    reads, and of columns."""

    chooses: Implementation | None = None
    """Selects tokens over the whole mini-batch before the loss (`covariance.TokenChoice`)."""
    stops_below: bool = False
    """A token with a negative advantage and a ratio below 1 - clip_ratio_low has no gradient."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it takes by name."""
        return tuple(name for name in self.reads if name in OF_LOSSES)

    @property
    def all_reads(self) -> tuple[str, ...]:
        """Its own keys and those of its token choice."""
        return self.reads + (self.chooses.reads if self.chooses else ())


def _in_groups(where: str, *reads: str, **facts: Any) -> Estimator:
    """A per-trajectory estimator that compares the scores of the responses to one prompt."""
    return Estimator(where, reads=reads, per_trajectory=True, groups=True, **facts)


GRPO = _in_groups("hydraflow.algorithms.grpo:grpo", "norm_adv_by_std_in_grpo")
_DISCOUNTED = Estimator("hydraflow.algorithms.reinforce_plus_plus:discounted_return", reads=("gamma",))
OF_ESTIMATORS = {
    "values": "critic",
    "group_ids": "groups",
    "trained_tokens": "counts",
    "reward_baselines": "greedy_baseline",
}
"""Parameter name of an estimator -> the field of `Estimator` that requests it."""


def _own_estimator(where: str, parameters: tuple[str, ...]) -> Estimator:
    facts: dict[str, Any] = {fact: name in parameters for name, fact in OF_ESTIMATORS.items()}
    return Estimator(where, reads=parameters, per_trajectory=parameters[:1] == ("scores",), **facts)


ESTIMATORS = OwnChoices(
    {
        "gae": Estimator(
            "hydraflow.algorithms.gae:gae",
            reads=("gamma", "lam", "critic_gamma", "critic_lam", "lam_length_alpha"),
            critic=True,
            whitened=True,
        ),
        "grpo": GRPO,
        "grpo_vectorized": GRPO,
        "grpo_passk": replace(GRPO, where="hydraflow.algorithms.grpo_passk:grpo_passk"),
        "rloo": _in_groups("hydraflow.algorithms.rloo:rloo"),
        "rloo_vectorized": _in_groups("hydraflow.algorithms.rloo:rloo_vectorized"),
        "reinforce": _DISCOUNTED,
        "reinforce_plus_plus": replace(_DISCOUNTED, whitened=True),
        "reinforce_plus_plus_baseline": _in_groups(
            "hydraflow.algorithms.reinforce_plus_plus:reinforce_plus_plus_baseline", whitened=True
        ),
        "opo": _in_groups("hydraflow.algorithms.opo:opo", counts=True),
        "gpg": _in_groups("hydraflow.algorithms.gpg:gpg"),
        "maxrl": _in_groups("hydraflow.algorithms.maxrl:maxrl", divides_by_mean=True),
        "opmd": _in_groups("hydraflow.algorithms.opmd:opmd_advantages", "opmd_tau"),
        "asymre": _in_groups("hydraflow.algorithms.asymre:asymre", "asymre_baseline_shift"),
        "raft": _in_groups("hydraflow.algorithms.raft:raft"),
        "remax": Estimator("hydraflow.algorithms.remax:remax", greedy_baseline=True),
        "gdpo": _in_groups(
            "hydraflow.algorithms.gdpo:gdpo",
            "norm_adv_by_std_in_grpo",
            "gdpo_reward_weights",
            whitened=True,
            several_rewards=True,
        ),
        "optimal_token_baseline": Estimator(
            "hydraflow.algorithms.optimal_token_baseline:optimal_token_baseline",
            groups=True,
            sum_pi_squared=True,
        ),
        "tir_optimal_token_baseline": Estimator(
            "hydraflow.algorithms.optimal_token_baseline:tir_optimal_token_baseline",
            groups=True,
            sum_pi_squared=True,
        ),
    },
    _own_estimator,
)
"""Values of `algorithm.adv_estimator`; `reads` are keys of `algorithm`."""


def estimator_of(name: str) -> Estimator:
    """The estimator of that name; for an unknown name, one that needs nothing."""
    return ESTIMATORS.get(name, Estimator())


_CLIP = ("clip_ratio_low", "clip_ratio_high")
_DUAL_CLIP = (*_CLIP, "clip_ratio_c")
POLICY_LOSSES = OwnChoices(
    {
        "vanilla": Loss("hydraflow.algorithms.policy_loss:vanilla", reads=_DUAL_CLIP, stops_below=True),
        "gspo": Loss("hydraflow.algorithms.gspo:gspo", reads=_CLIP, stops_below=True),
        "sapo": Loss("hydraflow.algorithms.sapo:sapo", reads=("tau_pos", "tau_neg")),
        "cispo": Loss("hydraflow.algorithms.cispo:cispo", reads=_CLIP),
        "geo_mean": Loss("hydraflow.algorithms.geo_mean:geo_mean", reads=_CLIP),
        "gpg": Loss("hydraflow.algorithms.reinforce:reinforce"),
        "dppo_tv": Loss("hydraflow.algorithms.dppo:dppo_tv", reads=_DUAL_CLIP),
        "dppo_kl": Loss("hydraflow.algorithms.dppo:dppo_kl", reads=_DUAL_CLIP),
        "dro": Loss("hydraflow.algorithms.dro:dro", reads=("dro_beta",)),
        "topr": Loss(
            "hydraflow.algorithms.topr:topr", reads=("topr_positive_weight", "topr_negative_weight")
        ),
        "tis": Loss("hydraflow.algorithms.tis:tis", reads=("tis_lower_bound", "tis_upper_bound")),
        "kimi15": Loss("hydraflow.algorithms.kimi15:kimi15", reads=("kimi15_tau",)),
        "opmd": Loss("hydraflow.algorithms.opmd:opmd", reads=("opmd_tau",)),
        "sppo": Loss("hydraflow.algorithms.sppo:sppo", reads=("sppo_epsilon",)),
        "rec": Loss(
            "hydraflow.algorithms.rec:rec",
            reads=(
                *(*_CLIP, "rec_clip_mode", "rec_weight", "rec_temp"),
                *("rec_epsilon_low_prime", "rec_epsilon_high_prime"),
            ),
            stops_below=True,
        ),
        "clip_cov": Loss(
            "hydraflow.algorithms.clip_cov:clip_cov",
            reads=_CLIP,
            stops_below=True,
            chooses=Implementation(
                "hydraflow.algorithms.clip_cov:choose", reads=("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")
            ),
        ),
        "kl_cov": Loss(
            "hydraflow.algorithms.kl_cov:kl_cov",
            reads=("ppo_kl_coef",),
            chooses=Implementation("hydraflow.algorithms.kl_cov:choose", reads=("kl_cov_ratio",)),
        ),
    },
    lambda where, parameters: Loss(where, reads=parameters[1:]),
)
"""Values of `actor.policy_loss.loss_mode`; `reads` are keys of `actor` and of `actor.policy_loss`."""


class OldFrom(StrEnum):
    """Source of a step's old log-probabilities, those of the policy that sampled."""

    ROLLOUT = "rollout"
    """The generation engine, where it computes exactly what the trainer does."""
    FIRST_PASS = "first pass"
    """The forward pass of the step's only update: the weights have not changed before it."""
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
REC_CLIP_MODES = ("none", "one-side", "two-side", "ring")
REC_WEIGHTS = ("none", "importance_sampling", "advantage")
OTHER_LOSS = unread(POLICY_LOSSES, "loss_mode", is_algorithm=True)
OTHER_ESTIMATOR = unread(ESTIMATORS, "adv_estimator", is_algorithm=True)
FIXED = unless("type", "adaptive", why="{s}.type=fixed keeps the coefficient")


MOST_KL_ERROR = 0.2
"""Largest relative deviation from the target KL that the adaptive controller counts in a step."""


@dataclass
class KLControlConfig:
    """Coefficient of the KL penalty in the reward."""

    type: str = option("fixed", choices=("fixed", "adaptive"))
    """fixed keeps kl_coef; adaptive (Ziegler et al. 2019) steers the KL towards target_kl."""
    kl_coef: float = option(0.001, ge=0)
    """Coefficient at the first step."""
    horizon: int = option(10000, ge=1, no_effect=FIXED)
    """Trajectories over which the adaptive controller adjusts the coefficient."""
    target_kl: float = option(0.1, gt=0, no_effect=FIXED)
    """Target KL per trained token, averaged over trajectories (adaptive controller)."""


@dataclass
class PolicyLossConfig:
    """Choice of the policy loss."""

    loss_mode: str = option("vanilla", choices=POLICY_LOSSES)
    """Policy loss. vanilla: PPO's clipped objective with a dual clip."""
    clip_cov_ratio: float = option(0.0002, gt=0, le=1, no_effect=OTHER_LOSS)
    """clip_cov: fraction of the mini-batch's tokens whose gradient is dropped."""
    clip_cov_lb: float = option(
        1.0,
        rule=FINITE,
        beside=named_only("loss_mode", ordered("below", "clip_cov_ub", "no token would be chosen")),
        no_effect=OTHER_LOSS,
    )
    """clip_cov: lower bound of the covariance of log-probability and advantage for selected tokens."""
    clip_cov_ub: float = option(5.0, rule=FINITE, no_effect=OTHER_LOSS)
    """clip_cov: upper bound of that covariance."""
    kl_cov_ratio: float = option(0.0002, gt=0, le=1, no_effect=OTHER_LOSS)
    """kl_cov: fraction of the mini-batch's tokens, those of highest covariance, that get a KL penalty."""
    ppo_kl_coef: float = option(0.1, ge=0, no_effect=OTHER_LOSS)
    """kl_cov: coefficient of that penalty."""
    dro_beta: float | None = option(
        None,
        gt=0,
        beside=named_only(
            "loss_mode", required("the weight of dro's squared log-ratio has no default", "{s}.dro_beta=0.1")
        ),
        no_effect=OTHER_LOSS,
    )
    """dro: weight of the squared log-ratio to the old policy; required with loss_mode=dro."""
    topr_positive_weight: float = option(1.0, ge=0, no_effect=OTHER_LOSS)
    """topr: weight of tokens with a positive advantage."""
    topr_negative_weight: float = option(1.0, ge=0, no_effect=OTHER_LOSS)
    """topr: weight of all other tokens, multiplied by the ratio of their response."""
    tis_lower_bound: float = option(
        0.0,
        ge=0,
        beside=named_only("loss_mode", ordered("below", "tis_upper_bound", "all weights would be the same")),
        no_effect=OTHER_LOSS,
    )
    """tis: lower bound of the importance weight."""
    tis_upper_bound: float = option(1.0, gt=0, no_effect=OTHER_LOSS)
    """tis: upper bound of the importance weight."""
    kimi15_tau: float = option(0.1, ge=0, no_effect=OTHER_LOSS)
    """kimi15: weight of the squared log-ratio of whole responses to the old policy."""
    opmd_tau: float = option(1.0, ge=0, no_effect=OTHER_LOSS)
    """opmd: regularization; the loss is divided by 1 + this."""
    sppo_epsilon: float = option(0.3, gt=0, no_effect=OTHER_LOSS)
    """sppo: clip range of the ratio, from 1 / (1 + this) to 1 + this."""
    rec_clip_mode: str = option("one-side", choices=REC_CLIP_MODES, no_effect=OTHER_LOSS)
    """rec: which tokens get no gradient. one-side: those that PPO's clip stops; two-side: all outside the
    clip range; ring: as two-side, except tokens far on the wrong side, which keep theirs; none: every token
    keeps its gradient."""
    rec_weight: str = option("none", choices=REC_WEIGHTS, no_effect=OTHER_LOSS)
    """rec: weight of a token. importance_sampling: its ratio; advantage: exp(advantage / rec_temp)."""
    rec_temp: float = option(1.0, gt=0, no_effect=(OTHER_LOSS, unless("rec_weight", "advantage")))
    """rec: temperature of the advantage weights."""
    rec_epsilon_low_prime: float = option(0.6, gt=0, no_effect=(OTHER_LOSS, unless("rec_clip_mode", "ring")))
    """rec: distance from 1 to the ring's outer bound below 1."""
    rec_epsilon_high_prime: float = option(2.0, gt=0, no_effect=(OTHER_LOSS, unless("rec_clip_mode", "ring")))
    """rec: distance from 1 to the ring's outer bound above 1."""


@dataclass
class AdaptiveEntropyConfig:
    """Adaptive coefficient of the entropy bonus (Skywork-OR1)."""

    enabled: bool = option(False, switch=Switch(off=False, remedy="{s}.enabled=true"))
    """After every step, adjust the coefficient towards a target entropy. The entropy is measured by a forward
    pass over the step's trajectories before the update."""
    target_entropy: float = option(0.2, ge=0)
    """Target entropy per token, in nats; above it the bonus is off."""
    max_ent_coef: float = option(0.005, ge=0)
    """Upper bound of the adapted coefficient."""
    min_ent_coef: float = option(
        0.0,
        ge=0,
        beside=ordered("at most", "max_ent_coef", "the smallest coefficient would exceed the largest"),
    )
    """Lower bound of the adapted coefficient."""
    delta_ent_coef: float = option(0.0001, gt=0)
    """Change of the coefficient per step."""


PREFERENCE_LOSSES = {
    "sigmoid": Implementation("hydraflow.algorithms.preference:sigmoid", reads=("label_smoothing",)),
    "ipo": Implementation("hydraflow.algorithms.preference:ipo", reads=("beta",)),
}
"""Values of `dpo.loss_type`: functions of the score gap of each pair; `reads` are keys of `dpo`."""


@dataclass
class PreferenceConfig:
    """Direct training on preference pairs, without a reward model."""

    loss_type: str = option("sigmoid", choices=PREFERENCE_LOSSES)
    """Loss of a pair. sigmoid: direct preference optimization (DPO); ipo: the squared distance of its margin
    from 1 / (2 beta)."""
    beta: float = option(0.1, gt=0)
    """DPO's beta: coefficient of the implicit KL penalty against the reference."""
    label_smoothing: float = option(
        0.0, ge=0, lt=0.5, no_effect=unread(PREFERENCE_LOSSES, "loss_type", is_algorithm=True)
    )
    """Label smoothing (cDPO): assumed fraction of pairs with swapped labels."""


@dataclass
class BradleyTerryConfig:
    """Training a reward model on preference pairs."""

    center_rewards_coefficient: float = option(0.0, ge=0)
    """Weight of the squared sum of a pair's scores in the loss, which keeps scores around 0."""


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
    """Maximum number of batches of data.gen_batch_size prompts to sample per step; 0: no limit."""


ROLLOUT_IS_LEVELS = ("token", "sequence")
REJECTION_RULES = (
    *(f"{over}_{form}" for over in ("token", "seq_sum", "seq_mean") for form in ("k1", "k2", "k3")),
    *("seq_max_k2", "seq_max_k3"),
)
BYPASS_LOSSES = {"ppo_clip": Loss(), "reinforce": Loss("hydraflow.algorithms.reinforce:reinforce")}
"""Values of `rollout_correction.loss_type`. ppo_clip has no function of its own: it is the loss that
`actor.policy_loss.loss_mode` names."""


@dataclass(frozen=True)
class Bounds:
    """A threshold: an upper bound, with or without a lower one."""

    upper: float
    lower: float | None = None

    @classmethod
    def read(cls, value: Any) -> Bounds | None:
        """Parses a number or text; None unless it is one positive number or two in ascending order.

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
    """The entries of a list or of comma-separated text; any other value as a list of one."""
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
    ratio is the trainer's probability divided by the engine's."""

    rollout_is: str | None = option(None, choices=ROLLOUT_IS_LEVELS, no_effect=RATIO_IN_LOSS)
    """Importance sampling: weight each token's policy loss by its own ratio (token) or by that of the whole
    sequence (sequence); null: no weights."""
    rollout_is_threshold: Any = option(2.0, rule=THRESHOLD, no_effect=(NO_WEIGHTS, RATIO_IN_LOSS))
    """Cap on these weights (truncated importance sampling); or two bounds, such as 0.5_5.0, outside which a
    weight is 0 (IcePop)."""
    rollout_is_batch_normalize: bool = option(False, no_effect=(NO_WEIGHTS, RATIO_IN_LOSS))
    """Divide these weights by their mean over the mini-batch, of tokens or of sequences."""
    rollout_rs: Any = option(None, rule=REJECTIONS)
    """Rejection sampling: rules that drop tokens or whole sequences from the policy loss, as a list or
    separated by commas; null: none."""
    rollout_rs_threshold: Any = option(
        None,
        rule=THRESHOLDS,
        no_effect=no_effect_when(
            lambda s: s.rollout_rs is None, "{s}.rollout_rs=null", "{s}.rollout_rs=token_k1"
        ),
    )
    """Threshold of each rule, or one for all. k1: bounds of the ratio, such as 0.5_2.0; a single number is
    the upper bound and its reciprocal the lower one. k2 and k3: maximum divergence."""
    bypass_mode: bool = False
    """Use the engine's log-probabilities as the old ones instead of recomputing them. The ratio then compares
    the policy being trained with the engine."""
    loss_type: str = option("ppo_clip", choices=tuple(BYPASS_LOSSES), no_effect=unless("bypass_mode"))
    """Policy loss in bypass_mode. ppo_clip: the loss of actor.policy_loss; reinforce: the policy gradient
    without a clip."""


def is_corrected(section: RolloutCorrectionConfig) -> bool:
    """Whether any correction is on."""
    return section.bypass_mode or section.rollout_is is not None or section.rollout_rs is not None


def bounded_rules(section: RolloutCorrectionConfig) -> list[tuple[str, Bounds]]:
    """The rejection rules with their thresholds; a single threshold is repeated for every rule."""
    if section.rollout_rs is None:
        return []
    rules, thresholds = listed_in(section.rollout_rs), listed_in(section.rollout_rs_threshold)
    found = [bounds for bounds in map(Bounds.read, thresholds) if bounds is not None]
    return list(zip(rules, found * len(rules) if len(found) == 1 else found))


NORM_TYPES = ("batch", "group", "running")
SEVERAL_REWARDS = no_effect_when(
    lambda s: estimator_of(s.adv_estimator).several_rewards,
    "{s}.adv_estimator compares several rewards in place of the score",
)
ONE_REWARD = no_effect_when(
    lambda s: not estimator_of(s.adv_estimator).several_rewards,
    "{s}.adv_estimator compares a single reward, the score; only "
    + listed([name for name, one in ESTIMATORS.items() if one.several_rewards])
    + " compares several",
)


@dataclass
class AlgorithmConfig:
    """How advantages and returns are estimated from rewards."""

    adv_estimator: str = option("gae", choices=ESTIMATORS)
    """Advantage estimator. grpo_vectorized is grpo; rloo_vectorized is rloo, except that a prompt with a
    single response has advantage 0."""
    gamma: float = option(1.0, ge=0, le=1, no_effect=OTHER_ESTIMATOR)
    """Discount factor per token."""
    lam: float = option(1.0, ge=0, le=1, no_effect=OTHER_ESTIMATOR)
    """Lambda of generalized advantage estimation (GAE)."""
    critic_gamma: float | None = option(None, ge=0, le=1, follows="gamma", no_effect=OTHER_ESTIMATOR)
    """Discount factor of the returns that the critic is trained to predict; null: gamma."""
    critic_lam: float | None = option(None, ge=0, le=1, follows="lam", no_effect=OTHER_ESTIMATOR)
    """Lambda of those returns (decoupled GAE, for example 1.0 with lam=0.95); null: lam."""
    lam_length_alpha: float | None = option(None, gt=0, no_effect=OTHER_ESTIMATOR)
    """alpha of VAPO's length-adaptive lambda for the advantages, 1 - 1 / (alpha * trained tokens of the
    response); the paper uses 0.05. null: lam, whatever the length."""
    norm_adv_by_std_in_grpo: bool = option(True, no_effect=OTHER_ESTIMATOR)
    """Divide GRPO's advantages by the group's standard deviation; false is Dr. GRPO."""
    opmd_tau: float = option(1.0, gt=0, no_effect=OTHER_ESTIMATOR)
    """opmd: temperature of the baseline. A low one puts the baseline near the group's best score, a high one
    near its mean."""
    asymre_baseline_shift: float = option(-0.1, rule=FINITE, no_effect=OTHER_ESTIMATOR)
    """asymre: shift of the baseline from the group's mean; below 0, good samples count for more."""
    gdpo_reward_keys: list[str] | None = option(None, no_effect=ONE_REWARD)
    """Names of the reward function's outputs that GDPO normalizes separately."""
    gdpo_reward_weights: list[float] | None = option(None, no_effect=ONE_REWARD)
    """Weight of each of those rewards; null: 1 each."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from every token's reward."""
    kl_penalty: str = option("kl", choices=KL_ESTIMATORS, no_effect=unless("use_kl_in_reward"))
    """Estimator of that penalty: kl (also k1), abs, mse (k2) or low_var_kl (k3)."""
    kl_ctrl: KLControlConfig = option(factory=KLControlConfig, no_effect=unless("use_kl_in_reward"))
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    length_penalty: float = option(0.0, ge=0, no_effect=SEVERAL_REWARDS)
    """Weight of Kimi k1.5's length reward, which is added to the score: within a group, 0.5 for the shortest
    response down to -0.5 for the longest; at most 0 for a wrong response."""
    norm_mean_type: str | None = option(None, choices=NORM_TYPES, no_effect=SEVERAL_REWARDS)
    """Reward normalization: subtract the mean of all scores of the step (batch), of the scores for the same
    prompt (group), or of all scores of the run so far (running); null: none."""
    norm_std_type: str | None = option(None, choices=NORM_TYPES, no_effect=SEVERAL_REWARDS)
    """Divide by the standard deviation over the same scores; null: do not divide."""
    reward_clip: float | None = option(None, gt=0, no_effect=SEVERAL_REWARDS)
    """Clip normalized scores to [-x, x], before any KL penalty; null: no clipping."""
    whiten_advantages: bool = option(
        False,
        no_effect=no_effect_when(
            lambda s: estimator_of(s.adv_estimator).whitened,
            "{s}.adv_estimator whitens its advantages anyway",
        ),
    )
    """Whiten advantages over all trained tokens of the step: mean 0, variance 1."""
    advantage_clip: float | None = option(None, gt=0)
    """Clip advantages to [-x, x], after whitening; null: no clipping."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


def compares_groups(config: AlgorithmConfig) -> bool:
    """Whether a response is compared with others to the same prompt."""
    of_groups = "group" in (config.norm_mean_type, config.norm_std_type)
    return estimator_of(config.adv_estimator).groups or of_groups or config.length_penalty > 0
