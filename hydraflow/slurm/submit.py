"""Submits a run to Slurm: checks it against the requested allocation, fills the batch script, calls sbatch.

In: a `Submission`. Out: an exit code; 2 with every contradiction between options, configuration, batch plan
and cluster. Left out on purpose: what happens in the job (`scripts/slurm/`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydraflow.compose.command_words import combinations
from hydraflow.errors import ConfigError, EnvironmentFault, Problem
from hydraflow.schema import GenerateConfig, JobConfig
from hydraflow.slurm.job_settings import check
from hydraflow.slurm.options import Submission
from hydraflow.slurm.script import fill, shipped, unquoted
from hydraflow.system.allocation import JOB
from hydraflow.system.printing import count, reader_may_leave

LOGS = Path("runs/slurm")
FOLDER = "trainer.default_local_dir"
PARTITION = "SBATCH_PARTITION"
"""A variable of sbatch's, which it prefers to what the script says."""
SECONDS = 60.0
"""Seconds that Slurm's commands may take to answer."""
LAST_LINES = 20
"""Lines of a failed job's log that are shown."""


def submit(given: Submission) -> int:
    """Submits, or prints the script; returns the exit code. Raises ConfigError and EnvironmentFault."""
    sweep = combinations(given.arguments) if given.multirun else [given.arguments]
    configs: list[JobConfig] = []
    with _as_in_the_job(given):
        for arguments in sweep:
            if code := check(given.job, arguments, configs.append):
                return code
    _require_folders(configs)
    if given.dry_run:
        with reader_may_leave():
            print(script_of(given, sweep), end="")
        return 0
    _require_room(given)
    LOGS.mkdir(parents=True, exist_ok=True)
    return _hand_over(given, sweep)


def _require_folders(sweep: Sequence[JobConfig]) -> None:
    """Raises ConfigError if jobs of a sweep share a run folder: the first to start would lock the others
    out."""
    with_folder = [config for config in sweep if not isinstance(config, GenerateConfig)]
    named = Counter(config.trainer.default_local_dir for config in with_folder)
    shared = next((folder for folder, jobs in named.items() if folder and jobs > 1), None)
    if shared is not None:
        several = f"{named[shared]} of the {len(sweep)} jobs"
        rule = f"is the folder of {several}, and a folder holds one run at a time"
        own = "each job then has its own folder, runs/<experiment>-job<id>"
        raise ConfigError.one(FOLDER, shared, rule, f"leave out {FOLDER}: {own}")


def directives_of(given: Submission, *, jobs: int) -> dict[str, str | None]:
    """Options of sbatch with their values, as `fill` takes them; several jobs are an array."""
    directives: dict[str, str | None] = {
        "--job-name": given.name,
        "--nodes": str(given.nodes),
        "--gpus-per-node": str(given.gpus_per_node) if given.gpus_per_node else None,
        "--cpus-per-task": str(given.cores) if given.cores else None,
        "--mem": given.mem,
        "--exclusive": "" if given.exclusive else None,
        "--time": given.time,
        "--signal": f"B:USR1@{given.warning}",
        "--output": f"{LOGS}/%x-%{'A_%a' if jobs > 1 else 'j'}.log",
        "--array": f"0-{jobs - 1}" if jobs > 1 else None,
        "--partition": given.partition,
        "--account": given.account,
        "--qos": given.qos,
    }
    if not given.requeue:
        directives |= {"--requeue": None, "--no-requeue": ""}
    for line in given.sbatch:
        option, _, value = line.partition("=")
        directives[option] = unquoted(value)
    return directives


def script_of(given: Submission, sweep: Sequence[Sequence[str]]) -> str:
    """The batch script with this submission's values."""
    settings = {
        "HYDRAFLOW_PYTHON": given.python,
        "HYDRAFLOW_MODULE": f"hydraflow.main_{given.job}",
        "HYDRAFLOW_SCRIPTS": str(shipped("scripts/slurm")),
    }
    if given.container:
        settings["HYDRAFLOW_CONTAINER"] = given.container
    if given.interface:
        settings["HYDRAFLOW_NETWORK_INTERFACE"] = given.interface
    template = shipped("examples/slurm/ppo.sbatch").read_text()
    return fill(template, directives_of(given, jobs=len(sweep)), settings, sweep)


