"""Configuration of the roles: actor, reference, critic, and what they share. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydraflow.algorithms.config import (
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    AdaptiveEntropyConfig,
    PolicyLossConfig,
)
from hydraflow.engine.config import TRAIN_ENGINES, FSDPConfig, MegatronConfig, OptimConfig
from hydraflow.generation.config import RolloutConfig
from hydraflow.models.config import ModelConfig, PolicyModelConfig
from hydraflow.options import FINITE, Rule, free, no_effect_when, option, unless, unread

OTHER_LOSS = unread(POLICY_LOSSES, "policy_loss.loss_mode", is_algorithm=True)
OTHER_ENGINE = unread(TRAIN_ENGINES, "strategy")
REC_CLIPS_NOTHING = no_effect_when(
    lambda s: (s.policy_loss.loss_mode, s.policy_loss.rec_clip_mode) == ("rec", "none"),
    "{s}.policy_loss.rec_clip_mode=none has no bounds",
    "{s}.policy_loss.rec_clip_mode=one-side",
)
CLIPS_NOTHING = (OTHER_LOSS, REC_CLIPS_NOTHING)


def saved_of(*more: str) -> Rule:
    """The rule for checkpoint contents: model is required; optimizer, extra and `more` are optional."""
    parts = ("model", "optimizer", "extra", *more)
    return Rule(
        f"must list model, and may list {', '.join(parts[1:])}",
        lambda value: {"model"} <= set(value) <= set(parts),
    )


@dataclass
class CheckpointConfig:
    """Checkpoint contents of a role."""

    save_contents: list[str] = option(
        factory=lambda: ["model", "optimizer", "extra"], rule=saved_of("hf_model"), verl=("contents",)
    )
    """Contents to save: model (weights), optimizer, extra (schedule state), hf_model (full weights as a
    Hugging Face directory)."""
    load_contents: list[str] = option(factory=lambda: ["model", "optimizer", "extra"], rule=saved_of())
    """Contents that a resumed run restores: model, and optionally optimizer and extra."""
    async_save: bool = True
    """Asynchronous saving: copy the state to host memory and write it during training; false blocks until
    written."""


@dataclass
class RouterReplayConfig:
    """Routing replay for mixtures of experts."""

    mode: str = option("disabled", choices=("disabled", "R2", "R3"))
    """R2: the update replays each token's experts from the old-log-prob pass, which then always takes place.
    R3: that pass and the update replay the experts from the generation engine. Routing probabilities are
    always recomputed. disabled: the router chooses freely, so a token near the boundary between experts may
    look as if the policy had moved."""

    @property
    def by_actor(self) -> bool:
        """R2: the actor's old-log-prob pass records the experts."""
        return self.mode == "R2"

    @property
    def by_rollout(self) -> bool:
        """R3: the generation engine records them."""
        return self.mode == "R3"


