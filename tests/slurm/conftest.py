"""A real Slurm of two nodes for the tests that need one; elsewhere they say what they need and are
skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from slurm.cluster import SCRIPT, Cluster

PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "munged": "munge",
    "tini": "tini",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
"""What must be on PATH -> Debian's package."""
WAIT_SECONDS = 900
"""For another checkout's tests: names of bridges and namespaces are the machine's."""


def lacking(folder: Path) -> str:
    """What a Slurm of namespaces would need that is not here; empty: nothing."""
    if os.geteuid() != 0:
        return "root"
    if packages := {package for program, package in PROGRAMS.items() if shutil.which(program) is None}:
        return f"apt-get install {' '.join(sorted(packages))}"
    tried = subprocess.run(
        [SCRIPT, "probe", folder],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if tried.returncode != 0:
        said = " ".join(tried.stderr.split())[-300:]
        return (
            "namespaces, bridges and mounts, which this machine forbids (of a container, --privileged allows"
            f" them): {said}"
        )
    return ""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes that are idle."""
    folder = tmp_path_factory.mktemp("slurm")
    with FileLock(Path(tempfile.gettempdir()) / "hydraflow-two-nodes.lock", timeout=WAIT_SECONDS):
        if reason := lacking(folder / "probe"):
            pytest.skip(f"a Slurm of two nodes on this machine needs {reason}")
        with Cluster(folder) as made:
            yield made


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where a test submits from."""
    return tmp_path
