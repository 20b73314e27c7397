"""python -m hydraflow.slurm submit [options] -- [key=value ...]: submits a run as a job to a Slurm cluster.

Also the commands that a job's scripts (scripts/slurm/) call on its nodes: `check`, `start`, `await`, `lost`.
Imports neither torch nor Ray, except for the last two, which talk to a running cluster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hydraflow.compose.launch import run_guarded
from hydraflow.errors import ConfigError
from hydraflow.slurm import options
from hydraflow.slurm.job_settings import JobSettings, check, write_settings
from hydraflow.slurm.ray_node import ADDRESS, FACTS, job_nodes, start
from hydraflow.slurm.submit import submit

FAILED = "failed"
"""Folder in which a node that cannot start Ray writes the reason, in a file named after it."""


def _check(words: Sequence[str]) -> int:
    """check FOLDER JOB [arguments]: writes the settings of a job, or reports what is wrong with it."""
    folder, job, *arguments = words
    return check(job, arguments, partial(write_settings, Path(folder) / FACTS))


def _start(words: Sequence[str]) -> int:
    """start FOLDER TEMPORARY: becomes Ray."""
    folder, temporary = words
    start(Path(folder), Path(temporary), dashboard=os.environ.get("HYDRAFLOW_DASHBOARD", "1") != "0")
    return 0


def _await(words: Sequence[str]) -> int:
    """await FOLDER: waits until all nodes of the job have joined."""
    from hydraflow.dispatch.cluster import await_nodes
    from hydraflow.slurm.ray_node import await_head

    folder, nodes = Path(words[0]), job_nodes()
    seconds = float(JobSettings.from_shell((folder / FACTS).read_text()).start_timeout)

    def ended() -> str | None:
        failed = sorted((folder / FAILED).glob("*")) if (folder / FAILED).is_dir() else []
        reasons = (f"{file.name}: {file.read_text().strip() or 'its Ray ended'}" for file in failed)
        return "; ".join(reasons) or None

    await_nodes(await_head(folder, nodes[0]), nodes, seconds, ended=ended)
    print(f"all {len(nodes)} nodes have joined Ray: {', '.join(nodes)}", flush=True)
    return 0


def _lost(words: Sequence[str]) -> int:
    """lost FOLDER: prints the nodes that have left the cluster, if any."""
    from hydraflow.dispatch.cluster import lost

    if gone := lost((Path(words[0]) / ADDRESS).read_text().strip()):
        print(" ".join(sorted(gone)))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "submit": lambda words: submit(options.parse(words)),
    "check": _check,
    "start": _start,
    "await": _await,
    "lost": _lost,
}


def main(argv: Sequence[str]) -> int:
    """Runs one of the commands; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if argv[0] not in COMMANDS:
        module = "python -m hydraflow.slurm"
        raise ConfigError.one(
            f"{module} {argv[0]}", None, "the only command is submit", f"{module} submit --help"
        )
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
