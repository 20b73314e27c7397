"""Configuration of the loop. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hydraflow.device import DEVICES
from hydraflow.options import (
    GIBIBYTES,
    NEVER_OR_COUNT,
    NOT_NEGATIVE_SECONDS,
    TIME,
    Planned,
    Rule,
    free,
    no_effect_when,
    option,
    replaced_by,
    required,
    unless,
)

LOGGERS = ("console", "file", "tensorboard", "wandb", "mlflow", "swanlab")
KNOWN_LOGGERS = Rule(f"may list {', '.join(LOGGERS)}", lambda value: set(value) <= set(LOGGERS), LOGGERS)
PROXY = Rule(
    "must be the address of a proxy, http://host:port",
    lambda value: re.fullmatch(r"https?://([^/\s@]+@)?[^/\s@:]+:\d{1,5}/?", value) is not None,
    example="http://host:3128",
)
AFTER_EACH_EPOCH = "after_each_epoch"
STEPS_OR_EPOCHS = Rule(
    f"must be -1, at least 1, or {AFTER_EACH_EPOCH}",
    lambda value: value == AFTER_EACH_EPOCH or (type(value) is int and NEVER_OR_COUNT.holds(value)),
)


@dataclass
class LocalConfig:
    """Running without worker processes."""

    local: bool = False
    """Run everything in this process, without Ray: breakpoint() and pdb work anywhere. Same numbers as with
    one process per role."""


@dataclass
class DebugConfig(LocalConfig):
    """Debugging parts of a run."""

    rollout_only: bool = False
    """Sample and score each step's prompts with the initial weights; train nothing."""
    train_only: bool = False
    """Train on the trajectories of load_rollouts, without generation or validation."""
    save_rollouts: str | None = None
    """Folder to write each step's trajectories and scores to; null: none."""
    load_rollouts: str | None = None
    """Folder written by save_rollouts, whose trajectories and scores replace sampling; null: sample."""


@dataclass
class RunConfig:
    """Settings of every command that starts workers."""

    nnodes: int = free(1, size=True)
    """Number of machines."""
    n_gpus_per_node: int | None = free(None, size=True)
    """Worker processes per machine, one per GPU (or plain processes on CPU). null: all GPUs, or 2 processes
    on CPU."""
    device: str = free("auto", choices=DEVICES)
    """Device type of the worker processes; auto: GPUs if there are any, else CPUs."""
    threads_per_process: int | None = free(None, ge=1)
    """Threads per worker process on CPU; null: usable cores / processes, at least 1."""
    seed: int = option(1, ge=0, le=2**63 - 1)
    """Seed of all randomness: data order, sampling, initial heads, mini-batches."""
    rpc_timeout: float = free(3600.0, gt=0)
    """Timeout, in seconds, of any one call to a worker, without the calls that it waits for."""
    start_timeout: float = free(300.0, gt=0)
    """Timeout, in seconds, for resources and worker processes to become ready."""
    debug: LocalConfig = free(factory=LocalConfig)


@dataclass
class LoopConfig(RunConfig):
    """Settings of every training loop."""

    project_name: str = free("hydraflow")
    """Project name in trackers."""
    experiment_name: str = free("run")
    """Run name in trackers, and prefix of the run folder's name."""
    default_local_dir: str | None = free(None)
    """Run folder; null: runs/<experiment_name>-<date>-<time>, or the latest such folder whose run was
    interrupted."""
    total_epochs: int = free(1, size=True, no_effect=replaced_by("total_training_steps"))
    """Epochs: passes over the training data."""
    total_training_steps: int | None = free(None, size=True)
    """Number of training steps; null: from total_epochs."""
    max_wall_time: Any = free(None, rule=TIME)
    """Wall-clock limit, in seconds or as 90s, 8m, 1h30m: the run stops cleanly after the step in which it is
    reached, with a checkpoint if save_freq is set. null: no limit."""
    test_freq: int = free(-1, rule=NEVER_OR_COUNT)
    """Steps between validations; -1: only at the end (and before the first step with val_before_train)."""
    logger: list[str] = free(factory=lambda: ["console", "file", "tensorboard"], rule=KNOWN_LOGGERS)
    """Metric trackers; metrics.jsonl is always written."""
    wandb_proxy: str | None = free(
        None,
        rule=PROXY,
        no_effect=no_effect_when(
            lambda s: "wandb" not in s.logger, "{s}.logger has no wandb", "{s}.logger=[console,wandb]"
        ),
    )
    """Proxy for Weights & Biases only, http://host:port."""
    save_final_model: bool = free(True)
    """Save the final weights as a Hugging Face directory."""
    save_freq: int = free(-1, rule=NEVER_OR_COUNT)
    """Steps between checkpoints (and one at the end); -1: none, except when a signal stops the run."""
    keep_best: str | None = free(None)
    """Validation metric, such as val-core/arithmetic/acc/mean@1, whose best checkpoint is kept in best/; for
    a loss, the lowest is best."""
    stop_on_failed_save: bool = free(False)
    """Stop the run if a checkpoint cannot be written (e.g. disk full) instead of warning and continuing."""
    max_skipped_steps: int = free(3, ge=1)
    """Consecutive optimizer steps of one model with a non-finite gradient, which are skipped, after which the
    run ends."""
    max_restarts: int = free(0, ge=0)
    """Automatic restarts from the last complete checkpoint after a worker fails."""
    restart_backoff: float = free(
        10.0,
        rule=NOT_NEGATIVE_SECONDS,
        no_effect=no_effect_when(lambda s: s.max_restarts == 0, "{s}.max_restarts=0", "{s}.max_restarts=3"),
    )
    """Seconds before the first automatic restart; doubles with each further one, up to 300."""
    resume_mode: str = free("auto", choices=("auto", "disable", "resume_path"))
    """auto: resume from the run folder's latest checkpoint, if any; disable: start from scratch; resume_path:
    resume from resume_from_path."""
    resume_from_path: str | None = free(
        None,
        beside=required(
            "{s}.resume_mode=resume_path resumes from it",
            "{s}.resume_from_path=.../global_step_N or {s}.resume_mode=auto",
        ),
        no_effect=unless("resume_mode", "resume_path"),
    )
    """Checkpoint to resume from, .../global_step_N, with resume_mode=resume_path."""

    def validates_after(self, step: int) -> bool:
        """Whether `test_freq` asks for a validation after this step."""
        return self.test_freq > 0 and step % self.test_freq == 0