@dataclass
class ActorConfig:
    """The policy being trained."""

    strategy: str = free("fsdp2", choices=TRAIN_ENGINES, verl=("fsdp_config.strategy",))
    """Training engine."""
    ppo_mini_batch_size: int = option(256, size=True, in_plan=True)
    """Mini-batch size: prompts per optimizer step (M of the batch plan); times rollout.n trajectories."""
    ppo_micro_batch_size_per_gpu: int | None = free(
        None,
        size=True,
        verl=("ppo_micro_batch_size",),
        no_effect=unless(
            "use_dynamic_bsz", False, why="{s}.use_dynamic_bsz=true fills micro-batches by tokens"
        ),
    )
    """Micro-batch size in trajectories per data rank (m); null: the largest that fits
    ppo_max_token_len_per_gpu."""
    use_dynamic_bsz: bool = free(False)
    """Fill micro-batches by tokens (ppo_max_token_len_per_gpu) instead of by trajectories."""
    ppo_max_token_len_per_gpu: int = free(16384, size=True)
    """Token budget per device of one forward pass."""
    ppo_epochs: int = option(1, size=True, in_plan=True)
    """PPO epochs: passes over each step's trajectories."""
    shuffle: bool = option(False, in_plan=True)
    """Shuffle prompts into mini-batches (seeded by trainer.seed)."""
    clip_ratio: float = option(0.2, gt=0, no_effect=CLIPS_NOTHING)
    """PPO clip range of the probability ratio."""
    clip_ratio_low: float | None = option(None, gt=0, follows="clip_ratio", no_effect=CLIPS_NOTHING)
    """Clip range below 1; null: clip_ratio."""
    clip_ratio_high: float | None = option(None, gt=0, follows="clip_ratio", no_effect=CLIPS_NOTHING)
    """Clip range above 1 (clip-higher); null: clip_ratio."""
    clip_ratio_c: float = option(3.0, gt=1, no_effect=OTHER_LOSS)
    """Dual clip: upper bound of the loss for negative advantages, as a multiple of the advantage."""
    tau_pos: float = option(1.0, gt=0, no_effect=OTHER_LOSS)
    """SAPO's temperature for positive advantages."""
    tau_neg: float = option(1.05, gt=0, no_effect=OTHER_LOSS)
    """SAPO's temperature for negative advantages."""
    loss_agg_mode: str = option("token-mean", choices=LOSS_AGG_MODES)
    """How the loss is averaged over tokens and sequences."""
    loss_scale_factor: float | None = option(
        None,
        gt=0,
        no_effect=unless(
            "loss_agg_mode",
            "seq-mean-token-sum-norm",
            why="only {s}.loss_agg_mode=seq-mean-token-sum-norm divides by it",
        ),
    )
    """Divisor of seq-mean-token-sum-norm; null: data.max_response_length."""
    entropy_coeff: float = option(0.0, rule=FINITE)
    """Coefficient of the entropy bonus; with adaptive_entropy that of the first step."""
    adaptive_entropy: AdaptiveEntropyConfig = field(default_factory=AdaptiveEntropyConfig)
    use_kl_loss: bool = False
    """Add a KL penalty against the reference policy to the loss."""
    kl_loss_coef: float = option(0.001, ge=0, no_effect=unless("use_kl_loss"))
    """Coefficient of that penalty."""
    kl_loss_type: str = option(
        "low_var_kl",
        choices=(*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)),
        no_effect=unless("use_kl_loss"),
    )
    """Estimator of that penalty: kl (also k1), abs, mse (k2) or low_var_kl (k3); a trailing + uses k2's
    gradient."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = option(factory=FSDPConfig, no_effect=OTHER_ENGINE)
    megatron: MegatronConfig = option(factory=MegatronConfig, no_effect=OTHER_ENGINE)
    checkpoint: CheckpointConfig = free(factory=CheckpointConfig)
    device_mapping: Any = free(None)
    """Devices of the role: a list of numbers, or text such as 0-7 or 0-3,8-11; null: all devices of the
    trainer."""


@dataclass
class RefConfig:
    """The frozen reference policy; unset batch sizes follow the actor's."""

    log_prob_micro_batch_size_per_gpu: int | None = free(None, size=True, verl=("log_prob_micro_batch_size",))
    """Micro-batch size in trajectories per data rank; null: the largest that fits
    log_prob_max_token_len_per_gpu."""
    log_prob_use_dynamic_bsz: bool | None = free(None)
    """Fill micro-batches by tokens (dynamic batch size); null: actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: int | None = free(None, size=True)
    """Token budget per device of one forward pass; null: actor.ppo_max_token_len_per_gpu."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    device_mapping: Any = free(None)
    """Devices of the role; null: the actor's."""


@dataclass
class ActorRolloutRefConfig:
    """The policy's three roles and the model they share."""

    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class CriticConfig:
    """The value model; null fields follow the actor."""

    enable: bool | None = None
    """Train a critic; null: if algorithm.adv_estimator needs values."""
    strategy: str = free("fsdp2", choices=TRAIN_ENGINES, verl=("fsdp_config.strategy",))
    """Training engine."""
    model: ModelConfig = field(default_factory=ModelConfig)
    ppo_mini_batch_size: int | None = option(None, size=True, in_plan=True)
    """Mini-batch size: prompts per optimizer step; null: the actor's."""
    ppo_micro_batch_size_per_gpu: int | None = free(None, size=True, verl=("ppo_micro_batch_size",))
    """Micro-batch size in trajectories per data rank; null: the largest that fits
    ppo_max_token_len_per_gpu."""
    use_dynamic_bsz: bool | None = free(None)
    """Fill micro-batches by tokens (dynamic batch size); null: the actor's."""
    ppo_max_token_len_per_gpu: int = free(32768, size=True)
    """Token budget per device of one forward pass in an update."""
    forward_micro_batch_size_per_gpu: int | None = free(None, size=True, verl=("forward_micro_batch_size",))
    """Micro-batch size for computing values, in trajectories per data rank; null:
    ppo_micro_batch_size_per_gpu."""
    forward_max_token_len_per_gpu: int | None = free(None, size=True)
    """Token budget per device for computing values; null: ppo_max_token_len_per_gpu."""
    ppo_epochs: int | None = option(None, size=True, in_plan=True)
    """PPO epochs: passes over each step's trajectories; null: the actor's."""
    shuffle: bool | None = option(None, in_plan=True)
    """Shuffle prompts into mini-batches; null: the actor's."""
    cliprange_value: float = option(0.5, gt=0)
    """PPO value clip range: a value may move this far from its old value before its gradient stops."""
    loss_agg_mode: str = option("token-mean", choices=LOSS_AGG_MODES)
    """As actor.loss_agg_mode."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = option(factory=FSDPConfig, no_effect=OTHER_ENGINE)
    megatron: MegatronConfig = option(factory=MegatronConfig, no_effect=OTHER_ENGINE)
    checkpoint: CheckpointConfig = free(factory=CheckpointConfig)
    device_mapping: Any = free(None)
    """Devices of the role; null: all devices of the trainer."""
