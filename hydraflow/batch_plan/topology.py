"""Machines and devices in the configuration: pools, the devices of each role, its parallel sizes.

In: settings, and the devices of a machine if no key sets them. Out: one `Topology`. Left out on purpose:
whether it adds up (`batch_plan/device_rules.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hydraflow.batch_plan.layout import Cluster, Devices, Pool
from hydraflow.batch_plan.mapping import parse
from hydraflow.batch_plan.roles import needs_critic, own_reference
from hydraflow.batch_plan.settings import Settings
from hydraflow.engine.config import FSDPConfig, MegatronConfig
from hydraflow.schema import PPOConfig
from hydraflow.workers.config import ActorConfig, CriticConfig, RefConfig

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
REF, ROLLOUT = "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
REWARD = "reward.reward_model"
SECTIONS = {"actor": ACTOR, "critic": CRITIC, "ref": REF, "rollout": ROLLOUT, "reward_model": REWARD}
NODES, PER_NODE = "trainer.nnodes", "trainer.n_gpus_per_node"
CLUSTER_NODES, CLUSTER_PER_NODE = "cluster.nodes", "cluster.devices_per_node"


@dataclass(frozen=True)
class Degree:
    """A parallel size of a role, and its key."""

    value: int
    key: str


@dataclass(frozen=True)
class RoleDevices:
    """The devices that a role asks for, and its parallel sizes."""

    role: str
    engine: str
    devices: Devices
    """Its devices; empty if its mapping cannot be read."""
    devices_per_node: int
    pool: str
    """The pool whose devices it has, all of them; empty: it has a mapping."""
    degrees: Mapping[str, Degree]
    """tensor, pipeline, virtual_pipeline, context, expert, expert_tensor, shard, replica_data: those that the
    engine knows."""
    mapping: object = None
    twice: Devices = Devices(())
    """Devices that the mapping names more than once."""
    fault: str = ""
    """What is wrong with the mapping itself."""
    placed_twice: bool = False
    """Whether it is given both devices and machines of its own."""
    layers_fixed: bool = False
    """Whether its configuration assigns layers to pipeline stages itself."""

    @property
    def mapping_key(self) -> str:
        """The key of its mapping."""
        return f"{SECTIONS.get(self.role, self.role)}.device_mapping"

    def degree(self, name: str) -> int:
        """A size; 1 where the engine does not know it."""
        return self.degrees[name].value if name in self.degrees else 1

    @property
    def model_parallel(self) -> int:
        """mp: devices that one row needs."""
        return self.degree("tensor") * self.degree("pipeline") * self.degree("context")


@dataclass(frozen=True)
class Topology:
    """Machines and roles as requested."""

    cluster: Cluster
    roles: Mapping[str, RoleDevices]
    nodes_key: str = NODES
    """The key that decides how many machines the trainer has."""
    per_node_key: str = PER_NODE
    """The key that decides how many devices each of them has."""
    asked_nodes: int | None = None
    """cluster.nodes, as requested."""
    asked_per_node: int | None = None
    """cluster.devices_per_node, as requested."""

    @property
    def pools(self) -> dict[str, Pool]:
        """The cluster's pools by name."""
        return {pool.name: pool for pool in self.cluster.pools}

    def keys_of(self, pool: Pool) -> tuple[str, str]:
        """The keys that decide a pool's machines and the devices on each."""
        if pool.name == "trainer":
            return self.nodes_key, self.per_node_key
        return f"{SECTIONS[pool.name]}.nnodes", f"{SECTIONS[pool.name]}.n_gpus_per_node"


def read_topology(settings: Settings[PPOConfig], devices_per_node: int) -> Topology:
    """The requested topology; `devices_per_node` is used if neither `cluster` nor `trainer` sets the devices
    of a machine."""
    cluster, reader = settings.config.cluster, _TopologyReader(settings)
    nodes_key, per_node_key, pools = reader.pools(devices_per_node)
    return Topology(
        cluster=Cluster(tuple(pools.values())),
        roles={role: reader.role(role, pools) for role in reader.names()},
        nodes_key=nodes_key,
        per_node_key=per_node_key,
        asked_nodes=cluster.nodes,
        asked_per_node=cluster.devices_per_node,
    )


