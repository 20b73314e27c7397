"""Whether machines, devices and the sizes of roles add up.

In: a `Topology`, and the models' shapes where they are known. Out: broken rules, and a `Layout` for each role
that has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hydraflow.batch_plan.layout import Devices, Layout, Pool, ShapeNumbers
from hydraflow.batch_plan.mapping import text_of
from hydraflow.batch_plan.parts import divisors, multiples, nearest
from hydraflow.batch_plan.repair import DIVISION, HOLES, MACHINES, MAPPING, Cure, Values, Violation
from hydraflow.batch_plan.topology import CLUSTER_NODES, CLUSTER_PER_NODE, SECTIONS, RoleDevices, Topology
from hydraflow.errors import shown

_PARTS = {
    "tensor": "tensor",
    "pipeline": "pipeline",
    "context": "sequence or context",
    "replica_data": "data",
    "expert": "expert",
}
_PARTS |= {"expert_tensor": "expert tensor"}
ROW = ("tensor", "pipeline", "context")
"""Sizes whose product is the devices that one row needs."""


@dataclass
class Judged:
    """What the rules found."""

    violations: list[Violation] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Roles that no rule complains about."""


def judge_devices(topology: Topology, shapes: Mapping[str, ShapeNumbers | None]) -> Judged:
    """Every broken rule of machines, mappings and sizes; `shapes` per role."""
    judged = Judged([*_machines(topology), *_twofold(topology)])
    placed = True
    for role in topology.roles.values():
        misplaced = list(_mapping(role, topology))
        placed = placed and not misplaced
        wrong = (
            [] if misplaced else [*_division(role, topology), *_shape(role, topology, shapes.get(role.role))]
        )
        judged.violations += misplaced if role.mapping is not None else []
        judged.violations += wrong if not _says_the_actor(role, topology) else []
        if not misplaced and not wrong:
            judged.layouts[role.role] = _layout(role)
    if placed:
        judged.violations += _holes(topology)
    return judged


def _says_the_actor(role: RoleDevices, topology: Topology) -> bool:
    """A reference that follows the actor in everything breaks its rules too; they are reported once."""
    if role.role != "ref":
        return False
    actor = topology.roles["actor"]
    return (role.devices, dict(role.degrees)) == (actor.devices, {**actor.degrees, **_own_shard(role)})


def _own_shard(role: RoleDevices) -> Values:
    return {"shard": role.degrees["shard"]} if "shard" in role.degrees else {}


def _layout(role: RoleDevices) -> Layout:
    shard = (
        role.degree("shard") if role.degree("shard") > 0 and "shard" in role.degrees else len(role.devices)
    )
    return Layout(
        role=role.role,
        engine=role.engine,
        devices=role.devices,
        devices_per_node=role.devices_per_node,
        tensor=role.degree("tensor"),
        pipeline=role.degree("pipeline"),
        virtual_pipeline=role.degree("virtual_pipeline"),
        context=role.degree("context"),
        expert=role.degree("expert"),
        expert_tensor=role.degree("expert_tensor"),
        shard=shard if role.engine == "fsdp2" else 1,
        replica_data=role.degree("replica_data"),
    )


# --- machines --------------------------------------------------


def _machines(topology: Topology) -> Iterator[Violation]:
    """What the pools need is what the cluster has."""
    pools, asked = topology.cluster.pools, topology.asked_nodes
    if asked is not None and asked != topology.cluster.nodes:
        needs = " + ".join(f"{pool.name} {pool.nodes}" for pool in pools)
        needs += f" = {topology.cluster.nodes}" if len(pools) > 1 else ""
        more = (
            "more than there are"
            if topology.cluster.nodes > asked
            else f"{asked - topology.cluster.nodes} would stay unused"
        )
        text = f"machines, but {needs} are asked for: {more}"
        yield Violation("machines", MACHINES, CLUSTER_NODES, asked, text, lambda: _machine_cures(topology))
    per_node = topology.asked_per_node
    for pool in pools if per_node is not None else ():
        if pool.devices_per_node == per_node:
            continue
        key = pool_keys(topology, pool)[1]
        text = (
            f"devices on each machine of the {pool.name} are not the {per_node} of"
            f" {CLUSTER_PER_NODE}={per_node}"
        )
        cures = [{key: per_node}, {CLUSTER_PER_NODE: pool.devices_per_node}]
        yield Violation(
            f"devices per machine:{pool.name}",
            MACHINES,
            key,
            pool.devices_per_node,
            text,
            lambda cures=cures: cures,  # type: ignore[misc]
        )


