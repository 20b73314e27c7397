"""Checks machines, devices and the parallel sizes of roles.

In: a `Topology`, and the models' shapes if known. Out: broken rules, and a `Layout` for each role that breaks
none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from hydraflow.batch_plan.layout import Devices, Layout, ShapeNumbers, layers_of_stages
from hydraflow.batch_plan.mapping import text_of
from hydraflow.batch_plan.parts import divisors, multiples, nearest
from hydraflow.batch_plan.repair import DIVISION, HOLES, MACHINES, MAPPING, Fix, Values, Violation
from hydraflow.batch_plan.topology import CLUSTER_NODES, CLUSTER_PER_NODE, SECTIONS, RoleDevices, Topology
from hydraflow.errors import shown

_PARTS = {name: name for name in ("tensor", "pipeline", "expert")}
_PARTS |= {"context": "sequence or context", "replica_data": "data", "expert_tensor": "expert tensor"}
ROW = ("tensor", "pipeline", "context")
"""Sizes whose product is the devices that one row needs."""


def judge_devices(
    topology: Topology, shapes: Mapping[str, ShapeNumbers | None]
) -> tuple[list[Violation], dict[str, Layout]]:
    """Every broken rule of machines, mappings and sizes, and the layouts of the roles that break none.
    `shapes`: by role."""
    violations, layouts = [*_machines(topology), *_placed_twice(topology)], dict[str, Layout]()
    placed = True
    for role in topology.roles.values():
        if misplaced := _mapping(role, topology):
            placed = False
            violations += misplaced if role.mapping is not None else []
            continue
        wrong = [*_division(role, topology), *_shape(role, shapes.get(role.role))]
        violations += wrong if not _is_the_actor(role, topology) else []
        if not wrong:
            layouts[role.role] = _layout(role)
    if placed:
        violations += _holes(topology)
    return violations, layouts


def _is_the_actor(role: RoleDevices, topology: Topology) -> bool:
    """A reference that follows the actor in everything breaks its rules too; they are reported once."""
    actor = topology.roles.get("actor", role)
    degrees = [{**one.degrees, "shard": None} for one in (role, actor)]
    return role.role == "ref" and role.devices == actor.devices and degrees[0] == degrees[1]


def _layout(role: RoleDevices) -> Layout:
    count = len(role.devices)
    shard = role.degree("shard") if "shard" in role.degrees else count
    return Layout(
        role=role.role,
        engine=role.engine,
        devices=role.devices,
        devices_per_node=role.devices_per_node,
        shard=(shard if shard > 0 else count) if role.engine == "fsdp2" else 1,
        **{name: role.degree(name) for name in (*_PARTS, "virtual_pipeline")},
    )


def _machines(topology: Topology) -> Iterator[Violation]:
    """The pools together need exactly as many machines as the cluster has."""
    pools, asked, per_node = topology.cluster.pools, topology.asked_nodes, topology.asked_per_node
    nodes = topology.cluster.nodes
    if asked is not None and asked != nodes:
        needs = " + ".join(f"{pool.name} {pool.nodes}" for pool in pools)
        needs += f" = {nodes}" if len(pools) > 1 else ""
        more = "more than there are" if nodes > asked else f"{asked - nodes} would stay unused"
        fixes: list[Fix] = [{CLUSTER_NODES: nodes}]
        for pool in pools:
            rest, key = asked - (nodes - pool.nodes), topology.keys_of(pool)[0]
            fixes += [{key: rest}] if rest > 0 and key != CLUSTER_NODES else []
        text = f"machines, but {needs} are requested: {more}"
        yield Violation("machines", MACHINES, CLUSTER_NODES, asked, text, fixes)
    for pool in pools:
        own = pool.devices_per_node
        if per_node is None or own == per_node:
            continue
        key = topology.keys_of(pool)[1]
        text = f"devices on each machine of the {pool.name} are not the {per_node} of"
        text += f" {CLUSTER_PER_NODE}={per_node}"
        either: list[Fix] = [{key: per_node}, {CLUSTER_PER_NODE: own}]
        yield Violation(f"devices per machine:{pool.name}", MACHINES, key, own, text, either)


def _placed_twice(topology: Topology) -> Iterator[Violation]:
    for name, role in topology.roles.items():
        if not role.placed_twice:
            continue
        own: Values = {f"{SECTIONS[name]}.enable_resource_pool": False}
        if name == "rollout":
            own = {f"{SECTIONS[name]}.nnodes": 0}
        devices = f"{role.mapping_key}={_show(role.mapping)} gives it devices of the trainer"
        text = f"gives the {name} machines of its own, but {devices}; set only one of the two"
        either: list[Fix] = [own, {role.mapping_key: None}]
        yield Violation(f"placed twice:{name}", MACHINES, next(iter(own)), None, text, either)


def device_fixes(topology: Topology, role: RoleDevices, unit: int) -> Iterator[Fix]:
    """More or fewer devices for a role, so that their number is a multiple of `unit`."""
    count = len(role.devices)
    if not role.pool:
        for devices in multiples(count, unit):
            if devices < count:
                yield {role.mapping_key: text_of(role.devices.first(devices))}
        return
    pool = topology.pools[role.pool]
    nodes_key, per_node_key = topology.keys_of(pool)
    others = topology.cluster.nodes - pool.nodes if nodes_key == CLUSTER_NODES else 0
    for nodes in multiples(pool.nodes, unit // math.gcd(unit, pool.devices_per_node)):
        if nodes != pool.nodes:
            yield {nodes_key: nodes + others}
    for per_node in multiples(pool.devices_per_node, unit // math.gcd(unit, pool.nodes)):
        if per_node != pool.devices_per_node:
            yield {per_node_key: per_node}


def _show(mapping: object) -> str:
    return shown(mapping).replace(" ", "")


def _mapping(role: RoleDevices, topology: Topology) -> list[Violation]:
    """A mapping can be parsed, and names existing devices, each once. A role that follows the actor's mapping
    breaks the same rules."""
    key, there, inside = role.mapping_key, topology.cluster.devices, role.devices & topology.cluster.devices
    beyond, all_there = role.devices - there, text_of(there)

    def fixes() -> Iterator[Fix]:
        if inside:
            yield {key: text_of(inside)}
        yield {key: text_of(there.first(len(role.devices))) if beyond else all_there}
        yield {key: None}
        if beyond:
            yield from _resized(topology, role.devices.stop)

    if role.fault:
        rule, text = "readable", role.fault
    elif role.twice:
        rule, text = "once", f"names {_named(role.twice)} twice"
    elif beyond:
        rule = "beyond"
        text = f"names {_named(beyond)}, but {_machines_text(topology)} have only {there}"
    else:
        return []
    return [Violation(f"mapping {rule}:{role.role}", MAPPING, key, _show(role.mapping), text, fixes)]


def _named(devices: Devices) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {devices}"


def _resized(topology: Topology, stop: int) -> Iterator[Fix]:
    """Machines of the trainer that end at device `stop`."""
    pool = topology.pools["trainer"]
    nodes_key, per_node_key = topology.keys_of(pool)
    if nodes := -(-stop // pool.devices_per_node):
        yield {nodes_key: nodes}
    if pool.nodes == 1 and stop:
        yield {per_node_key: stop}


def _machines_text(topology: Topology) -> str:
    return " + ".join(f"{pool.nodes} x {pool.devices_per_node} devices" for pool in topology.cluster.pools)


def _holes(topology: Topology) -> Iterator[Violation]:
    """Every device of the cluster has a role: an unused one was probably forgotten, and costs money."""
    used = Devices.of(part for role in topology.roles.values() for part in role.devices.ranges)
    unused = topology.cluster.devices - used
    mapped = [role for role in topology.roles.values() if role.mapping is not None]
    if not unused or not mapped:
        return

    def fixes() -> Iterator[Fix]:
        for role in mapped:
            yield {role.mapping_key: text_of(role.devices | unused)}
            yield {role.mapping_key: None}
        yield from _resized(topology, used.stop)
        yield {role.mapping_key: None for role in mapped}

    key, value = mapped[0].mapping_key, _show(mapped[0].mapping)
    roles = ", ".join(f"{role.role} {role.devices}" for role in topology.roles.values())
    where = f"{_machines_text(topology)}; {roles}"
    text = f"no role uses devices {unused} of {topology.cluster.devices} ({where})"
    yield Violation("mapping holes", HOLES, key, value, text, fixes)


def _division(role: RoleDevices, topology: Topology) -> Iterator[Violation]:
    """The parallel sizes of a role divide its devices."""
    yield from _divides(role, topology, "row", (*ROW, "replica_data"))
    count = len(role.devices)
    if role.engine == "megatron":
        if role.degree("expert") > 1 or role.degrees["expert_tensor"] != role.degrees["tensor"]:
            yield from _divides(role, topology, "experts", ("expert_tensor", "expert", "pipeline"))
        chunks, stages = role.degrees["virtual_pipeline"], role.degrees["pipeline"]
        if chunks.value > 1 and stages.value == 1:
            text = f"virtual pipeline stages need pipeline parallelism, but {stages.key}=1"
            fixes: list[Fix] = [{chunks.key: None}, {stages.key: 2}]
            yield Violation(f"interleaving:{role.role}", DIVISION, chunks.key, chunks.value, text, fixes)
    shard = role.degrees.get("shard")
    if shard and shard.value != -1 and (shard.value < 1 or count % shard.value):
        text = f"must be -1 or divide the {count} devices of the {role.role}"
        sizes = [-1, *nearest(shard.value, divisors(count))]
        fitting: list[Fix] = [{shard.key: size} for size in sizes]
        yield Violation(f"copies:{role.role}", DIVISION, shard.key, shard.value, text, fitting)


def _divides(role: RoleDevices, topology: Topology, what: str, names: tuple[str, ...]) -> Iterator[Violation]:
    given = {name: role.degrees[name] for name in names if role.degree(name) > 1}
    product, count = math.prod(degree.value for degree in given.values()), len(role.devices)
    if count % product == 0:
        return

    def fixes() -> Iterator[Fix]:
        for degree in given.values():
            others = product // degree.value
            if count % others == 0:
                yield from ({degree.key: size} for size in nearest(degree.value, divisors(count // others)))
        left, fitting = count, Values()
        for degree in given.values():  # the largest value of each size that still divides
            size = math.gcd(degree.value, left)
            left //= size
            if size != degree.value:
                fitting[degree.key] = size
        yield fitting
        yield from device_fixes(topology, role, math.lcm(product, role.model_parallel))

    first = next(iter(given.values()))
    factors = " x ".join(f"{_PARTS[name]} {degree.value}" for name, degree in given.items())
    devices = f"the {count} devices of the {role.role} ({role.devices})"
    text = f"{factors} = {product} devices do not divide {devices}"
    yield Violation(f"{what}:{role.role}", DIVISION, first.key, first.value, text, fixes)


def _shape(role: RoleDevices, shape: ShapeNumbers | None) -> Iterator[Violation]:
    """The parallel sizes divide the model's heads, layers and experts."""
    if shape is None:
        return
    either_way = role.engine != "megatron"  # other engines repeat key-value heads
    of_keys = _shares(role, "tensor", shape.kv_heads, "key-value heads", either_way=either_way)
    yield from list(_shares(role, "tensor", shape.heads, "attention heads")) or of_keys
    if role.engine == "fsdp2":  # Ulysses repeats key-value heads
        yield from _shares(role, "context", shape.heads, "attention heads")
    if role.engine == "megatron":
        of_tensor_rank = max(1, shape.heads // role.degree("tensor"))
        yield from _shares(role, "context", of_tensor_rank, "attention heads of a tensor-parallel rank")
        yield from _shares(role, "expert", shape.experts, "experts")
        if not role.layers_fixed:
            yield from _stages(role, shape.layers)
    else:
        yield from _replica_stages(role, shape)


def _shares(
    role: RoleDevices, name: str, number: int, what: str, *, either_way: bool = False
) -> Iterator[Violation]:
    size = role.degree(name)
    if size == 1 or (number and number % size == 0) or (either_way and number and size % number == 0):
        return
    key, count = role.degrees[name].key, len(role.devices)

    def fixes() -> Iterator[Fix]:
        legal = divisors(number) if number else [1]
        yield from ({key: part} for part in nearest(size, legal))
        among_devices = [part for part in legal if count % part == 0]
        yield from ({key: part} for part in sorted(among_devices, key=lambda part: abs(part - size)))

    text = f"divides {what}, but the model has none"
    if number:
        text = f"must divide the {number} {what} of the {role.role}'s model"
    yield Violation(f"{what}:{name}:{role.role}", DIVISION, key, size, text, fixes)


def _replica_stages(role: RoleDevices, shape: ShapeNumbers) -> Iterator[Violation]:
    """Each stage of a replica has a layer, and one with experts if the model has any: otherwise vLLM does not
    start."""
    if role.degree("pipeline") == 1:
        return
    stages, sizes = role.degrees["pipeline"], divisors(len(role.devices))
    whole = [size for size in sizes if size == 1 or (size <= shape.layers and not _dense_stages(shape, size))]
    fixes: list[Fix] = [{stages.key: size} for size in nearest(stages.value, whole)]
    model = f"the {role.role}'s model"
    if stages.value > shape.layers:
        text = f"must be at most {shape.layers}, the number of layers of {model}: each stage needs one"
    elif dense := _dense_stages(shape, stages.value):
        lacking = " and ".join(_indices(stage) for stage in dense)
        text = f"each stage of {model} needs a layer with experts; none is in {lacking} (of {shape.layers})"
    else:
        return
    yield Violation(f"layers:{role.role}", DIVISION, stages.key, stages.value, text, fixes)


def _dense_stages(shape: ShapeNumbers, stages: int) -> list[range]:
    """Layer indices of each stage that has no layer with experts; [] for a dense model."""
    if not shape.experts:
        return []
    return [indices for indices in layers_of_stages(shape.layers, stages) if {*indices} <= {*shape.dense_at}]


def _indices(layers: range) -> str:
    """Layer indices in words.

    >>> _indices(range(2, 4)), _indices(range(3, 4))
    ('layers 2 to 3', 'layer 3')
    """
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def _stages(role: RoleDevices, layers: int) -> Iterator[Violation]:
    stages, chunks = role.degrees["pipeline"], role.degrees["virtual_pipeline"]
    if layers % (stages.value * chunks.value) == 0:
        return

    def fixes() -> Iterator[Fix]:
        if chunks.value > 1:
            yield {chunks.key: None}
        if chunks.value > 1 and layers % stages.value == 0:
            for parts in nearest(chunks.value, divisors(layers // stages.value)):
                yield {chunks.key: parts if parts > 1 else None}
        if layers % chunks.value == 0:
            for parts in nearest(stages.value, divisors(layers // chunks.value)):
                yield {stages.key: parts}
        yield {stages.key: 1, chunks.key: None}

    each = f" x {chunks.key}={chunks.value} parts" if chunks.value > 1 else ""
    text = f"stages{each} must divide the {layers} layers of the {role.role}'s model"
    yield Violation(f"layers:{role.role}", DIVISION, stages.key, stages.value, text, fixes)
