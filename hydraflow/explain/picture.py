"""The devices × roles picture: which role runs where, and which devices together hold one copy of its model.

In: the plan's layouts and cluster. Out: lines of plain text: every device if there are few, else ranges of
devices with the same roles. Left out on purpose: which placement it is; the plan names it
(`BatchPlan.placement`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise

from hydraflow.batch_plan.layout import Cluster, Devices, Layout
from hydraflow.system.printing import count

MOST_DRAWN = 16
"""With more devices, those with the same roles are drawn as one row."""
USED, UNUSED = "■", "·"

MODES = {
    "colocated": "all roles use the same devices, one after the other",
    "disaggregated": "any two roles share all of their devices or none",
    "partial": "some roles use a part of the devices that others use",
    "overlapping": "some roles share some of their devices, and each also has devices of its own",
}
"""What each placement means; the plan decides which one it is."""


def picture(layouts: Mapping[str, Layout], cluster: Cluster) -> list[str]:
    """The picture of a cluster's devices.

    >>> from hydraflow.batch_plan.layout import Pool
    >>> rollout = Layout("rollout", "vllm", Devices((range(0, 4),)), 4, tensor=2)
    >>> print("\\n".join(picture({"rollout": rollout}, Cluster((Pool("trainer", 1, 4, 0),)))))
              node 0
    device    0 1 2 3
    rollout   0 0 1 1   vllm, tp 2: 2 devices a replica, 2 replicas
    """
    drawn = _every_device if len(cluster.devices) <= MOST_DRAWN else _ranges
    return [line.rstrip() for line in drawn(layouts, cluster)]


def segments(layouts: Mapping[str, Layout], devices: int) -> list[tuple[range, set[str]]]:
    """The devices 0 .. `devices` - 1, cut where the roles change, with the roles of each part.

    >>> actor = Layout("actor", "fsdp2", Devices((range(0, 8),)), 8)
    >>> from hydraflow.batch_plan.layout import Pool
    >>> rollout = Layout("rollout", "vllm", Devices((range(4, 12),)), 8)
    >>> [(part.start, sorted(roles)) for part, roles in segments({"actor": actor, "rollout": rollout}, 16)]
    [(0, ['actor']), (4, ['actor', 'rollout']), (8, ['rollout']), (12, [])]
    """
    edges = {0, devices}
    for layout in layouts.values():
        edges |= {edge for part in layout.devices.ranges for edge in (part.start, part.stop)}
    found = []
    for start, stop in pairwise(sorted(edges)):
        first = Devices((range(start, start + 1),))
        roles = {role for role, one in layouts.items() if len(one.devices & first)}
        found.append((range(start, stop), roles))
    return found


def copy_of(layout: Layout, rank: int) -> int:
    """Which copy of the model a rank belongs to: its data rank, or in a rollout its replica.

    Tensor-parallel ranks are neighbours, then context-parallel ones, then data ranks; pipeline stages are
    furthest apart, as Megatron-Core orders them. The stages of a generation engine are neighbours.

    >>> megatron = Layout("actor", "megatron", Devices((range(0, 8),)), 8, tensor=2, pipeline=2)
    >>> [copy_of(megatron, rank) for rank in range(8)]
    [0, 0, 1, 1, 0, 0, 1, 1]
    """
    if layout.role == "rollout":
        return rank // (layout.model_parallel * layout.replica_data)
    return rank // (layout.tensor * layout.context) % layout.data_ranks


def summary(layout: Layout) -> str:
    """One line on a role: engine, sizes that are not 1, copies."""
    sizes = {
        "tp": layout.tensor,
        "pp": layout.pipeline,
        "vpp": layout.virtual_pipeline,
        "sp" if layout.engine == "fsdp2" else "cp": layout.context,
        "ep": layout.expert,
        "etp": layout.expert_tensor,
        "dp": layout.replica_data if layout.role == "rollout" else 1,
    }
    used = (name for name, size in sizes.items() if size > 1 or (name == "etp" and layout.expert > 1))
    parallel = ", ".join(filter(None, (layout.engine, " ".join(f"{name} {sizes[name]}" for name in used))))
    each, ranks = count(layout.model_parallel, "device"), count(layout.data_ranks, "data rank")
    text = f"{parallel}: {each} a row, {ranks}"
    if layout.role == "rollout":
        each = count(layout.model_parallel * layout.replica_data, "device")
        text = f"{parallel}: {each} a replica, {count(layout.replicas, 'replica')}"
    if layout.engine == "fsdp2" and len(layout.devices) > 1:
        copies = len(layout.devices) // layout.shard
        text += f", weights in {count(layout.shard, 'shard')}" + (f", {copies} copies" if copies > 1 else "")
    return text


def _every_device(layouts: Mapping[str, Layout], cluster: Cluster) -> Iterator[str]:
    """One column per device, one row per role; the number in it is the copy that the device works on."""
    nodes = [
        range(start, start + pool.devices_per_node)
        for pool in cluster.pools
        for start in range(pool.first_device, pool.devices.stop, pool.devices_per_node)
    ]
    everything = [device for node in nodes for device in node]
    head = max(len("device"), *map(len, layouts)) + 3
    cell = len(str(everything[-1])) + 1
    labels = [f"node {number}" for number in range(len(nodes))]
    yield " " * head + " ".join(label.ljust(cell * len(node)) for label, node in zip(labels, nodes))
    yield "device".ljust(head) + _cells({device: str(device) for device in everything}, nodes, cell)
    for role, layout in layouts.items():
        marks = dict.fromkeys(everything, UNUSED)
        for rank, device in enumerate(chain(*layout.devices.ranges)):  # in the order of the role's ranks
            marks[device] = str(copy_of(layout, rank))
        yield role.ljust(head) + _cells(marks, nodes, cell) + "  " + summary(layout)


def _cells(marks: Mapping[int, str], nodes: Sequence[range], cell: int) -> str:
    """The marks of each machine's devices, at least as wide as its label."""
    blocks = ["".join(marks[device].ljust(cell) for device in node) for node in nodes]
    return " ".join(block.ljust(len(f"node {number}")) for number, block in enumerate(blocks))


def _ranges(layouts: Mapping[str, Layout], cluster: Cluster) -> Iterator[str]:
    """One row per range of devices with the same roles, then one line per role."""
    rows = [["devices", "nodes", "count", *layouts]]
    for part, roles in segments(layouts, len(cluster.devices)):
        nodes = Devices((range(cluster.node_of(part.start), cluster.node_of(part.stop - 1) + 1),))
        marks = [USED if role in roles else UNUSED for role in layouts]
        rows.append([str(Devices((part,))), str(nodes), str(len(part)), *marks])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "   ".join(text.ljust(width) for text, width in zip(row, widths))
    yield ""
    for role, layout in layouts.items():
        yield f"{role}: {summary(layout)}"
