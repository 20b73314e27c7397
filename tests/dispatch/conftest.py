"""Groups of real processes, started once for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from dispatch.probes import Probe

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Group, RoleGroup, Timeouts, WorkerGroup
from hydraflow.dispatch.local import LocalRuntime
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

SIZES = (1, 2, 4)
CPUS = 0.1
"""Of each process. Held to the end of the session, beside jobs that need 7 of the 8 CPUs that Ray counts."""


@pytest.fixture(scope="session")
def runtime(ray_session: None) -> Iterator[Runtime]:
    """Groups of 1, 2 and 4 processes with the roles `probe` and `other`."""
    with Runtime(RayInitConfig(), Timeouts(start=120, call=60)) as runtime:
        runtime.start(
            [ResourcePool(f"of{size}", [size], cpus=CPUS, threads=2 if size == 1 else 1) for size in SIZES]
        )
        for size in SIZES:
            runtime.group(f"of{size}", {"probe": RoleSpec(Probe), "other": RoleSpec(Probe, (7,))})
        runtime.await_ready()
        yield runtime


@pytest.fixture(scope="session")
def groups(runtime: Runtime) -> dict[int, WorkerGroup]:
    return {group.world_size: group for group in runtime.groups}


@pytest.fixture(scope="session")
def local() -> Group:
    """The same roles in this process."""
    runtime = LocalRuntime(RayInitConfig(), Timeouts(start=120, call=60))
    with patch.dict(os.environ):
        runtime.start([ResourcePool("here", [1])])
    return runtime.group("here", {"probe": RoleSpec(Probe), "other": RoleSpec(Probe, (7,))})


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A local runtime sets variables of its process, which later tests must not inherit: collectives on the
    loopback interface would keep the nodes of a Slurm apart."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(params=[*SIZES, "local"])
def probe(request: pytest.FixtureRequest, groups: dict[int, WorkerGroup], local: Group) -> RoleGroup:
    """The role `probe` of each group in turn."""
    return (local if request.param == "local" else groups[request.param]).role("probe")


@pytest.fixture(scope="session")
def pair(groups: dict[int, WorkerGroup]) -> RoleGroup:
    """Two ranks."""
    return groups[2].role("probe")


@pytest.fixture(scope="session")
def batch_of() -> Callable[[int], DataProto]:
    """A batch of n rows: x = 0..n-1; ids, row i holding i+1 times the number i."""

    def make(rows: int) -> DataProto:
        ids = ragged.from_rows([torch.full((row + 1,), row) for row in range(rows)])
        return DataProto.from_dict(
            {"x": torch.arange(rows), "ids": ids}, {"uid": [f"u{row}" for row in range(rows)]}
        )

    return make
