"""Configuration of the mathematics. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class KLControlConfig:
    """How the coefficient of the KL penalty in the reward moves."""

    type: str = "fixed"
    """fixed, or adaptive (Ziegler et al. 2019)."""
    kl_coef: float = 0.001
    """Its first value."""
    horizon: int = 10000
    """Trajectories over which the adaptive controller moves."""
    target_kl: float = 0.1
    """KL per trained token, averaged over trajectories, that the adaptive controller steers to."""


@dataclass
class PolicyLossConfig:
    """Which policy loss."""

    loss_mode: str = "vanilla"
    """vanilla (clipped PPO with dual clip)."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): prompts whose responses all score the same are replaced by others."""

    enable: bool = False
    """Sample until a step holds data.train_batch_size prompts with different scores."""
    metric: str = "acc"
    """Score that must differ: acc, score or seq_reward."""
    max_num_gen_batches: int = 0
    """Batches of data.gen_batch_size prompts that one step may sample; 0: no limit."""


@dataclass
class AlgorithmConfig:
    """Advantages and rewards."""

    adv_estimator: str = "gae"
    """gae, grpo, rloo or reinforce_plus_plus."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """Lambda of generalised advantage estimation."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the group's standard deviation."""
    use_kl_in_reward: bool = False
    """Take a KL penalty off every token's reward."""
    kl_penalty: str = "kl"
    """Its estimator: kl (k1), abs, mse (k2) or low_var_kl (k3)."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
