"""The whole configuration as dataclasses. Standard library only.

In: nothing. Out: one class per entry point, whose leaves are the known keys. Each section is defined next to
its reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hydraflow.algorithms.config import AlgorithmConfig
from hydraflow.data.config import DataConfig, GenerateDataConfig, SFTDataConfig
from hydraflow.dispatch.config import LogConfig, ProfilerConfig, RayInitConfig
from hydraflow.engine.config import FSDPConfig, OptimConfig
from hydraflow.generation.config import SamplingConfig
from hydraflow.models.config import ModelConfig, ModelSourceConfig
from hydraflow.options import option
from hydraflow.recipes.config import RecipeConfig
from hydraflow.rewards.config import ModelRewardConfig, RewardConfig
from hydraflow.trainer.config import (
    AsyncTrainingConfig,
    BatchConfig,
    ClusterConfig,
    RunConfig,
    SFTTrainerConfig,
    TrainerConfig,
)
from hydraflow.workers.config import ActorRolloutRefConfig, CheckpointConfig, CriticConfig


@dataclass
class CommandConfig:
    """What every command has."""

    strict: bool = option(False, shapes_training=False)
    """Reject keys that are set and have no effect, instead of only printing a note."""


@dataclass
class RayCommandConfig(CommandConfig):
    """What every command has that starts processes."""

    debug: bool = option(False, shapes_training=False)
    """One process per role, no deadlines, and Ray's debugger: breakpoint() in a worker waits for it.
    docs/debugging.md"""


@dataclass
class PPOConfig(RayCommandConfig):
    """python -m hydraflow.main_ppo"""

    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: ModelRewardConfig = field(default_factory=ModelRewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    batch: BatchConfig = option(factory=BatchConfig, in_plan=True)
    cluster: ClusterConfig = option(factory=ClusterConfig, shapes_training=False)
    ray_init: RayInitConfig = option(factory=RayInitConfig, shapes_training=False)
    log: LogConfig = option(factory=LogConfig, shapes_training=False)
    global_profiler: ProfilerConfig = option(factory=ProfilerConfig, shapes_training=False)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)


@dataclass
class SFTConfig(RayCommandConfig):
    """python -m hydraflow.main_sft"""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    checkpoint: CheckpointConfig = option(factory=CheckpointConfig, shapes_training=False)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    ray_init: RayInitConfig = option(factory=RayInitConfig, shapes_training=False)
    log: LogConfig = option(factory=LogConfig, shapes_training=False)
    global_profiler: ProfilerConfig = option(factory=ProfilerConfig, shapes_training=False)


@dataclass
class OutputConfig:
    """The file that receives the results."""

    path: str | None = None
    """File to write: Parquet with responses (main_generate), or JSON with averages (main_eval; null: they are
    only printed)."""


@dataclass
class GenerateConfig(RayCommandConfig):
    """python -m hydraflow.main_generate"""

    model: ModelSourceConfig = field(default_factory=ModelSourceConfig)
    rollout: SamplingConfig = field(default_factory=SamplingConfig)
    data: GenerateDataConfig = field(default_factory=GenerateDataConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    trainer: RunConfig = field(default_factory=RunConfig)
    ray_init: RayInitConfig = option(factory=RayInitConfig, shapes_training=False)


@dataclass
class EvalDataConfig:
    """Input of main_eval: responses and the columns to read."""

    path: str | None = None
    """Parquet or JSONL file with responses."""
    response_key: str = "responses"
    """Column with the list of responses per prompt, or one response."""
    data_source_key: str = "data_source"
    """Column by which the reward function is chosen and the result is grouped."""
    reward_model_key: str = "reward_model"
    """Column with {style, ground_truth}."""


@dataclass
class EvalConfig(CommandConfig):
    """python -m hydraflow.main_eval"""

    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
