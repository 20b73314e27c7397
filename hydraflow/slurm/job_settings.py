"""The settings that a job's nodes need from the configuration, checked against the allocation before anything
starts.

In: the arguments of a job's command, and Slurm's variables. Out: `JobSettings`, as lines
for a shell; or every contradiction between configuration, batch plan and allocation at once, with exit code
2.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hydraflow.compose.allocated import BESIDE
from hydraflow.compose.judges import judge, missing
from hydraflow.compose.launch import launch
from hydraflow.compose.loading import EntryPoint
from hydraflow.device import CPU_PROCESSES
from hydraflow.schema import JOBS, GenerateConfig, JobConfig, PPOConfig, SupervisedConfig
from hydraflow.system.allocation import Allocation, allocation
from hydraflow.system.paths import expanded
from hydraflow.system.whole_files import replacing
from hydraflow.tracking.provenance import SLURM_JOB
from hydraflow.tracking.run_folder import RUNS, RunFolder, slug


@dataclass(frozen=True)
class JobSettings:
    """The settings that the job's scripts read."""

    cpus: int
    """CPUs that Ray counts on each node: at least one for each process, even with fewer cores."""
    gpus: int
    """GPUs that Ray counts on each node; -1: as many as it finds."""
    run_folder: str
    """Run folder; empty: the command creates none."""
    start_timeout: int
    """Seconds that nodes may take to join."""
    resumes: int = 0
    """1: an earlier start of this job began the run, so trainer.resume_mode=disable must not discard it."""

    def to_shell(self) -> str:
        """The settings as shell assignments, one a line."""
        words = {f"HF_{name.upper()}": shlex.quote(str(value)) for name, value in asdict(self).items()}
        return "".join(f"{name}={value}\n" for name, value in words.items())

    @classmethod
    def from_shell(cls, text: str) -> JobSettings:
        """What `to_shell` wrote.

        >>> settings = JobSettings(cpus=9, gpus=8, run_folder="/my runs/1", start_timeout=300)
        >>> JobSettings.from_shell(settings.to_shell()) == settings
        True
        """
        words = (word.partition("=") for word in shlex.split(text))
        found = {name.removeprefix("HF_").lower(): value for name, _, value in words}
        numbers = {name: int(value) for name, value in found.items() if name != "run_folder"}
        return cls(run_folder=found["run_folder"], **numbers)


def check(job: str, arguments: Sequence[str], use: Callable[[JobConfig], None]) -> int:
    """Composes and plans the run and checks it against the allocation; passes its configuration to `use` and
    returns the exit code. Missing files are reported as well, before the job waits in a queue."""
    given = sys.argv[1:]
    try:
        # as in the job, which starts a cluster before the command runs
        sys.argv[1:] = [*arguments, "ray_init.address=auto"]
        return launch(
            EntryPoint(job, JOBS[job], judges=(judge, missing)), lambda config, command: use(config)
        )
    finally:
        sys.argv[1:] = given


def write_settings(file: Path, config: JobConfig) -> None:
    """Writes the settings, for which all nodes wait."""
    with replacing(file) as unfinished:
        unfinished.write_text(job_settings_of(config, allocation()).to_shell())


def job_settings_of(config: JobConfig, given: Allocation | None) -> JobSettings:
    """The settings for the nodes; `given`: Slurm's allocation."""
    trainer = config.trainer
    on_cpus = trainer.device == "cpu"
    gpus = given.gpus if given else None
    processes = trainer.n_gpus_per_node or (None if on_cpus else gpus) or CPU_PROCESSES
    if isinstance(config, PPOConfig) and config.actor_rollout_ref.rollout.nnodes:
        processes = max(processes, config.actor_rollout_ref.rollout.n_gpus_per_node)
    cpus = config.ray_init.num_cpus or max((given.cpus if given else None) or 0, processes + BESIDE)
    folder = "" if isinstance(config, GenerateConfig) else _run_folder(config, given)
    counted = 0 if on_cpus else -1 if gpus is None else gpus
    wait, resumes = round(trainer.start_timeout), int(_resumes_own_run(config, folder, given))
    return JobSettings(cpus, counted, folder, wait, resumes)


def _resumes_own_run(config: JobConfig, folder: str, given: Allocation | None) -> bool:
    """`disable` refers to runs before this job: a requeued job still resumes from its own checkpoint."""
    if isinstance(config, GenerateConfig) or config.trainer.resume_mode != "disable" or given is None:
        return False
    return any(start.get(SLURM_JOB) == given.job for start in RunFolder(Path(folder)).starts())


def _run_folder(config: PPOConfig | SupervisedConfig, given: Allocation | None) -> str:
    """A requeued job must find its own folder again, not that of another job."""
    named = config.trainer.default_local_dir
    own = RUNS / f"{slug(config.trainer.experiment_name)}-job{given.job if given else '0'}"
    return str(expanded(named or own).absolute())
