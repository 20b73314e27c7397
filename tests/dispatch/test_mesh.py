"""The mesh form on eight real processes that pretend to be 2 data x 2 tensor x 2 pipeline ranks.

Rank = 4 * pipeline + 2 * data + tensor. So data rank 0 is ranks 0, 1, 4, 5, data rank 1 is ranks 2, 3, 6, 7,
and the ranks to collect from (last stage, tensor rank 0) are 4 for data rank 0 and 6 for data rank 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from dispatch.probes import Probe

from hydraflow import metrics
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import RoleGroup, Timeouts, _checked
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates

BatchOf = Callable[[int], DataProto]


@pytest.fixture(scope="module")
def mesh(ray_session: None) -> Iterator[RoleGroup]:
    with Runtime(RayInitConfig(), Timeouts(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("mesh", [8], cpus=0.125)])
        group = runtime.group("mesh", {"probe": RoleSpec(Probe)})
        group.await_ready()
        yield group.role("probe")


def test_rows_by_data_rank(mesh: RoleGroup, batch_of: BatchOf) -> None:
    data = mesh.fetch(mesh.call(Probe.mesh_rows, batch_of(5)).get())
    assert data.get("y").tolist() == [0, 1, 2, 3, 4]
    assert list(data.get("by")) == ["rank4", "rank4", "rank4", "rank6", "rank6"]


def test_metrics_count_each_row_once(mesh: RoleGroup, batch_of: BatchOf) -> None:
    assert metrics.values(mesh.call(Probe.mesh_metrics, batch_of(4))) == {"x": 0 + 1 + 2 + 3}


def test_megatron_modes(mesh: RoleGroup, batch_of: BatchOf) -> None:
    assert mesh.call(Probe.megatron, [70, 71]) == [(4, 70), (6, 71)]
    data = mesh.fetch(mesh.call(Probe.megatron_rows, batch_of(4)))
    assert list(data.get("by")) == ["rank4", "rank4", "rank6", "rank6"]
    with pytest.raises(ValueError, match="one entry for each of 2 data ranks, got 8 entries"):
        mesh.call(Probe.megatron, list(range(8)))


def test_a_future_of_a_mesh_feeds_a_mesh(mesh: RoleGroup, batch_of: BatchOf) -> None:
    made = mesh.call(Probe.double, batch_of(8)).select(["y"]).rename("y", "x")
    chained = mesh.call(Probe.sum_of, mesh.call(Probe.mesh_rows, made), "y")
    assert metrics.values(chained) == {"sum": 2 * sum(range(8))}


def test_places_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks that collect \[0, 0\]; there must be one for each"):
        _checked([Coordinates(0, 2, True), Coordinates(0, 2, True)], "train")
