"""Pools of devices on the cluster's nodes, and the check that the cluster has room for them before any
process starts.

In: `ResourcePool`s. Out: `Reservation`s with one `RankInfo` per process, nodes in the order of their
addresses. One Ray placement group holds a pool's devices on one node, with a bundle per device, so that all
processes on a device get the same GPU and no other. Left out on purpose: which role runs in which pool (the
caller's table), and starting Ray (`runtime`).
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hydraflow.dispatch.host import RankInfo
from hydraflow.errors import ConfigError, Problem

log = logging.getLogger(__name__)
FEWER_NODES = (
    "trainer.nnodes=1 and no separate machines for a role, or ray_init.address=auto where a Ray cluster with"
    " enough machines is running"
)
_REMEDY = (
    "ask for fewer processes (trainer.n_gpus_per_node, actor_rollout_ref.rollout.n_gpus_per_node), or add"
    " machines to the Ray cluster"
)


@dataclass(frozen=True)
class ResourcePool:
    """Devices on nodes: GPUs, or process slots on a CPU.

    >>> ResourcePool("train", [2, 2], gpus=1).demand()
    [{'CPU': 2.0, 'GPU': 2.0}, {'CPU': 2.0, 'GPU': 2.0}]
    """

    name: str
    devices_on_nodes: Sequence[int]
    """Number of devices on each node; every entry is a different node."""
    gpus: float = 0
    """GPUs that Ray reserves for a device: 1, or 0 on a CPU."""
    cpus: float = 1
    """Logical CPUs that Ray reserves for a device; not the threads of its processes."""
    threads: int = 1
    """Threads of torch and OpenMP in each process."""
    groups: int = 1
    """Largest number of worker groups with a process on the same device; they share its reservation."""

    def __post_init__(self) -> None:
        if not self.devices_on_nodes or min(self.devices_on_nodes) < 1:
            rule, counts = "needs at least one device on every node", list(self.devices_on_nodes)
            raise ConfigError.one(f"resource pool {self.name}", counts, rule)

    @property
    def size(self) -> int:
        return sum(self.devices_on_nodes)

    def bundle(self) -> dict[str, float]:
        """Resources of one device."""
        reserved = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {kind: amount for kind, amount in reserved.items() if amount}

    def demand(self) -> list[dict[str, float]]:
        """Resources that the pool needs on each node."""
        of_device = self.bundle()
        return [
            {kind: amount * count for kind, amount in of_device.items()} for count in self.devices_on_nodes
        ]


def cpus_needed(pools: Sequence[ResourcePool]) -> float:
    """Logical CPUs that all pools need together."""
    return sum(pool.cpus * pool.size for pool in pools)


def shortfall(pools: Sequence[ResourcePool], nodes: Sequence[Mapping[str, float]]) -> list[Problem]:
    """Requirements that no placement on these nodes can satisfy; empty when the pools may fit.

    nodes: total resources of each node ("CPU", "GPU").
    """
    problems = []
    for pool in pools:
        if len(pool.devices_on_nodes) > len(nodes):
            rule = f"needs {len(pool.devices_on_nodes)} nodes, the cluster has {len(nodes)}"
            problems.append(Problem(f"resource pool {pool.name}", None, rule, FEWER_NODES))
    for kind in ("CPU", "GPU"):
        amounts = [node.get(kind, 0.0) for node in nodes]
        needs = {pool.name: [node.get(kind, 0.0) for node in pool.demand()] for pool in pools}
        total = sum(map(sum, needs.values()))
        if total > sum(amounts):
            names = ", ".join(name for name in needs if sum(needs[name]))
            rule = f"need {total:g} {kind}s together, the cluster has {sum(amounts):g}"
            problems.append(Problem(f"resource pools {names}", None, rule, _REMEDY))
            continue
        for name, need in needs.items():
            if max(need) > max(amounts):
                rule = f"needs {max(need):g} {kind}s on one node, the largest has {max(amounts):g}"
                problems.append(Problem(f"resource pool {name}", None, rule, _REMEDY))
    return problems


@dataclass(frozen=True)
class _Node:
    """What a pool has reserved on one node."""

    group: PlacementGroup
    id: str
    name: str
    """Host name."""
    address: str


@dataclass(frozen=True)
class Reservation:
    """Reserved bundles of the cluster, for all devices of a pool or for some."""

    pool: ResourcePool
    places: list[tuple[_Node, int]]
    """By rank: its node, and the index of the device's bundle there."""

    @property
    def rank_infos(self) -> list[RankInfo]:
        nodes = [node.id for node, _ in self.places]
        several = len(set(nodes)) > 1
        return [
            RankInfo(rank, len(nodes), nodes[:rank].count(node.id), node.name, several)
            for rank, (node, _) in enumerate(self.places)
        ]

    def part(self, devices: Sequence[int]) -> Reservation:
        """The reservation for a group on some of the pool's devices; rank i is on `devices[i]`."""
        return Reservation(self.pool, [self.places[device] for device in devices])

    def actor_options(
        self, rank: int, environment: Mapping[str, str], nsight: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """Ray's options for the process of a rank. `environment`: variables that Ray itself reads. `nsight`:
        options of Nsight Systems."""
        pool, (node, bundle) = self.pool, self.places[rank]
        options: dict[str, Any] = dict(
            num_cpus=pool.cpus / pool.groups,
            num_gpus=pool.gpus / pool.groups,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                node.group, placement_group_bundle_index=bundle
            ),
        )
        # a runtime_env costs 0.4 s per process, so it is used only if there is something to pass
        wanted = {"env_vars": dict(environment), "nsight": dict(nsight or {})}
        runtime_env = {name: value for name, value in wanted.items() if value}
        return options | ({"runtime_env": runtime_env} if runtime_env else {})


