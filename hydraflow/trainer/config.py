"""Configuration of the loop. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunConfig:
    """What every entry point that starts workers may be told."""

    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int | None = None
    """Worker processes per machine, each with one GPU; on a CPU processes alone. null: all GPUs, or 2 processes on a CPU."""
    device: str = "auto"
    """auto, cpu or cuda."""
    threads_per_process: int | None = None
    """Threads of each worker process on a CPU; null: usable cores / processes, at least 1."""
    seed: int = 1
    """Governs all randomness: data order, sampling, initial heads, mini-batches."""
    rpc_timeout: float = 3600.0
    """Seconds that the controller waits for any one call to a worker."""
    start_timeout: float = 300.0
    """Seconds that the controller waits for resources and for worker processes to start."""


@dataclass
class LoopConfig(RunConfig):
    """What every training loop may be told."""

    project_name: str = "hydraflow"
    """Name of the project in trackers."""
    experiment_name: str = "run"
    """Name of the run in trackers, and the start of its folder's name."""
    default_local_dir: str | None = None
    """Run folder; null: runs/<experiment_name>-<date>-<time>."""
    total_epochs: int = 1
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Training steps; null: from total_epochs."""
    max_wall_time: Any = None
    """Ends the run in good order after so many seconds, or 90s, 8m, 1h30m; null: no limit."""
    test_freq: int = -1
    """Steps between validations; -1: only at the end (and before the first step, if val_before_train)."""
    logger: list[str] = field(default_factory=lambda: ["console", "file", "tensorboard"])
    """Where metrics go: console, file, tensorboard; the file metrics.jsonl is always written."""
    save_final_model: bool = True
    """Write the trained weights as a Hugging Face directory at the end."""


@dataclass
class TrainerConfig(LoopConfig):
    """Reinforcement learning."""

    experiment_name: str = "ppo"
    """Name of the run in trackers, and the start of its folder's name."""
    critic_warmup: int = 0
    """First steps in which only the critic learns."""
    balance_batch: bool = True
    """Give the data ranks rows of about equal total length (inside each mini-batch)."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    log_val_generations: int = 0
    """Validation samples that are written to the run folder each time."""


@dataclass
class SFTTrainerConfig(LoopConfig):
    """Supervised training."""

    experiment_name: str = "sft"
    """Name of the run in trackers, and the start of its folder's name."""