@contextmanager
def _as_in_the_job(given: Submission) -> Iterator[None]:
    """Slurm's variables as they will be in the job, so that the run is checked here as it will be there."""
    future = {JOB: "(to be submitted)", "SLURM_JOB_NUM_NODES": str(given.nodes)}
    if given.gpus_per_node:
        future["SLURM_GPUS_ON_NODE"] = str(given.gpus_per_node)
    if given.cores:
        future["SLURM_CPUS_ON_NODE"] = str(given.cores)
    before = dict(os.environ)
    outside = _outside_of_jobs()
    os.environ.clear()
    os.environ.update(outside | future)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _outside_of_jobs() -> dict[str, str]:
    """This environment without the job that this process may itself be in. A job inherits the environment
    that it is submitted from, and srun would take variables that Slurm does not set again from the outer job:
    memory for each CPU, cores for each task."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
    return {name: text for name, text in os.environ.items() if not name.startswith("SLURM_") or name in kept}


def _require_room(given: Submission) -> None:
    """Raises ConfigError if the partition can never satisfy the request; whether it is free now is up to
    Slurm."""
    for program in ("sbatch", "sinfo"):
        if shutil.which(program) is None:
            rule = "is not on PATH: this is not a machine of a Slurm cluster"
            raise ConfigError.one(program, None, rule, "submit ... --dry-run")
    listed = _run(["sinfo", "--all", "--noheader", "--format=%P|%D|%c"], SECONDS)
    if listed.returncode:
        raise EnvironmentFault(f"sinfo fails: {listed.stderr.strip()}")
    partitions, default = _partitions(listed.stdout)
    named = os.environ.get(PARTITION) or directives_of(given, jobs=1)["--partition"] or default
    names = named.split(",") if named else []  # Slurm takes the first free one
    if set(names) - set(partitions):
        rule = f"the partitions here are {', '.join(partitions)}"
        remedy = " or ".join(f"--partition {one}" for one in partitions)
        if variable := os.environ.get(PARTITION):
            raise ConfigError.one(PARTITION, variable, rule, f"unset {PARTITION}, and {remedy}")
        raise ConfigError.one(f"--partition {named}", None, rule, remedy)
    problems = [list(_lacks(given, name, *partitions[name])) for name in names]
    if names and all(problems):
        raise ConfigError(problems[0])


def _lacks(given: Submission, partition: str, nodes: int, cpus: int) -> Iterator[Problem]:
    if given.nodes > nodes:
        rule = f"partition {partition} has {count(nodes, 'node')}"
        yield Problem(f"--nodes {given.nodes}", None, rule, f"--nodes {nodes}")
    if given.cores and given.cores > cpus:
        rule = f"the largest node of partition {partition} has {cpus} CPUs"
        yield Problem(f"--cpus-per-task {given.cores}", None, rule, f"--cpus-per-task {cpus}")


def _partitions(listed: str) -> tuple[dict[str, tuple[int, int]], str | None]:
    """Partition -> (number of nodes, CPUs of the largest node); and the name of the default partition.

    >>> _partitions("main*|2|8\\nbig|1|64\\nbig|3|128+\\n")
    ({'main': (2, 8), 'big': (4, 128)}, 'main')
    """
    found: dict[str, tuple[int, int]] = {}
    default = None
    for line in listed.splitlines():
        name, nodes, cpus = line.strip().split("|")
        if name.endswith("*"):
            name = default = name[:-1]
        counted, largest = found.get(name, (0, 0))
        found[name] = counted + int(nodes), max(largest, int(cpus.rstrip("+")))
    return found, default


def _hand_over(given: Submission, sweep: Sequence[Sequence[str]]) -> int:
    words = ["sbatch", "--parsable", *(["--wait"] if given.wait else [])]
    done = _run(words, None if given.wait else SECONDS, script_of(given, sweep))
    number = done.stdout.strip().partition(";")[0]
    if not number:
        reason = done.stderr.strip().removeprefix("sbatch: error: ")
        rule = f"Slurm refuses the job: {reason}"
        raise ConfigError.one("sbatch", None, rule, "submit ... --dry-run shows the request")
    directives = directives_of(given, jobs=len(sweep))
    log = _log(directives, number)
    print(f"{'array' if directives['--array'] else 'job'} {number} submitted; its log: {log}")
    print(f"squeue --job {number} shows its state, scancel {number} cancels it")
    if given.wait and done.returncode:
        last = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.is_file() else []
        report = "\n".join([f"job {number} ended with {done.returncode}; the last lines of {log}:", *last])
        print(report, file=sys.stderr)
    return done.returncode


def _log(directives: Mapping[str, str | None], number: str) -> Path:
    """Path of the job's log; `*` stands for the task of an array."""
    text = (directives["--output"] or "").replace("%x", directives["--job-name"] or "").replace("%a", "*")
    return Path(text.replace("%A", number).replace("%j", number))


def _run(
    words: Sequence[str], seconds: float | None, script: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands, `script` as its input. Raises EnvironmentFault if it does not answer in
    time."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": _outside_of_jobs()}
    try:
        return subprocess.run(words, input=script, timeout=seconds, check=False, **options)
    except subprocess.TimeoutExpired:
        text = f"{words[0]} has not answered for {seconds:g} s: Slurm's controller is down or busy"
        raise EnvironmentFault(text) from None