@dataclass
class TrainerConfig(LoopConfig):
    """Reinforcement learning."""

    experiment_name: str = free("ppo")
    """Run name in trackers, and prefix of the run folder's name."""
    fuse_roles: bool = free(True)
    """Actor, critic, reference and native generation engine share a process on each device; false: each has
    processes of its own."""
    critic_warmup: int = option(0, ge=0)
    """Critic warm-up: the first step that also trains the actor; earlier steps train only the critic. Steps
    count from 1, as in verl, so 10 means 9 critic-only steps."""
    balance_batch: bool = free(True)
    """Balance the total sequence length across data ranks (within each mini-batch)."""
    keep_groups: bool = free(False)
    """Keep the responses to a prompt on one data rank and in one micro-batch of each update, so that packed
    rows compute their prompt once; in passes without an update, too, where the data ranks divide the
    prompts. Worth it where prompts are long and micro-batches are filled by tokens; balances ranks less
    closely."""
    val_before_train: bool = free(True)
    """Validate before the first step."""
    val_only: bool = free(False)
    """Validate and exit."""
    log_val_generations: int = free(0, ge=0)
    """Validation samples to log to the run folder and as a table to the trackers, per validation."""
    rollout_data_dir: str | None = free(None)
    """Folder for all responses of each training step, <step>.jsonl with prompt, response, score and ground
    truth; null: none."""
    validation_data_dir: str | None = free(None)
    """Folder for all responses of each validation; null: none."""
    max_actor_ckpt_to_keep: int | None = free(None, ge=1)
    """Checkpoints of the actor to keep, including those from before a resume; null: all."""
    max_critic_ckpt_to_keep: int | None = free(None, ge=1)
    """Checkpoints of the critic to keep; null: all."""
    debug: DebugConfig = free(factory=DebugConfig)


@dataclass
class AsyncTrainingConfig:
    """Asynchronous training: sampling in parallel with training, with weights that may be some steps old."""

    staleness_threshold: float = option(
        0.0,
        ge=0,
        le=1000,
        planned=Planned(
            lambda value: value > 0,
            "let a share of {value:g} of a step's trajectories come from older weights",
        ),
    )
    """Maximum fraction of trajectories from older weights between two weight updates; 0: synchronous."""
    trigger_parameter_sync_step: int = option(
        1,
        size=True,
        planned=Planned(
            lambda value: value > 1, "give new weights to the rollout after every {value} rounds of training"
        ),
    )
    """Training rounds between two weight updates of the rollout."""
    require_batches: int = option(
        1,
        size=True,
        planned=Planned(
            lambda value: value > 1, "start a round of training once {value} mini-batches are there"
        ),
    )
    """Mini-batches collected before a round starts."""
    partial_rollout: bool = option(
        False,
        planned=Planned(
            bool, "interrupt responses at a weight update and continue them with the new weights"
        ),
    )
    """Interrupt running responses at a weight update and continue them with the new weights."""


@dataclass
class ClusterConfig:
    """Machines to plan for; nulls follow trainer.* and this machine."""

    nodes: int | None = option(None, size=True)
    """Number of machines; null: trainer.nnodes."""
    devices_per_node: int | None = option(None, size=True)
    """Devices per machine; null: trainer.n_gpus_per_node."""
    device: str | None = None
    """Device name for the report: H100, A100, cpu, ...; null: this machine's."""
    device_memory_gib: float | None = option(None, rule=GIBIBYTES)
    """Memory per device, in GiB; null: this machine's."""
    host_memory_gib: float | None = option(None, rule=GIBIBYTES)
    """Memory per machine, in GiB; null: this machine's."""


@dataclass
class BatchConfig:
    """Other ways to set the sizes of the batch plan; each must agree with all other keys that are set."""

    gradient_accumulation_steps: int | None = option(None, size=True)
    """Gradient accumulation: micro-batches of the actor per optimizer step and data rank (a)."""
    optimizer_steps_per_step: int | None = option(None, size=True)
    """Optimizer steps of the actor per training step (K)."""
    global_batch_trajectories: int | None = option(None, size=True)
    """Trajectories per optimizer step of the actor (G)."""
    trajectories_per_step: int | None = option(None, size=True)
    """Trajectories per training step (S)."""


@dataclass
class SupervisedTrainerConfig(LoopConfig):
    """Supervised fine-tuning."""

    experiment_name: str = free("sft")
    """Run name in trackers, and prefix of the run folder's name."""
    test_freq: Any = free(-1, rule=STEPS_OR_EPOCHS)
    """Steps between validations, or after_each_epoch; -1: only at the end."""
    save_freq: Any = free(-1, rule=STEPS_OR_EPOCHS)
    """Steps between checkpoints (and one at the end), or after_each_epoch; -1: none, except when a signal
    stops the run."""
    max_ckpt_to_keep: int | None = free(None, ge=1)
    """Checkpoints to keep, including those from before a resume; null: all."""
