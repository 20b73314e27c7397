"""Configuration of rewards. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydraflow.options import FINITE, GIBIBYTES, SECONDS, Planned, Switch, idle_when, option, unless

NO_FUNCTION = idle_when(lambda s: s.path is None, "{s}.path is not given", "{s}.path=...")
NO_PROCESS = idle_when(
    lambda s: s.num_workers == 0,
    "rows that are scored in the process that asks have no limits",
    "{s}.num_workers=1",
)
SHARED_DEVICES = unless(
    "enable_resource_pool", why="{s}.enable_resource_pool=false: it shares the trainer's devices"
)


@dataclass
class CustomRewardConfig:
    """The user's own reward function."""

    path: str | None = None
    """Python file that holds it; null: the built-in functions, chosen by data.reward_fn_key."""
    name: str = option("compute_score", idle=NO_FUNCTION)
    """Its name: name(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float or dict
    with 'score'."""
    reward_kwargs: dict[str, Any] = option(factory=dict, idle=NO_FUNCTION)
    """Keyword arguments that it gets besides."""


@dataclass
class RewardModelConfig:
    """A model that scores responses."""

    enable: bool = option(
        False,
        switch=Switch(off=False, remedy="{s}.enable=true"),
        planned=Planned(bool, "score responses with the model {model_path}"),
    )
    """Score with a model."""
    model_path: str | None = None
    """Directory of the model."""
    micro_batch_size_per_gpu: int | None = option(None, shapes_training=False)
    """Trajectories per data rank in one forward; null: the largest that fits max_token_len_per_gpu."""
    max_token_len_per_gpu: int = option(32768, shapes_training=False)
    """Tokens per device in one forward."""
    enable_resource_pool: bool = option(False, shapes_training=False)
    """Give it devices of its own: nnodes machines with n_gpus_per_node each."""
    nnodes: int = option(1, shapes_training=False, idle=SHARED_DEVICES)
    """Machines of its own."""
    n_gpus_per_node: int = option(8, shapes_training=False, idle=SHARED_DEVICES)
    """Devices on each of them."""
    device_mapping: Any = option(None, shapes_training=False)
    """Devices of the role; null: all devices of the trainer, or its own."""
    tensor_model_parallel_size: int = option(1, shapes_training=False)
    """Devices that share each matrix."""


@dataclass
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    num_workers: int = option(1, ge=0, shapes_training=False)
    """Processes that score, each one row at a time; 0: the process that asks, where breakpoint() works and no
    row has limits."""
    timeout: float = option(10.0, rule=SECONDS, shapes_training=False, idle=NO_PROCESS)
    """Seconds a row may take, without those in which its process was ready to run and had no processor; never
    more than four times as many by the clock. A row that takes longer scores failure_score and is counted."""
    max_memory: float = option(16.0, rule=GIBIBYTES, shapes_training=False, idle=NO_PROCESS)
    """GiB of data that a reward process, and each process that it starts, may allocate, used or not
    (RLIMIT_DATA); a row that asks for more raises MemoryError. Threads of numerical libraries each take
    some."""
    failure_score: float = option(0.0, rule=FINITE)
    """Score of a row whose function raised or took too long."""
    max_failed_share: float = option(0.5, ge=0, le=1, shapes_training=False)
    """Share of failed rows in a step, a validation or a file of main_eval above which the run ends with exit
    code 5; 1.0: never."""


@dataclass
class ModelRewardConfig(RewardConfig):
    """The same, and a model that scores."""

    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
