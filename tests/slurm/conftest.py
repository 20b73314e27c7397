"""A real Slurm of two nodes for the tests that need one; elsewhere they say what they need and are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster

PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge", "tini": "tini", "ip": "iproute2", "nsenter": "util-linux"}
"""What must be on PATH -> Debian's package."""


def lacking() -> str:
    """What a Slurm of namespaces would need that is not here; empty: nothing."""
    if os.geteuid() != 0:
        return "root"
    if packages := {package for program, package in PROGRAMS.items() if shutil.which(program) is None}:
        return f"apt-get install {' '.join(sorted(packages))}"
    if os.system("unshare --net --uts --pid --fork --mount true 2>/dev/null") != 0:
        return "network, UTS, PID and mount namespaces, which this container forbids (--privileged allows them)"
    return ""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes that are idle."""
    if reason := lacking():
        pytest.skip(f"a Slurm of two nodes on this machine needs {reason}")
    with Cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where a test submits from."""
    return tmp_path
