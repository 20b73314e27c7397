"""Configuration of rewards. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydraflow.options import FINITE, GIBIBYTES, SECONDS, Planned, Switch, no_effect_when, option, unless

NO_FUNCTION = no_effect_when(lambda s: s.path is None, "{s}.path is not given", "{s}.path=...")
NO_PROCESS = no_effect_when(
    lambda s: s.num_workers == 0,
    "rows that are scored in the process that asks have no limits",
    "{s}.num_workers=1",
)
SHARED_DEVICES = unless(
    "enable_resource_pool", why="{s}.enable_resource_pool=false: it shares the trainer's devices"
)


@dataclass
class CustomRewardConfig:
    """A custom reward function."""

    path: str | None = None
    """Python file with the function; null: the built-in functions, selected by data.reward_fn_key."""
    name: str = option("compute_score", no_effect=NO_FUNCTION)
    """Name of the function: name(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) ->
    float or dict with 'score'."""
    reward_kwargs: dict[str, Any] = option(factory=dict, no_effect=NO_FUNCTION)
    """Extra keyword arguments of the function."""


@dataclass
class RewardModelConfig:
    """A model that scores responses."""

    enable: bool = option(
        False,
        switch=Switch(off=False, remedy="{s}.enable=true"),
        planned=Planned(bool, "score responses with model_path={model_path}"),
    )
    """Score with a reward model."""
    model_path: str | None = None
    """Directory of the model."""
    micro_batch_size_per_gpu: int | None = option(None, size=True, shapes_training=False)
    """Micro-batch size in trajectories per data rank; null: the largest that fits max_token_len_per_gpu."""
    max_token_len_per_gpu: int = option(32768, size=True, shapes_training=False)
    """Token budget per device of one forward pass."""
    enable_resource_pool: bool = option(False, shapes_training=False)
    """Dedicated devices for the reward model: nnodes machines with n_gpus_per_node each."""
    nnodes: int = option(1, size=True, shapes_training=False, no_effect=SHARED_DEVICES)
    """Dedicated machines."""
    n_gpus_per_node: int = option(8, size=True, shapes_training=False, no_effect=SHARED_DEVICES)
    """Devices on each dedicated machine."""
    device_mapping: Any = option(None, shapes_training=False)
    """Devices of the role; null: all devices of the trainer, or the dedicated ones."""
    tensor_model_parallel_size: int = option(
        1, size=True, shapes_training=False, verl=("rollout.tensor_model_parallel_size",)
    )
    """Tensor-parallel size."""


@dataclass
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    num_workers: int = option(1, ge=0, shapes_training=False)
    """Reward processes, each scoring one row at a time; 0: score in the calling process, where breakpoint()
    works and rows have no limits."""
    timeout: float = option(10.0, rule=SECONDS, shapes_training=False, no_effect=NO_PROCESS)
    """Time limit per row in seconds, not counting time spent waiting for a processor; never more than four
    times as long by the clock. A row over the limit has failed."""
    max_memory: float = option(16.0, rule=GIBIBYTES, shapes_training=False, no_effect=NO_PROCESS)
    """Memory limit, in GiB, of a reward process and of each process it starts (RLIMIT_DATA: allocated, used
    or not). A row over the limit raises MemoryError."""
    failure_score: float = option(0.0, rule=FINITE)
    """Score of a row that has failed: in validations, in main_eval, and in training with on_failure=score."""
    max_failed_share: float = option(0.5, ge=0, le=1, shapes_training=False)
    """Fraction of failed rows in a step, a validation or a file of main_eval above which the run ends with
    exit code 5; 1.0: never."""


@dataclass
class ModelRewardConfig(RewardConfig):
    """How the responses of a training run are scored, and by which reward model."""

    on_failure: str = option("mask", choices=("mask", "score"))
    """What becomes of a row whose function raised or exceeded a limit. mask: it is not trained on, nor
    compared with its group; score: it is trained on with failure_score."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
