"""The options of `python -m hydraflow.slurm submit`, and their checks.

In: a command line. Out: a `Submission`, or one ConfigError with every mistake.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from hydraflow.compose.arguments import split
from hydraflow.errors import ConfigError, Problem
from hydraflow.schema import JOBS

SEPARATOR = "--"
CORES_PER_GPU, CORES_WITHOUT = 8, 4
"""Default number of cores per GPU to request; Slurm's own default is one core per task."""
_TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})")
_SIZE = re.compile(r"\d+[KMGT]?")
_CONTAINER = re.compile(r"(apptainer|pyxis):.+")
_NAME = re.compile(r"[\w.-]+")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?")


@dataclass
class Submission:
    """One job, as the user requested it."""

    job: str = "ppo"
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    job_name: str | None = None
    exclusive: bool = False
    requeue: bool = True
    warning: int = 120
    """Seconds before the time limit at which the job saves."""
    container: str | None = None
    interface: str | None = None
    python: str = field(default_factory=lambda: sys.executable)
    sbatch: list[str] = field(default_factory=list)
    multirun: bool = False
    dry_run: bool = False
    wait: bool = False
    arguments: list[str] = field(default_factory=list)
    """Arguments of the job's command."""

    @property
    def cores(self) -> int | None:
        """Cores to request on each node; None: all."""
        if self.cpus_per_task is None and not self.exclusive:
            return max(CORES_WITHOUT, CORES_PER_GPU * self.gpus_per_node)
        return self.cpus_per_task

    @property
    def name(self) -> str:
        return self.job_name or f"hydraflow-{self.job}"


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing argparse's own messages."""

    def error(self, message: str) -> NoReturn:
        command = "python -m hydraflow.slurm submit"
        raise ConfigError.one(command, None, message, f"{command} --help")


def parse(argv: Sequence[str]) -> Submission:
    """The submission that a command line requests; what follows `--` goes to the command. Raises ConfigError.

    >>> parse(["--nodes", "4", "--gpus-per-node=8", "--", "data.train_batch_size=512"]).arguments
    ['data.train_batch_size=512']
    """
    own, arguments = list(argv), []
    if SEPARATOR in own:
        cut = own.index(SEPARATOR)
        own, arguments = own[:cut], own[cut + 1 :]
    submission = _parser().parse_args(own, namespace=Submission(arguments=arguments))
    if problems := list(_problems(submission)):
        raise ConfigError(problems)
    return submission


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m hydraflow.slurm submit",
        description="Checks a run against the allocation, fills examples/slurm/ppo.sbatch and submits it.",
        usage="%(prog)s [options] -- [key=value ...]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--job", choices=tuple(JOBS), help="the NAME of python -m hydraflow.main_NAME (ppo)")
    add("--nodes", type=int, metavar="N", help="machines (1)")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs of each node (0: run on CPUs)")
    add("--cpus-per-task", type=int, metavar="N", help=f"cores of each node ({CORES_PER_GPU} for each GPU)")
    add("--mem", metavar="SIZE", help="memory of each node, such as 512G (0: all)")
    ends = "shortly before it, the job saves and requeues itself"
    add("--time", metavar="TIME", help=f"time limit, such as 24:00:00; {ends}")
    for name in ("--partition", "--account", "--qos", "--job-name"):
        add(name, metavar="NAME")
    add("--exclusive", action="store_true", help="whole nodes")
    ends = "end a pre-empted job, or one that lost a node, instead of requeueing it"
    add("--no-requeue", action="store_false", dest="requeue", help=ends)
    early = "seconds before the time limit at which the job saves (120)"
    add("--warning", type=int, metavar="SECONDS", help=early)
    image = "apptainer:FILE.sif or pyxis:IMAGE; container for everything on the nodes"
    add("--container", metavar="KIND:IMAGE", help=image)
    add("--interface", metavar="NAME", help="network interface on which nodes reach each other")
    python = "the Python with hydraflow on the nodes, or in the container (this one)"
    add("--python", metavar="PATH", help=python)
    another = "another option of sbatch, such as --sbatch=--reservation=x"
    add("--sbatch", action="append", metavar="OPTION", help=another)
    add("--multirun", action="store_true", help="key=a,b: a job array with a job for each combination")
    add("--wait", action="store_true", help="wait for the job to end, and return its exit code")
    add("--dry-run", action="store_true", help="print the batch script and submit nothing")
    return parser


