"""Rules across the keys of sampling, rewards, advantages and losses.

In: a composed configuration. Out: problems, as in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from hydraflow.algorithms.config import (
    ESTIMATORS,
    MOST_KL_ERROR,
    REJECTIONS,
    THRESHOLDS,
    Bounds,
    bounded_rules,
    estimator_of,
    listed_in,
)
from hydraflow.batch_plan.topology import ROLLOUT
from hydraflow.errors import Problem, shown
from hydraflow.options import effective_value
from hydraflow.schema import PPOConfig


def _samples_are_drawn(config: PPOConfig) -> Iterator[Problem]:
    rollout, held_out = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    if rollout.temperature == 0 and not config.trainer.val_only:
        rule = "must be above 0 for training: greedy responses carry no policy gradient"
        yield Problem(f"{ROLLOUT}.temperature", rollout.temperature, rule, f"{ROLLOUT}.temperature=1.0")
    if held_out.do_sample and held_out.temperature == 0:
        key, rule = f"{ROLLOUT}.val_kwargs", "must be above 0 when do_sample=true"
        remedy = f"{key}.temperature=1.0 or {key}.do_sample=false"
        yield Problem(f"{key}.temperature", held_out.temperature, rule, remedy)


def _values_come_from_a_critic(config: PPOConfig) -> Iterator[Problem]:
    if estimator_of(config.algorithm.adv_estimator).critic and config.critic.enable is False:
        rule = f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs values"
        other = next(name for name, estimator in ESTIMATORS.items() if not estimator.critic)
        remedy = f"critic.enable=null or algorithm.adv_estimator={other}"
        yield Problem("critic.enable", "false", rule, remedy)


def _a_ring_contains_the_clip_range(config: PPOConfig) -> Iterator[Problem]:
    actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor.policy_loss"
    chosen = actor.policy_loss
    is_ring = chosen.loss_mode == "rec" and chosen.rec_clip_mode == "ring"
    for side in ("low", "high") if is_ring else ():
        name, clip = f"rec_epsilon_{side}_prime", f"actor_rollout_ref.actor.clip_ratio_{side}"
        inner, outer = effective_value(actor, f"clip_ratio_{side}"), getattr(chosen, name)
        if outer <= inner:
            rule = f"must be above {clip}={inner:g}: tokens beyond this bound get a gradient again"
            yield Problem(f"{key}.{name}", outer, rule, f"{clip}={outer / 2:g}")


def _a_step_moves_the_kl_coefficient_a_little(config: PPOConfig) -> Iterator[Problem]:
    control, key = config.algorithm.kl_ctrl, "algorithm.kl_ctrl.horizon"
    trajectories = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    steers = config.algorithm.use_kl_in_reward and control.type == "adaptive"
    if steers and trajectories * MOST_KL_ERROR >= control.horizon:
        least = int(trajectories * MOST_KL_ERROR) + 1
        rule = (
            f"must be at least {least}: a step of {trajectories} trajectories could turn the sign of kl_coef"
        )
        yield Problem(key, control.horizon, rule, f"{key}={10 * least}")


def _several_rewards_are_named(config: PPOConfig) -> Iterator[Problem]:
    algorithm, key = config.algorithm, "algorithm.gdpo_reward_keys"
    if not estimator_of(algorithm.adv_estimator).several_rewards:
        return
    names, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    what = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if not names or len(set(names)) < len(names):
        rule = f"must name the rewards, each once: {what} compares numbers that the reward function returns"
        yield Problem(key, shown(names), rule, f"'{key}=[score,format]'")
    elif weights is not None and len(weights) != len(names):
        rule = f"must have a weight for each of the {len(names)} rewards of {key}"
        remedy = f"'algorithm.gdpo_reward_weights=[{','.join(['1.0'] * len(names))}]'"
        yield Problem("algorithm.gdpo_reward_weights", shown(weights), rule, remedy)
    if algorithm.use_kl_in_reward:
        rule = f"{what} takes its rewards from the reward function, without a KL penalty"
        remedy = "algorithm.use_kl_in_reward=false, or actor_rollout_ref.actor.use_kl_loss=true in its place"
        yield Problem("algorithm.use_kl_in_reward", "true", rule, remedy)


def _long_responses_have_a_penalty(config: PPOConfig) -> Iterator[Problem]:
    given, key = config.reward.reward_kwargs, "reward.reward_kwargs"
    buffer, limit = given.overlong_buffer_cfg, given.max_resp_len or config.data.max_response_length
    if buffer.enable and buffer.len > limit:
        source = f"{key}.max_resp_len" if given.max_resp_len else "data.max_response_length"
        rule = f"must be at most {source}={limit}: the penalty starts this many tokens before that length"
        key += ".overlong_buffer_cfg.len"
        yield Problem(key, buffer.len, rule, f"{key}={limit}")


def _a_greedy_baseline_has_the_scale_of_scores(config: PPOConfig) -> Iterator[Problem]:
    algorithm, what = config.algorithm, f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    if not estimator_of(algorithm.adv_estimator).greedy_baseline:
        return
    if config.reward.reward_model.enable:
        rule = f"{what} has its greedy responses scored by the reward function alone"
        yield Problem("reward.reward_model.enable", "true", rule, "reward.reward_model.enable=false")
    for name in ("norm_mean_type", "norm_std_type"):
        if (kind := getattr(algorithm, name)) is not None:
            rule = f"{what} subtracts a greedy response's raw score"
            yield Problem(f"algorithm.{name}", kind, rule, f"algorithm.{name}=null")


def _a_mean_that_divides_is_of_raw_scores(config: PPOConfig) -> Iterator[Problem]:
    algorithm, key = config.algorithm, "algorithm.norm_mean_type"
    if estimator_of(algorithm.adv_estimator).divides_by_mean and algorithm.norm_mean_type is not None:
        rule = (
            f"algorithm.adv_estimator={algorithm.adv_estimator} divides by the mean of a group's scores, from"
        )
        yield Problem(key, algorithm.norm_mean_type, f"{rule} which this subtracts another", f"{key}=null")


def _the_actor_computes_what_a_baseline_needs(config: PPOConfig) -> Iterator[Problem]:
    key, name = "algorithm.rollout_correction.bypass_mode", config.algorithm.adv_estimator
    if not estimator_of(name).sum_pi_squared:
        return
    if config.algorithm.rollout_correction.bypass_mode:
        rule = f"algorithm.adv_estimator={name} needs the actor's own probabilities"
        yield Problem(key, "true", rule, f"{key}=false")
    if config.actor_rollout_ref.actor.adaptive_entropy.enabled:
        key = "actor_rollout_ref.actor.adaptive_entropy.enabled"
        rule = f"with algorithm.adv_estimator={name} the pass before the update measures no entropy"
        yield Problem(key, "true", rule, f"{key}=false")


def _weights_keep_equal_probabilities(config: PPOConfig) -> Iterator[Problem]:
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction.rollout_is_threshold"
    bounds = Bounds.read(correction.rollout_is_threshold)
    if bounds is not None and not (bounds.lower or 0) <= 1 <= bounds.upper:
        rule = "must leave the weight of equal probabilities at 1; two bounds need decimal points: 0.5_5.0"
        yield Problem(key, shown(correction.rollout_is_threshold), rule, f"{key}=2.0")


def _rejection_has_thresholds(config: PPOConfig) -> Iterator[Problem]:
    asked, key = config.algorithm.rollout_correction, "algorithm.rollout_correction.rollout_rs_threshold"
    given = asked.rollout_rs_threshold
    if asked.rollout_rs is None or not REJECTIONS.holds(asked.rollout_rs):
        return
    rules = listed_in(asked.rollout_rs)
    usual = {rule: "0.5_2.0" if rule.endswith("_k1") else "0.01" for rule in rules}
    remedy = f"'{key}=[{','.join(usual.values())}]'"
    if given is None:
        yield Problem(key, "null", f"must be given: rollout_rs={','.join(rules)} rejects by it", remedy)
    elif THRESHOLDS.holds(given):
        if (count := len(listed_in(given))) not in (1, len(rules)):
            rule = f"has {count} thresholds; rollout_rs has {len(rules)} rules"
            yield Problem(key, shown(given), rule, remedy)
        elif why := next((why for one in bounded_rules(asked) if (why := _misfit(*one))), None):
            yield Problem(key, shown(given), why, remedy)


def _misfit(rule: str, bounds: Bounds) -> str | None:
    """Why a threshold does not suit this rejection rule; None if it does."""
    if not rule.endswith("_k1"):
        return None if bounds.lower is None else f"{rule} takes no lower bound: its divergence is at least 0"
    if bounds.lower is None:
        return None if bounds.upper > 1 else f"{rule} takes two bounds such as 0.5_2.0, or one number above 1"
    contains = bounds.lower <= 1 <= bounds.upper
    return None if contains else f"the bounds of {rule} must contain 1, the ratio of equal probabilities"


ALGORITHM_RULES = (
    _samples_are_drawn,
    _values_come_from_a_critic,
    _a_ring_contains_the_clip_range,
    _a_step_moves_the_kl_coefficient_a_little,
    _several_rewards_are_named,
    _the_actor_computes_what_a_baseline_needs,
    _a_greedy_baseline_has_the_scale_of_scores,
    _a_mean_that_divides_is_of_raw_scores,
    _long_responses_have_a_penalty,
    _weights_keep_equal_probabilities,
    _rejection_has_thresholds,
)
