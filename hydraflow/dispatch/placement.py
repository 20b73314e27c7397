"""Pools of processes on the cluster's nodes, and the check that the cluster has room for them before any
process starts.

In: `ResourcePool`s. Out: `Reservation`s (Ray placement groups) with one `RankInfo` per process, nodes in the
order of their addresses. Left out on purpose: which role runs in which pool (the caller's table), and Ray's
start (`runtime`).
"""

from __future__ import annotations

import logging
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
    "trainer.nnodes=1 and no machines of the rollout's own, or ray_init.address=auto where a Ray cluster of"
    " enough machines is running"
)
_REMEDY = (
    "ask for fewer processes (trainer.n_gpus_per_node, actor_rollout_ref.rollout.n_gpus_per_node), or add"
    " machines to the Ray cluster"
)


@dataclass(frozen=True)
class ResourcePool:
    """Processes on nodes.

    >>> ResourcePool("train", [2, 2], gpus_per_process=1).demand()
    [{'CPU': 2.0, 'GPU': 2.0}, {'CPU': 2.0, 'GPU': 2.0}]
    """

    name: str
    processes_on_nodes: Sequence[int]
    """Number of processes of a group on each node; the nodes are different ones."""
    gpus_per_process: float = 0
    """0 or 1, usually."""
    cpus_per_process: float = 1
    """Logical CPUs that Ray reserves for a process; not its threads."""
    threads: int = 1
    """Threads of torch and OpenMP in each process."""
    groups: int = 1
    """Largest number of worker groups with a process in the same place; each gets its share of CPUs and
    GPUs."""

    def __post_init__(self) -> None:
        if not self.processes_on_nodes or min(self.processes_on_nodes) < 1:
            rule, counts = "needs at least one process on every node", list(self.processes_on_nodes)
            raise ConfigError.one(f"resource pool {self.name}", counts, rule)

    @property
    def size(self) -> int:
        """Total number of processes."""
        return sum(self.processes_on_nodes)

    def demand(self) -> list[dict[str, float]]:
        """Resources that the pool needs on each node."""
        per_process = {"CPU": self.cpus_per_process, "GPU": self.gpus_per_process}
        return [
            {kind: float(amount * count) for kind, amount in per_process.items() if amount}
            for count in self.processes_on_nodes
        ]


def cpus_needed(pools: Sequence[ResourcePool]) -> float:
    """Logical CPUs that all pools need together."""
    return sum(pool.cpus_per_process * pool.size for pool in pools)


def shortfall(pools: Sequence[ResourcePool], nodes: Sequence[Mapping[str, float]]) -> list[Problem]:
    """Requirements that no placement on these nodes can satisfy; empty when the pools may fit.

    nodes: total resources of each node ("CPU", "GPU").
    """
    problems = []
    for pool in pools:
        if len(pool.processes_on_nodes) > len(nodes):
            rule = f"needs {len(pool.processes_on_nodes)} nodes, the cluster has {len(nodes)}"
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
class Reservation:
    """A reserved place on the cluster, for all processes of a pool or for some."""

    pool: ResourcePool
    group: PlacementGroup
    rank_infos: list[RankInfo]
    bundles: list[int]
    """Bundle of the placement group by rank."""

    def part(self, devices: Sequence[int]) -> Reservation:
        """The place of a group on some of the pool's devices; rank i is on `devices[i]`."""
        bundles = [self.bundles[device] for device in devices]
        several = len(set(bundles)) > 1
        rank_infos = [
            RankInfo(
                rank,
                len(devices),
                bundles[:rank].count(bundles[rank]),
                self.rank_infos[device].node,
                several,
            )
            for rank, device in enumerate(devices)
        ]
        return Reservation(self.pool, self.group, rank_infos, bundles)

    def actor_options(
        self, rank: int, environment: Mapping[str, str], nsight: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """Ray's options for the process of a rank. `environment`: variables that Ray itself reads. `nsight`:
        options of Nsight Systems."""
        pool = self.pool
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[rank])
        options: dict[str, Any] = dict(
            num_cpus=pool.cpus_per_process / pool.groups,
            num_gpus=pool.gpus_per_process / pool.groups,
            scheduling_strategy=place,
        )
        # a runtime_env costs 0.4 s and a process that Ray has started in advance, so few things need it
        wanted = {"env_vars": dict(environment), "nsight": dict(nsight or {})}
        runtime_env = {name: value for name, value in wanted.items() if value}
        return options | ({"runtime_env": runtime_env} if runtime_env else {})


def reserve(pools: Sequence[ResourcePool], *, timeout: float, growing: bool) -> dict[str, Reservation]:
    """Reserves all pools before any process starts.

    growing: nodes may still join, so missing resources may appear. ConfigError that names what is missing: at
    once if the cluster can never satisfy the pools, else after `timeout` seconds.
    """
    problems = shortfall(pools, _totals())
    if problems and not growing:
        raise ConfigError(problems)
    for problem in problems:
        log.warning("waiting up to %g s for the cluster to grow: %s", timeout, problem)
    groups = []
    for pool in pools:
        spread = len(pool.processes_on_nodes) > 1
        groups.append(placement_group(pool.demand(), strategy="STRICT_SPREAD" if spread else "STRICT_PACK"))
    ready = [group.ready() for group in groups]
    if ready and ray.wait(ready, num_returns=len(ready), timeout=timeout)[1]:
        for group in groups:
            remove_placement_group(group)
        raise ConfigError(shortfall(pools, _totals()) or [_busy(pools, timeout)])
    return {pool.name: _seated(pool, group) for pool, group in zip(pools, groups, strict=True)}


def _totals() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _busy(pools: Sequence[ResourcePool], timeout: float) -> Problem:
    free = ray.available_resources()
    needs = "; ".join(f"{pool.name} {pool.demand()}" for pool in pools)
    there = f"free in all {free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs"
    rule = f"not free within {timeout:g} s: needed per node {needs}; {there}"
    remedy = "stop other users of the cluster, or raise trainer.start_timeout"
    return Problem("resource pools", None, rule, remedy)


def _seated(pool: ResourcePool, group: PlacementGroup) -> Reservation:
    """Ranks go node by node, in the order of the nodes' addresses where these have equally many, so that two
    runs on the same nodes number them alike."""
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    placed = placement_group_table(group)["bundles_to_node_id"]

    def address(bundle: int) -> list[int]:
        parts = str(nodes[placed[bundle]]["NodeManagerAddress"]).split(".")
        return [int(part) if part.isdigit() else 0 for part in parts]

    # of nodes with equally many processes the first is the one with the lowest address
    counts, order = pool.processes_on_nodes, sorted(placed)
    for count in set(counts):
        alike = [bundle for bundle in placed if counts[bundle] == count]
        for place, bundle in zip(sorted(alike), sorted(alike, key=address), strict=True):
            order[place] = bundle
    bundles = [bundle for bundle in order for _ in range(pool.processes_on_nodes[bundle])]
    local = [number for bundle in order for number in range(pool.processes_on_nodes[bundle])]
    names = [nodes[placed[bundle]]["NodeManagerHostname"] for bundle in bundles]
    several = len(order) > 1
    rank_infos = [RankInfo(rank, pool.size, local[rank], names[rank], several) for rank in range(pool.size)]
    return Reservation(pool, group, rank_infos, bundles)


def release(reservations: Sequence[Reservation]) -> None:
    """Releases the placement groups."""
    for reservation in reservations:
        remove_placement_group(reservation.group)
