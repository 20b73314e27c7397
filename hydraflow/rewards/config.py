"""Configuration of rewards. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CustomRewardConfig:
    """The user's own reward function."""

    path: str | None = None
    """Python file that holds it; null: the built-in functions, chosen by data.reward_fn_key."""
    name: str = "compute_score"
    """Its name: name(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float or dict
    with 'score'."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that it gets besides."""


@dataclass
class RewardModelConfig:
    """A model that scores responses."""

    enable: bool = False
    """Score with a model."""
    model_path: str | None = None
    """Directory of the model."""
    micro_batch_size_per_gpu: int | None = None
    """Trajectories per data rank in one forward; null: the largest that fits max_token_len_per_gpu."""
    max_token_len_per_gpu: int = 32768
    """Tokens per device in one forward."""
    enable_resource_pool: bool = False
    """Give it devices of its own: nnodes machines with n_gpus_per_node each."""
    nnodes: int = 1
    """Machines of its own."""
    n_gpus_per_node: int = 8
    """Devices on each of them."""
    device_mapping: Any = None
    """Devices of the role; null: all devices of the trainer, or its own."""
    tensor_model_parallel_size: int = 1
    """Devices that share each matrix."""


@dataclass
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    num_workers: int = 1
    """Processes that score, each one row at a time; 0: the process that asks, where breakpoint() works and no
    row has limits."""
    timeout: float = 10.0
    """Seconds a row may take, without those in which its process was ready to run and had no processor; never
    more than four times as many by the clock. A row that takes longer scores failure_score and is counted."""
    max_memory: float = 16.0
    """GiB of data that a reward process, and each process that it starts, may allocate, used or not
    (RLIMIT_DATA); a row that asks for more raises MemoryError. Threads of numerical libraries each take
    some."""
    failure_score: float = 0.0
    """Score of a row whose function raised or took too long."""
    max_failed_share: float = 0.5
    """Share of failed rows in a step, a validation or a file of main_eval above which the run ends with exit
    code 5; 1.0: never."""


@dataclass
class ModelRewardConfig(RewardConfig):
    """The same, and a model that scores."""

    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
