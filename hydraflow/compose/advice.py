"""Warns about values that are legal but almost certainly unintended.

In: a composed configuration. Out: notes that name the key, the value, its effect and typical values.
Left out on purpose: illegal values (`rules.py`), keys without effect (`effects.py`). Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hydraflow.algorithms.config import POLICY_LOSSES, Loss, estimator_of
from hydraflow.batch_plan.roles import needs_critic
from hydraflow.compose.effects import without_effect
from hydraflow.device import listed_gpus, usable_cores
from hydraflow.engine.config import OptimConfig
from hydraflow.models.config import ModelConfig
from hydraflow.schema import PPOConfig, SupervisedConfig
from hydraflow.system.printing import count
from hydraflow.system.whole_files import json_object
from hydraflow.workers.config import ActorConfig

POLICY = "actor_rollout_ref"
_LARGEST_HIDDEN_SIZE = 16384
"""Hidden size of Llama 3.1 405B: the limit for models whose config.json is not on this machine."""


def advice(config: object, *, planning: bool) -> Iterator[str]:
    """All notes about a configuration. `planning`: the run will be on another machine."""
    if isinstance(config, PPOConfig):
        roles: dict[str, ModelConfig] = {POLICY: config.actor_rollout_ref.model}
        optimizers = {f"{POLICY}.actor.optim": config.actor_rollout_ref.actor.optim}
        if needs_critic(config):
            roles["critic"], optimizers["critic.optim"] = config.critic.model, config.critic.optim
        yield from _single_responses(config)
        for key, optim in optimizers.items():
            yield from _learning_rate(optim, key)
        yield from _clip_range(config)
        yield from _entropy(config.actor_rollout_ref.actor)
        yield from _teachers(config)
        for key, model in roles.items():
            yield from _rank(model, f"{key}.model")
        yield from _processes(config, planning=planning)
    elif isinstance(config, SupervisedConfig):
        yield from _processes(config, planning=planning)
        yield from _learning_rate(config.optim, "optim")
        yield from _rank(config.model, "model")


def _single_responses(config: PPOConfig) -> Iterator[str]:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if estimator_of(estimator).groups and n == 1 and config.batch.trajectories_per_step is None:
        yield (
            f"{POLICY}.rollout.n=1: {estimator} compares the responses to a prompt, and a single one has none"
            f" to compare with; typical values are {POLICY}.rollout.n=4 to 16"
        )


def _learning_rate(optim: OptimConfig, key: str) -> Iterator[str]:
    if optim.lr == 0:
        yield f"{key}.lr=0: no weight will change; typical values are {key}.lr=1e-6 to 1e-3"
    elif optim.lr > 1:
        yield (
            f"{key}.lr={optim.lr:g}: steps this large destroy the weights; typical values are"
            f" {key}.lr=1e-6 to 1e-3"
        )


def _clip_range(config: PPOConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    name = "clip_ratio" if actor.clip_ratio_low is None else "clip_ratio_low"
    key, low = f"{POLICY}.actor.{name}", getattr(actor, name)
    loss = POLICY_LOSSES.get(actor.policy_loss.loss_mode, Loss())  # an unknown name is reported elsewhere
    if low >= 1 and loss.stops_below and without_effect(config, key) is None:
        yield (
            f"{key}={low:g}: the ratio of two probabilities is never below 1 - {low:g}, so nothing is clipped"
            f" from below; a typical value is {key}=0.2"
        )


def _entropy(actor: ActorConfig) -> Iterator[str]:
    if actor.entropy_coeff < 0:
        yield (
            f"{POLICY}.actor.entropy_coeff={actor.entropy_coeff:g}: a negative coefficient rewards low"
            " entropy, so the policy stops exploring; a typical value is"
            f" {POLICY}.actor.entropy_coeff=0 or a small positive number"
        )


def _teachers(config: PPOConfig) -> Iterator[str]:
    loss, key = config.distillation.distillation_loss, "distillation.distillation_loss.loss_mode"
    if not config.distillation.enabled or loss.over_vocabulary:
        return
    is_k1 = loss.loss_mode.removesuffix("+") in ("kl", "k1")
    if loss.use_policy_gradient and not is_k1:
        yield (
            f"{key}={loss.loss_mode}: as an advantage, its policy gradient is not that of the KL and"
            f" vanishes close to the teacher; a typical value is {key}=k1"
        )
    elif is_k1 and not loss.use_policy_gradient and not loss.loss_mode.endswith("+"):
        yield (
            f"{key}={loss.loss_mode}: as a loss term its expected gradient is 0, so nothing is learned from"
            f" the teachers; a typical value is {key}=k1+"
        )


def _rank(model: ModelConfig, key: str) -> Iterator[str]:
    hidden = _hidden_size(model) if model.lora_rank > 0 else None
    if model.lora_rank > (hidden or _LARGEST_HIDDEN_SIZE):
        whose = f"the model's hidden size {hidden}" if hidden else "the hidden size of any model"
        yield (
            f"{key}.lora_rank={model.lora_rank}: is more than {whose}, so the adapters are larger than the"
            f" matrices they change; typical values are {key}.lora_rank=8 to 64"
        )


def _hidden_size(model: ModelConfig) -> int | None:
    """The hidden size from `override_config` or a config.json on this machine; None: not known."""
    found = model.override_config.get("hidden_size")
    if found is None and model.path:
        found = (json_object(Path(os.path.expanduser(model.path)) / "config.json") or {}).get("hidden_size")
    return found if isinstance(found, int) else None


def _processes(config: PPOConfig | SupervisedConfig, *, planning: bool) -> Iterator[str]:
    trainer = config.trainer
    on_cpu = trainer.device == "cpu" or (trainer.device == "auto" and not planning and not listed_gpus())
    processes, cores = trainer.n_gpus_per_node, usable_cores()
    if on_cpu and processes is not None and processes > cores:
        yield (
            f"trainer.n_gpus_per_node={processes}: on a CPU these are processes, and this machine has"
            f" {count(cores, 'core')}, so they take turns; trainer.n_gpus_per_node={cores}"
        )