def reserve(pools: Sequence[ResourcePool], *, timeout: float, growing: bool) -> dict[str, Reservation]:
    """Reserves all pools before any process starts.

    growing: nodes may still join, so missing resources may appear. Raises ConfigError that names what is
    missing: at once if the cluster can never satisfy the pools, else after `timeout` seconds.
    """
    problems = shortfall(pools, _totals())
    if problems and not growing:
        raise ConfigError(problems)
    for problem in problems:
        log.warning("waiting up to %g s for the cluster to grow: %s", timeout, problem)
    deadline = time.monotonic() + timeout
    nodes: dict[str, list[_Node]] = {pool.name: [] for pool in pools}
    parts = [(pool, count) for pool in pools for count in pool.devices_on_nodes]
    # the largest first: a part that needs many GPUs fits on few nodes
    parts.sort(key=lambda part: (part[0].gpus * part[1], part[0].cpus * part[1]), reverse=True)
    for pool, count in parts:
        group = _place(pool, count, nodes[pool.name])
        if not _is_placed(group, deadline):
            for reserved in [group, *(node.group for of_pool in nodes.values() for node in of_pool)]:
                remove_placement_group(reserved)
            raise ConfigError(shortfall(pools, _totals()) or [_busy(pools, timeout)])
        nodes[pool.name].append(_node_of(group))
    return {pool.name: _ranked(pool, nodes[pool.name]) for pool in pools}


def _place(pool: ResourcePool, count: int, taken: Sequence[_Node]) -> PlacementGroup:
    """Asks Ray for `count` devices on one node outside `taken`."""
    others = [{"ray.io/node-id": f"!in({','.join(node.id for node in taken)})"}] * count if taken else None
    return placement_group([pool.bundle()] * count, strategy="STRICT_PACK", bundle_label_selector=others)


def _is_placed(group: PlacementGroup, deadline: float) -> bool:
    """Whether the group is placed by the deadline. Waits in short intervals, because Ray's own wait cannot be
    interrupted."""
    while not group.wait(0.5):
        if time.monotonic() > deadline:
            return False
    return True


def _node_of(group: PlacementGroup) -> _Node:
    (node_id,) = set(placement_group_table(group)["bundles_to_node_id"].values())
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    return _Node(group, node_id, node["NodeManagerHostname"], str(node["NodeManagerAddress"]))


def _totals() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _busy(pools: Sequence[ResourcePool], timeout: float) -> Problem:
    free = ray.available_resources()
    needs = "; ".join(f"{pool.name} {pool.demand()}" for pool in pools)
    there = f"free in total {free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs"
    rule = f"not free within {timeout:g} s: needed per node {needs}; {there}"
    remedy = "stop other users of the cluster, or raise trainer.start_timeout"
    return Problem("resource pools", None, rule, remedy)


def _ranked(pool: ResourcePool, nodes: Sequence[_Node]) -> Reservation:
    """Numbers ranks node by node. Nodes with equally many devices are taken in the order of their addresses,
    so that two runs on the same nodes number them alike. `nodes`: the largest first."""

    def address(node: _Node) -> tuple[int, bytes]:
        try:
            found = ipaddress.ip_address(node.address)
        except ValueError:  # a host name
            return 0, node.address.encode()
        return found.version, found.packed

    alike = {
        count: iter(sorted((node for node in nodes if node.group.bundle_count == count), key=address))
        for count in set(pool.devices_on_nodes)
    }
    ordered = [next(alike[count]) for count in pool.devices_on_nodes]
    return Reservation(
        pool, [(node, bundle) for node in ordered for bundle in range(node.group.bundle_count)]
    )


def release(reservations: Sequence[Reservation]) -> None:
    for group in {id(node.group): node.group for place in reservations for node, _ in place.places}.values():
        remove_placement_group(group)