def _machine_cures(topology: Topology) -> Iterator[Cure]:
    assert topology.asked_nodes is not None
    yield {CLUSTER_NODES: topology.cluster.nodes}
    for pool in topology.cluster.pools:
        rest = topology.asked_nodes - (topology.cluster.nodes - pool.nodes)
        if rest > 0 and (key := pool_keys(topology, pool)[0]) != CLUSTER_NODES:
            yield {key: rest}


def _twofold(topology: Topology) -> Iterator[Violation]:
    for name in topology.twofold:
        role, section = topology.roles[name], SECTIONS[name]
        key, off = (
            (f"{section}.nnodes", 0) if name == "rollout" else (f"{section}.enable_resource_pool", False)
        )
        cures: list[Cure] = [{key: off}, {role.mapping_key: None}]
        text = (
            f"gives the {name} machines of its own, and {role.mapping_key}={_show(role.mapping)} devices of"
            " the trainer; only one can be"
        )
        yield Violation(f"twofold:{name}", MACHINES, key, "given", text, lambda cures=cures: cures)  # type: ignore[misc]


def pool_keys(topology: Topology, pool: Pool) -> tuple[str, str]:
    """The keys that decide a pool's machines and the devices on each."""
    if pool.name == "trainer":
        return topology.nodes_key, topology.per_node_key
    return f"{SECTIONS[pool.name]}.nnodes", f"{SECTIONS[pool.name]}.n_gpus_per_node"