class _TopologyReader:
    def __init__(self, settings: Settings[PPOConfig]):
        self.settings = settings
        self.config: PPOConfig = settings.config
        self.policy, self.reward = self.config.actor_rollout_ref, self.config.reward.reward_model
        self.trained: dict[str, ActorConfig | CriticConfig | RefConfig] = {
            "actor": self.policy.actor,
            "critic": self.config.critic,
            "ref": self.policy.ref,
        }
        """The configurations of the roles with a training engine."""
        self.mappings: dict[str, object] = {
            "actor": self.policy.actor.device_mapping,
            "critic": self.config.critic.device_mapping,
            "ref": self.policy.ref.device_mapping,
            "rollout": self.policy.rollout.device_mapping,
            "reward_model": self.reward.device_mapping,
        }
        self.own_machines: dict[str, tuple[int, int]] = {}
        """Role -> the machines of its own, and the devices on each."""
        if self.policy.rollout.nnodes > 0:
            self.own_machines["rollout"] = (self.policy.rollout.nnodes, self.policy.rollout.n_gpus_per_node)
        if self.reward.enable and self.reward.enable_resource_pool:
            self.own_machines["reward_model"] = (self.reward.nnodes, self.reward.n_gpus_per_node)

    def names(self) -> list[str]:
        """The roles that run and hold a model."""
        runs = {"critic": needs_critic(self.config), "ref": own_reference(self.config)}
        runs["reward_model"] = self.reward.enable
        return [role for role in SECTIONS if runs.get(role, True)]

    def pools(self, devices_per_node: int) -> tuple[str, str, dict[str, Pool]]:
        """The keys that decide the trainer's machines and the devices on each; the trainer's machines, and
        those of roles that have their own."""
        cluster, trainer = self.config.cluster, self.config.trainer
        others = {role: own for role, own in self.own_machines.items() if self.mappings[role] is None}
        nodes, nodes_key, per_node_key = trainer.nnodes, NODES, PER_NODE
        if cluster.nodes is not None and self._yields(NODES, CLUSTER_NODES):
            nodes = max(1, cluster.nodes - sum(count for count, _ in others.values()))
            nodes_key = CLUSTER_NODES
        if cluster.devices_per_node is not None and self._yields(PER_NODE, CLUSTER_PER_NODE):
            per_node_key = CLUSTER_PER_NODE
        per_node = self._per_node(trainer.n_gpus_per_node, PER_NODE) or devices_per_node
        pools = {"trainer": Pool("trainer", nodes, per_node, 0)}
        for name, (count, devices) in others.items():
            own = self._per_node(devices, f"{SECTIONS[name]}.n_gpus_per_node")
            assert own is not None
            pools[name] = Pool(name, count, own, [*pools.values()][-1].devices.stop)
        return nodes_key, per_node_key, pools

    def _per_node(self, per_node: int | None, key: str) -> int | None:
        """A number of devices per machine; where it was not given, that of the cluster."""
        cluster = self.config.cluster.devices_per_node
        return cluster if cluster and (per_node is None or self._yields(key, CLUSTER_PER_NODE)) else per_node

    def _yields(self, key: str, to: str) -> bool:
        return self.settings.strength(key) < self.settings.strength(to)

    def role(self, role: str, pools: Mapping[str, Pool]) -> RoleDevices:
        """A role on the devices of its mapping, on its own machines, with the actor, or on all devices of the
        trainer."""
        own, engine = self.mappings[role], self._engine(role)
        mapping, pool = own, pools.get(role, pools["trainer"])
        if role in ("ref", "rollout") and role not in pools and own is None:
            mapping = self.mappings["actor"]
        devices, twice, fault = pool.devices, Devices(()), ""
        if mapping is not None:
            try:
                devices, twice = parse(mapping)
            except ValueError as error:
                devices, fault = Devices(()), str(error)
        return RoleDevices(
            role=role,
            engine=engine,
            devices=devices,
            devices_per_node=pool.devices_per_node,
            pool="" if mapping is not None else pool.name,
            degrees=self._degrees(role),
            mapping=own,
            twice=twice,
            fault=fault,
            placed_twice=role in self.own_machines and own is not None,
            layers_fixed=engine == "megatron" and self.trained[role].megatron.gives_layers,
        )

    def _engine(self, role: str) -> str:
        if role == "rollout":
            return self.policy.rollout.name
        strategy = self.config.critic.strategy if role == "critic" else self.policy.actor.strategy
        return "megatron" if strategy == "megatron" and role in self.trained else "fsdp2"

    def _degrees(self, role: str) -> dict[str, Degree]:
        rollout = self.policy.rollout
        if role == "rollout":
            sizes = {
                "tensor": ("tensor_model_parallel_size", rollout.tensor_model_parallel_size),
                "pipeline": ("pipeline_model_parallel_size", rollout.pipeline_model_parallel_size),
                "replica_data": ("data_parallel_size", rollout.data_parallel_size),
            }
            return {name: Degree(size, f"{ROLLOUT}.{key}") for name, (key, size) in sizes.items()}
        if role == "reward_model":
            key = f"{REWARD}.tensor_model_parallel_size"
            return {"tensor": Degree(self.reward.tensor_model_parallel_size, key)}
        own, leader = self._trained_degrees(role), self._trained_degrees("actor")
        if role != "ref":
            return own
        # the reference divides its model as the actor does, unless its own keys are set
        shared = [name for name in own if name in leader and name != "shard"]
        free = [name for name in shared if self.settings.follows(own[name].key, leader[name].key)]
        return own | {name: leader[name] for name in free}

    def _trained_degrees(self, role: str) -> dict[str, Degree]:
        """The sizes of a role with a training engine, from its own section."""
        section = self.trained[role]
        if self._engine(role) == "megatron":
            return megatron_degrees(section.megatron, f"{SECTIONS[role]}.megatron")
        return fsdp_degrees(section.fsdp_config, f"{SECTIONS[role]}.fsdp_config")


def fsdp_degrees(fsdp: FSDPConfig, prefix: str) -> dict[str, Degree]:
    """The sizes that FSDP knows."""
    return {
        "context": Degree(fsdp.ulysses_sequence_parallel_size, f"{prefix}.ulysses_sequence_parallel_size"),
        "shard": Degree(fsdp.fsdp_size, f"{prefix}.fsdp_size"),
    }


def megatron_degrees(megatron: MegatronConfig, prefix: str) -> dict[str, Degree]:
    """The sizes that Megatron-Core knows; experts are divided like the layer by default."""
    sizes = {
        "tensor": ("tensor_model", megatron.tensor_model_parallel_size),
        "pipeline": ("pipeline_model", megatron.pipeline_model_parallel_size),
        "virtual_pipeline": ("virtual_pipeline_model", megatron.virtual_pipeline_model_parallel_size),
        "context": ("context", megatron.context_parallel_size),
        "expert": ("expert_model", megatron.expert_model_parallel_size),
        "expert_tensor": ("expert_tensor", megatron.expert_tensor_parallel_size),
    }
    found = {
        name: Degree(1 if size is None else size, f"{prefix}.{key}_parallel_size")
        for name, (key, size) in sizes.items()
    }
    if megatron.expert_tensor_parallel_size is None:
        found["expert_tensor"] = found["tensor"]
    return found