def _problems(given: Submission) -> Iterator[Problem]:
    least = {"nodes": 1, "gpus-per-node": 0, "warning": 1, "cpus-per-task": 1}
    for name, floor in least.items():
        option, value = f"--{name}", getattr(given, name.replace("-", "_"))
        if value is not None and value < floor:
            yield Problem(f"{option} {value}", None, f"must be at least {floor}", f"{option} {floor}")
    forms = (
        ("--time", given.time, _TIME, "24:00:00"),
        ("--mem", given.mem, _SIZE, "512G"),
        ("--container", given.container, _CONTAINER, "apptainer:/path/image.sif"),
        ("--job-name", given.job_name, _NAME, "my-run"),
        ("--interface", given.interface, _NAME, "eth0"),
    )
    for option, text, form, example in forms:
        if text is not None and not form.fullmatch(text):
            yield Problem(f"{option} {text}", None, f"is not of the form {example}", f"{option} {example}")
    yield from _script_problems(given)
    if given.dry_run and given.wait:
        rule = "--dry-run submits nothing that could be waited for"
        yield Problem("--wait", None, rule, "leave out --wait or leave out --dry-run")
    for word in given.arguments:
        if word in ("--multirun", "-m"):
            rule = "the sweep is expanded when it is submitted"
            yield Problem(word, None, rule, "submit --multirun ... -- key=a,b")
    words = shlex.join(given.arguments)
    if not split(given.arguments).runs or split(given.arguments).has("--help", "-h"):
        rule = "only prints something, so there is no job to submit"
        yield Problem(f"-- {words}", None, rule, f"python -m hydraflow.main_{given.job} {words}")
    limit = _seconds(given.time) if given.time and _TIME.fullmatch(given.time) else 0
    if 0 < limit <= given.warning:
        early = f"save {given.warning} s before its end (--warning), so right after its start"
        remedy = f"--time {given.warning // 60 + 60} or --warning {max(1, limit // 2)}"
        yield Problem(f"--time {given.time}", None, f"the job would be asked to {early}", remedy)


def _script_problems(given: Submission) -> Iterator[Problem]:
    """Options that would break the batch script: several lines, or several options in one."""
    for line in given.sbatch:
        if not line.startswith("--"):
            remedy = f"--sbatch=--{line.lstrip('-')}"
            yield Problem(f"--sbatch={line}", None, "must be an option of sbatch", remedy)
        elif not _OPTION.fullmatch(line) and line.isprintable():
            remedy = "--sbatch=--exclusive --sbatch='--comment=two words'"
            rule = "must be one option, with = before its value"
            yield Problem(f"--sbatch='{line}'", None, rule, remedy)
    texts = ("partition", "account", "qos", "python", "container")
    named = [(f"--{name}", getattr(given, name)) for name in texts]
    for option, text in [*named, *(("--sbatch", line) for line in given.sbatch)]:
        if text is not None and not text.isprintable():
            rule = "has line feeds or other non-printable characters"
            yield Problem(f"{option} {text!r}", None, rule, f"{option} ...")


def _seconds(time: str) -> int:
    """Seconds of a time limit as Slurm reads it; 0: no limit.

    >>> _seconds("90"), _seconds("90:30"), _seconds("24:00:00"), _seconds("2-12"), _seconds("2-12:30")
    (5400, 5430, 86400, 216000, 217800)
    """
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours_first = bool(dash) or len(parts) == 3
    units = (3600, 60, 1) if hours_first else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