def device_cures(topology: Topology, role: RoleDevices, unit: int) -> Iterator[Cure]:
    """More or fewer devices for a role, so that their number is a multiple of `unit`."""
    count = len(role.devices)
    if not role.pool:
        for devices in multiples(count, unit):
            if devices < count:
                yield {role.mapping_key: text_of(role.devices.first(devices))}
        return
    pool = topology.pools[role.pool]
    nodes_key, per_node_key = pool_keys(topology, pool)
    others = topology.cluster.nodes - pool.nodes if nodes_key == CLUSTER_NODES else 0
    for nodes in multiples(pool.nodes, unit // math.gcd(unit, pool.devices_per_node)):
        if nodes != pool.nodes:
            yield {nodes_key: nodes + others}
    for per_node in multiples(pool.devices_per_node, unit // math.gcd(unit, pool.nodes)):
        if per_node != pool.devices_per_node:
            yield {per_node_key: per_node}


# --- mappings --------------------------------------------------


def _show(mapping: object) -> str:
    return shown(mapping).replace(" ", "")


def _mapping(role: RoleDevices, topology: Topology) -> Iterator[Violation]:
    """A mapping can be read, names each device once, and only devices that there are. Who follows the actor's
    breaks them too."""
    key, there = role.mapping_key, topology.cluster.devices
    make = _maker(role)
    if role.fault:
        yield make("readable", role.fault, lambda: [{key: text_of(there)}, {key: None}])
        return
    beyond = role.devices - there
    if role.twice:
        yield make(
            "once",
            f"names devices {role.twice} twice",
            lambda: [{key: text_of(role.devices & there or there)}],
        )
    elif beyond:
        text = f"names devices {beyond}, but {_machines_text(topology)} have only {there}"
        yield make("beyond", text, lambda: _beyond_cures(role, topology))


def _maker(role: RoleDevices) -> Callable[[str, str, Callable[[], Iterable[Cure]]], Violation]:
    def make(rule: str, text: str, cures: Callable[[], Iterable[Cure]]) -> Violation:
        shown = _show(role.mapping)
        return Violation(f"mapping {rule}:{role.role}", MAPPING, role.mapping_key, shown, text, cures)

    return make


def _beyond_cures(role: RoleDevices, topology: Topology) -> Iterator[Cure]:
    there, pool = topology.cluster.devices, topology.pools["trainer"]
    if inside := role.devices & there:
        yield {role.mapping_key: text_of(inside)}
    yield {role.mapping_key: text_of(there.first(len(role.devices)))}
    yield {role.mapping_key: None}
    yield from _resized(topology, pool, role.devices.stop)


def _resized(topology: Topology, pool: Pool, stop: int) -> Iterator[Cure]:
    """A pool that ends at device `stop`."""
    nodes_key, per_node_key = pool_keys(topology, pool)
    if nodes := -(-stop // pool.devices_per_node):
        yield {nodes_key: nodes}
    if pool.nodes == 1 and stop:
        yield {per_node_key: stop}


def _machines_text(topology: Topology) -> str:
    return " + ".join(f"{pool.nodes} x {pool.devices_per_node} devices" for pool in topology.cluster.pools)


def _holes(topology: Topology) -> Iterator[Violation]:
    """Every device of the cluster has a role: one that has none is paid for and idle, or was forgotten."""
    used = Devices.of(part for role in topology.roles.values() for part in role.devices.ranges)
    unused = topology.cluster.devices - used
    mapped = [role for role in topology.roles.values() if role.mapping is not None]
    if not unused or not mapped:
        return
    key, value = mapped[0].mapping_key, _show(mapped[0].mapping)
    roles = ", ".join(f"{role.role} {role.devices}" for role in topology.roles.values())
    text = (
        f"no role uses devices {unused} of {topology.cluster.devices} ({_machines_text(topology)}; {roles})"
    )

    def cures() -> Iterator[Cure]:
        for role in mapped:
            yield {role.mapping_key: text_of(role.devices | unused)}
            yield {role.mapping_key: None}
        yield from _resized(topology, topology.pools["trainer"], used.stop)
        yield {role.mapping_key: None for role in mapped}

    yield Violation("mapping holes", HOLES, key, value, text, cures)


# --- sizes --------------------------------------------------


def _division(role: RoleDevices, topology: Topology) -> Iterator[Violation]:
    """The devices of a role divide into rows' shares, experts' shares, copies and replicas."""
    yield from _divides(role, topology, "row", (*ROW, "replica_data"))
    if role.engine == "megatron":
        if role.degree("expert") > 1 or role.degrees["expert_tensor"] != role.degrees["tensor"]:
            yield from _divides(role, topology, "experts", ("expert_tensor", "expert", "pipeline"))
        chunks, stages = role.degrees["virtual_pipeline"], role.degrees["pipeline"]
        if chunks.value > 1 and stages.value == 1:
            text = f"parts of the layers per stage need a pipeline, but {stages.key}=1"
            yield Violation(
                f"interleaving:{role.role}",
                DIVISION,
                chunks.key,
                chunks.value,
                text,
                lambda: [{chunks.key: None}, {stages.key: 2}],
            )
    if "shard" in role.degrees:
        shard, count = role.degrees["shard"], len(role.devices)
        if shard.value != -1 and (shard.value < 1 or count % shard.value):
            text = f"must be -1 or divide the {count} devices of the {role.role}"
            yield Violation(
                f"copies:{role.role}",
                DIVISION,
                shard.key,
                shard.value,
                text,
                lambda: [
                    {shard.key: -1},
                    *({shard.key: size} for size in nearest(shard.value, divisors(count))),
                ],
            )


def _divides(role: RoleDevices, topology: Topology, what: str, names: tuple[str, ...]) -> Iterator[Violation]:
    given = {name: role.degrees[name] for name in names if role.degree(name) > 1}
    product, count = math.prod(degree.value for degree in given.values()), len(role.devices)
    if count % product == 0:
        return
    key, value = next((degree.key, degree.value) for degree in given.values())
    factors = " x ".join(f"{_PARTS[name]} {degree.value}" for name, degree in given.items())
    text = (
        f"{factors} = {product} devices do not divide the {count} devices of the {role.role} ({role.devices})"
    )

    def cures() -> Iterator[Cure]:
        for degree in given.values():
            others = product // degree.value
            if count % others == 0:
                yield from ({degree.key: size} for size in nearest(degree.value, divisors(count // others)))
        yield _fitted(role, names)
        yield from device_cures(topology, role, math.lcm(product, role.model_parallel))

    yield Violation(f"{what}:{role.role}", DIVISION, key, value, text, cures)


def _fitted(role: RoleDevices, names: tuple[str, ...]) -> Values:
    """Every size as large as still divides."""
    left, values = len(role.devices), Values()
    for name in names:
        size = role.degree(name)
        fitting = math.gcd(size, left)
        left //= fitting
        if fitting != size:
            values[role.degrees[name].key] = fitting
    return values


def _shape(role: RoleDevices, topology: Topology, shape: ShapeNumbers | None) -> Iterator[Violation]:
    """Heads, layers and experts divide into their parts."""
    if shape is None:
        return
    for name in ("tensor", "context"):
        if name == "tensor" or role.engine == "fsdp2":
            yield from _shares(role, name, shape.heads, "attention heads")
            yield from _shares(role, name, shape.kv_heads, "key-value heads", either_way=True)
    if role.engine == "megatron":
        yield from _shares(role, "expert", shape.experts, "experts")
        yield from _stages(role, shape, topology)


def _shares(
    role: RoleDevices, name: str, number: int, what: str, *, either_way: bool = False
) -> Iterator[Violation]:
    size = role.degree(name)
    if size == 1 or (number and number % size == 0) or (either_way and number and size % number == 0):
        return
    key, count = role.degrees[name].key, len(role.devices)
    text = (
        f"must divide the {number} {what} of the {role.role}'s model"
        if number
        else f"divides {what}, and the model has none"
    )

    def cures() -> Iterator[Cure]:
        legal = divisors(number) if number else [1]
        yield from ({key: part} for part in nearest(size, legal))
        yield from ({key: part} for part in nearest(size, [part for part in legal if count % part == 0]))
        yield {key: 1}

    yield Violation(f"{what}:{name}:{role.role}", DIVISION, key, size, text, cures)


def _stages(role: RoleDevices, shape: ShapeNumbers, topology: Topology) -> Iterator[Violation]:
    stages, chunks = role.degrees["pipeline"], role.degrees["virtual_pipeline"]
    parts = stages.value * chunks.value
    if role.role in topology.layers_fixed or shape.layers % parts == 0:
        return
    each = f" x {chunks.key}={chunks.value} parts" if chunks.value > 1 else ""
    text = f"stages{each} must divide the {shape.layers} layers of the {role.role}'s model"

    def cures() -> Iterator[Cure]:
        if chunks.value > 1:
            yield {chunks.key: None}
            if shape.layers % stages.value == 0:
                yield from (
                    {chunks.key: n if n > 1 else None}
                    for n in nearest(chunks.value, divisors(shape.layers // stages.value))
                )
        if shape.layers % chunks.value == 0:
            yield from (
                {stages.key: n} for n in nearest(stages.value, divisors(shape.layers // chunks.value))
            )
        yield {stages.key: 1, chunks.key: None}

    yield Violation(f"layers:{role.role}", DIVISION, stages.key, stages.value, text, cures)
