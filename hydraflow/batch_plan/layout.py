"""The placement of roles on devices: the devices of each role, and how they divide models, layers, rows and
tokens.

In: numbers as configured. Out: `Cluster` and, one per role, `Layout`. Standard library only, and no list as
long as the cluster: a mapping of a hundred thousand devices is a handful of ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Devices:
    """A set of device numbers, as disjoint ascending ranges. Device d of a cluster of equal machines is on
    node d // devices_per_node; for other clusters see `Cluster.node_of`."""

    ranges: tuple[range, ...]

    @classmethod
    def of(cls, parts: Iterable[range]) -> Devices:
        """The union of ranges in any order, touching ones joined.

        >>> str(Devices.of([range(4, 8), range(0, 4), range(10, 11)]))
        '0-7,10'
        """
        merged: list[range] = []
        for part in sorted((part for part in parts if len(part)), key=lambda part: part.start):
            if merged and part.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, part.stop))
            else:
                merged.append(part)
        return cls(tuple(merged))

    @property
    def stop(self) -> int:
        """One more than the largest device number; 0 for no devices."""
        return self.ranges[-1].stop if self.ranges else 0

    def __len__(self) -> int:
        return sum(len(part) for part in self.ranges)

    def __str__(self) -> str:
        """Short form, as in `device_mapping`: 0-7, or 0-3,8-11."""
        return ",".join(self.parts())

    def parts(self) -> list[str]:
        """The short forms of the ranges: 0-3, 8-11."""
        ends = [(part.start, part.stop - 1) for part in self.ranges]
        return [f"{first}-{last}" if last > first else str(first) for first, last in ends]

    def listed(self) -> list[int]:
        """The numbers, one by one: for the devices of a run, not of a plan for many machines.

        >>> Devices.of([range(2), range(4, 6)]).listed()
        [0, 1, 4, 5]
        """
        return [device for part in self.ranges for device in part]

    def first(self, count: int) -> Devices:
        """The `count` lowest of them."""
        taken = []
        for part in self.ranges:
            taken.append(part[:count])
            count -= len(taken[-1])
        return Devices.of(taken)

    def __or__(self, other: Devices) -> Devices:
        return Devices.of([*self.ranges, *other.ranges])

    def __and__(self, other: Devices) -> Devices:
        pairs = ((a, b) for a in self.ranges for b in other.ranges)
        return Devices.of(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)

    def __sub__(self, other: Devices) -> Devices:
        edges = (edge for part in other.ranges for edge in (part.start, part.stop))
        ends = [0, *edges, max(self.stop, other.stop)]
        return self & Devices.of(range(*gap) for gap in zip(ends[::2], ends[1::2], strict=True))


@dataclass(frozen=True)
class Pool:
    """Equal machines that are reserved together."""

    name: str
    """trainer, rollout or reward_model."""
    nodes: int
    devices_per_node: int
    first_device: int
    """The number of its first device; the others follow."""

    @property
    def devices(self) -> Devices:
        return Devices.of([range(self.first_device, self.first_device + self.nodes * self.devices_per_node)])


@dataclass(frozen=True)
class Cluster:
    """The machines of a run: the trainer's, and after them those of roles with machines of their own."""

    pools: tuple[Pool, ...]

    @property
    def devices(self) -> Devices:
        return Devices.of(part for pool in self.pools for part in pool.devices.ranges)

    @property
    def nodes(self) -> int:
        """Number of machines in all pools."""
        return sum(pool.nodes for pool in self.pools)

    def node_of(self, device: int) -> int:
        """The number of the machine that a device is in.

        >>> Cluster((Pool("trainer", 2, 8, 0), Pool("rollout", 1, 4, 16))).node_of(17)
        2
        """
        before = 0
        for pool in self.pools:
            if device < pool.first_device + pool.nodes * pool.devices_per_node:
                return before + (device - pool.first_device) // pool.devices_per_node
            before += pool.nodes
        raise ValueError(f"device {device} of {len(self.devices)}")


@dataclass(frozen=True)
class ShapeNumbers:
    """The sizes of a model that its parallel sizes must divide."""

    layers: int
    heads: int
    """Attention heads."""
    kv_heads: int
    """Key-value heads."""
    experts: int = 0
    """Routed experts of a layer; 0: a dense model."""
    dense_at: Sequence[int] = ()
    """Indices of the layers without experts."""


def layers_of_stages(layers: int, stages: int) -> list[range]:
    """Indices of each stage's layers, as vLLM divides them (`get_pp_indices` of vllm/distributed/utils.py):
    the remaining layers go to the stages before the last.

    >>> layers_of_stages(5, 3)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    each, left = divmod(layers, stages)
    sizes = [each + (stages - 1 - left <= stage < stages - 1) for stage in range(stages)]
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@dataclass(frozen=True)
class Layout:
    """One role on its devices. Sizes that an engine does not know are 1."""

    role: str
    """actor, critic, ref, rollout, reward_model."""
    engine: str
    """fsdp2, megatron, native or vllm."""
    devices: Devices
    devices_per_node: int
    tensor: int = 1
    """Tensor-parallel size."""
    pipeline: int = 1
    """Pipeline-parallel size (number of stages)."""
    virtual_pipeline: int = 1
    """Virtual pipeline stages per device."""
    context: int = 1
    """Devices that share the tokens of a row: context-parallel size (Megatron) or Ulysses size."""
    expert: int = 1
    """Expert-parallel size."""
    expert_tensor: int = 1
    """Tensor-parallel size of the experts."""
    shard: int = 1
    """FSDP shard size: devices that share one copy of weights, gradients and optimizer state."""
    replica_data: int = 1
    """Rollout: data-parallel ranks inside one replica."""

    @property
    def model_parallel(self) -> int:
        """mp: devices that one row needs."""
        return self.tensor * self.pipeline * self.context

    @property
    def data_ranks(self) -> int:
        """dp: ranks among which rows are split. Expert parallelism never divides it."""
        return len(self.devices) // self.model_parallel

    @property
    def replicas(self) -> int:
        """Rollout: engines that sample independently."""
        return len(self.devices) // (self.model_parallel * self.replica_data)


def placement_of(layouts: Mapping[str, Layout]) -> str:
    """How roles share devices: colocated, disaggregated, partial or overlapping.

    Colocated: all have the same devices. Disaggregated: any two have the same devices or none in common.
    Partial: where two share some, one has all of the other's. Overlapping: anything else.

    >>> on = lambda *devices: Layout("", "fsdp2", Devices.of([range(*devices)]), 8)
    >>> placement_of({"actor": on(0, 4), "rollout": on(0, 8)})
    'partial'
    """
    sets = list({layout.devices: None for layout in layouts.values()})
    pairs = [(a, b, a & b) for i, a in enumerate(sets) for b in sets[i + 1 :]]
    shared = [(a, b, both) for a, b, both in pairs if len(both)]
    if not pairs:
        return "colocated"
    if not shared:
        return "disaggregated"
    return "partial" if all(both in (a, b) for a, b, both in shared) else "overlapping"
