"""The whole configuration as dataclasses: one class per entry point, whose leaves are the known keys. Each
section is defined next to its reader. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from hydraflow.algorithms.config import AlgorithmConfig, BradleyTerryConfig, PreferenceConfig
from hydraflow.algorithms.distillation.config import DistillationConfig
from hydraflow.data.config import (
    DataConfig,
    ExamplesConfig,
    GenerateDataConfig,
    GradedPairsConfig,
    PairsConfig,
    SFTDataConfig,
)
from hydraflow.dispatch.config import LogConfig, ProfilerConfig, RayInitConfig
from hydraflow.engine.config import FSDPConfig, OptimConfig
from hydraflow.generation.config import SamplingConfig
from hydraflow.models.config import ModelConfig, ModelSourceConfig
from hydraflow.options import free, option
from hydraflow.recipes.config import RecipeConfig
from hydraflow.rewards.config import ModelRewardConfig, RewardConfig
from hydraflow.trainer.config import (
    AsyncTrainingConfig,
    BatchConfig,
    ClusterConfig,
    RunConfig,
    SupervisedTrainerConfig,
    TrainerConfig,
)
from hydraflow.workers.config import ActorRolloutRefConfig, CheckpointConfig, CriticConfig


@dataclass
class CommandConfig:
    """Keys of every command."""

    strict: bool = free(False)
    """Reject keys that are set and have no effect, instead of only printing a note."""


@dataclass
class RayCommandConfig(CommandConfig):
    """Keys of every command that starts worker processes."""

    debug: bool = free(False)
    """One process per role, no deadlines, and Ray's debugger: breakpoint() in a worker waits for it.
    docs/debugging.md"""


@dataclass
class PPOConfig(RayCommandConfig):
    """python -m hydraflow.main_ppo"""

    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: ModelRewardConfig = field(default_factory=ModelRewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    batch: BatchConfig = option(factory=BatchConfig, in_plan=True)
    cluster: ClusterConfig = free(factory=ClusterConfig)
    ray_init: RayInitConfig = free(factory=RayInitConfig)
    log: LogConfig = free(factory=LogConfig)
    global_profiler: ProfilerConfig = free(factory=ProfilerConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)


@dataclass
class SupervisedConfig(RayCommandConfig):
    """Keys of the commands that train on examples."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: ExamplesConfig = field(default_factory=ExamplesConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    checkpoint: CheckpointConfig = free(factory=CheckpointConfig)
    trainer: SupervisedTrainerConfig = field(default_factory=SupervisedTrainerConfig)
    ray_init: RayInitConfig = free(factory=RayInitConfig)
    log: LogConfig = free(factory=LogConfig)
    global_profiler: ProfilerConfig = free(factory=ProfilerConfig)


@dataclass
class SFTConfig(SupervisedConfig):
    """python -m hydraflow.main_sft"""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)


@dataclass
class DPOConfig(SupervisedConfig):
    """python -m hydraflow.main_dpo"""

    data: PairsConfig = field(default_factory=PairsConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6))
    trainer: SupervisedTrainerConfig = field(
        default_factory=lambda: SupervisedTrainerConfig(experiment_name="dpo")
    )
    dpo: PreferenceConfig = field(default_factory=PreferenceConfig)


@dataclass
class RMConfig(SupervisedConfig):
    """python -m hydraflow.main_rm"""

    data: GradedPairsConfig = field(default_factory=GradedPairsConfig)
    trainer: SupervisedTrainerConfig = field(
        default_factory=lambda: SupervisedTrainerConfig(experiment_name="rm")
    )
    rm: BradleyTerryConfig = field(default_factory=BradleyTerryConfig)


@dataclass
class OutputConfig:
    """The file that receives the results."""

    path: str | None = None
    """File to write: Parquet with responses (main_generate), or JSON with averages (main_eval; null: only
    printed)."""


@dataclass
class GenerateConfig(RayCommandConfig):
    """python -m hydraflow.main_generate"""

    model: ModelSourceConfig = field(default_factory=ModelSourceConfig)
    rollout: SamplingConfig = field(default_factory=SamplingConfig)
    data: GenerateDataConfig = field(default_factory=GenerateDataConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    trainer: RunConfig = field(default_factory=RunConfig)
    ray_init: RayInitConfig = free(factory=RayInitConfig)


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


JobConfig = PPOConfig | SupervisedConfig | GenerateConfig
JOBS: dict[str, type[JobConfig]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
    "generate": GenerateConfig,
}
"""Commands that start worker processes, by their names without `main_`."""

Entry = TypeVar("Entry")


def entry_for(table: Mapping[type, Entry], kind: type) -> Entry | None:
    """A table's entry for a configuration class, or for its nearest base class.

    >>> entry_for({SupervisedConfig: 1, PPOConfig: 2}, RMConfig), entry_for({PPOConfig: 2}, RMConfig)
    (1, None)
    """
    return next((table[one] for one in kind.__mro__ if one in table), None)
