"""Configuration of the loop. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LocalConfig:
    """Where a run's processes are."""

    local: bool = False
    """Run everything in this process, without Ray: breakpoint() and pdb work anywhere, the numbers are those
    of one process per role."""


@dataclass
class DebugConfig(LocalConfig):
    """Parts of a run alone."""

    rollout_only: bool = False
    """Sample and score each step's prompts with the weights of model.path, and train nothing."""
    train_only: bool = False
    """Train on the trajectories of load_rollouts, without a generation engine and without validation."""
    save_rollouts: str | None = None
    """Folder to which each step's trajectories and scores are written; the controller reads them for that.
    null: none."""
    load_rollouts: str | None = None
    """Folder that save_rollouts wrote: each step takes its trajectories and scores from there. null: they are
    sampled."""


@dataclass
class RunConfig:
    """What every entry point that starts workers may be told."""

    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int | None = None
    """Worker processes per machine, each with one GPU; on a CPU processes alone. null: all GPUs, or 2
    processes on a CPU."""
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
    debug: LocalConfig = field(default_factory=LocalConfig)


@dataclass
class LoopConfig(RunConfig):
    """What every training loop may be told."""

    project_name: str = "hydraflow"
    """Name of the project in trackers."""
    experiment_name: str = "run"
    """Name of the run in trackers, and the start of its folder's name."""
    default_local_dir: str | None = None
    """Run folder; null: runs/<experiment_name>-<date>-<time>, or the newest such folder whose run was cut
    off."""
    total_epochs: int = 1
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Training steps; null: from total_epochs."""
    max_wall_time: Any = None
    """Ends the run in good order after so many seconds, or 90s, 8m, 1h30m; null: no limit."""
    test_freq: int = -1
    """Steps between validations; -1: only at the end (and before the first step, if val_before_train)."""
    logger: list[str] = field(default_factory=lambda: ["console", "file", "tensorboard"])
    """Where metrics go: console, file, tensorboard, wandb, mlflow, swanlab; the file metrics.jsonl is always
    written."""
    wandb_proxy: str | None = None
    """Proxy through which Weights & Biases alone is reached, http://host:port; the environment and everything
    else stay as they are."""
    save_final_model: bool = True
    """Write the trained weights as a Hugging Face directory at the end."""
    save_freq: int = -1
    """Training steps between checkpoints, and one at the end; -1: none, but for a run that is told to stop by
    a signal."""
    keep_best: str | None = None
    """Validation metric, such as val-core/arithmetic/acc/mean@1, whose best checkpoint is kept apart in
    best/; least wins for a loss."""
    stop_on_failed_save: bool = False
    """End the run when a checkpoint cannot be written (a full disk), instead of warning and going on."""
    max_skipped_steps: int = 3
    """Optimizer steps of one model, in a row, whose gradient is not finite: they are skipped, and at so many
    the run ends."""
    max_restarts: int = 0
    """Times that a run whose worker failed goes on by itself, from its last whole checkpoint."""
    restart_backoff: float = 10.0
    """Seconds before the first of these restarts; before each further one twice as many, up to 300."""
    resume_mode: str = "auto"
    """auto: go on from the run folder's last checkpoint, if there is one; disable: start anew; resume_path:
    resume_from_path."""
    resume_from_path: str | None = None
    """A checkpoint, .../global_step_N, to go on from with resume_mode=resume_path."""


@dataclass
class TrainerConfig(LoopConfig):
    """Reinforcement learning."""

    experiment_name: str = "ppo"
    """Name of the run in trackers, and the start of its folder's name."""
    critic_warmup: int = 0
    """First steps in which only the critic learns: the actor learns from step critic_warmup on. Steps count
    from 1, as in verl, so that 10 leaves 9 steps to the critic alone."""
    balance_batch: bool = True
    """Give the data ranks rows of about equal total length (inside each mini-batch)."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    log_val_generations: int = 0
    """Validation samples that are written to the run folder, and as a table to the trackers, each time."""
    rollout_data_dir: str | None = None
    """Folder for all responses of each training step, <step>.jsonl with prompt, response, score and
    reference; null: none."""
    validation_data_dir: str | None = None
    """The same for all responses of each validation."""
    max_actor_ckpt_to_keep: int | None = None
    """Checkpoints of the actor that stay, those of earlier starts of the run included; null: all."""
    max_critic_ckpt_to_keep: int | None = None
    """The same for the critic."""
    debug: DebugConfig = field(default_factory=DebugConfig)


@dataclass
class AsyncTrainingConfig:
    """Sampling beside training, with weights that may be some steps old."""

    staleness_threshold: float = 0.0
    """Trajectories that may come from older weights, as a share of those between two weight updates; 0:
    synchronous."""
    trigger_parameter_sync_step: int = 1
    """Optimizer rounds between two weight updates of the rollout."""
    require_batches: int = 1
    """Mini-batches that are gathered before a round starts."""
    partial_rollout: bool = False
    """Interrupt running responses at a weight update and continue them with the new weights."""


@dataclass
class ClusterConfig:
    """Machines that are planned for; nulls are taken from trainer.* and from this machine."""

    nodes: int | None = None
    """Machines; null: trainer.nnodes."""
    devices_per_node: int | None = None
    """Devices on each; null: trainer.n_gpus_per_node."""
    device: str | None = None
    """Kind of device, for the report: H100, A100, cpu, ...; null: this machine's."""
    device_memory_gib: float | None = None
    """Memory of one device in GiB; null: this machine's."""
    host_memory_gib: float | None = None
    """Memory of one machine in GiB; null: this machine's."""


@dataclass
class BatchConfig:
    """Other handles on the batch plan; each is another way to write a number, and must agree with the keys
    that are given."""

    gradient_accumulation_steps: int | None = None
    """Micro-batches of the actor per optimizer step and data rank (a)."""
    optimizer_steps_per_step: int | None = None
    """Optimizer steps of the actor per training step (K)."""
    global_batch_trajectories: int | None = None
    """Trajectories per optimizer step of the actor (G)."""
    trajectories_per_step: int | None = None
    """Trajectories per training step (S)."""


@dataclass
class SFTTrainerConfig(LoopConfig):
    """Supervised training."""

    experiment_name: str = "sft"
    """Name of the run in trackers, and the start of its folder's name."""
    max_ckpt_to_keep: int | None = None
    """Checkpoints that stay, those of earlier starts of the run included; null: all."""
