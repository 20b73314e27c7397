"""What the configuration asks of machines and devices: pools, the devices of each role, how each divides its
model.

In: settings, and how many devices a machine has where nobody says. Out: one `Topology`. The only reader of
these keys. Left out on purpose: whether it adds up (`batch_plan/device_rules.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hydraflow.batch_plan.layout import Cluster, Devices, Pool
from hydraflow.batch_plan.mapping import Mapped, parse
from hydraflow.batch_plan.roles import needs_critic, own_reference
from hydraflow.batch_plan.settings import Settings
from hydraflow.engine.config import FSDPConfig, MegatronConfig
from hydraflow.schema import PPOConfig

ACTOR, CRITIC, REF, ROLLOUT = (
    "actor_rollout_ref.actor",
    "critic",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
)
REWARD = "reward.reward_model"
SECTIONS = {"actor": ACTOR, "critic": CRITIC, "ref": REF, "rollout": ROLLOUT, "reward_model": REWARD}
NODES, PER_NODE = "trainer.nnodes", "trainer.n_gpus_per_node"
CLUSTER_NODES, CLUSTER_PER_NODE = "cluster.nodes", "cluster.devices_per_node"


@dataclass(frozen=True)
class Degree:
    """One of the sizes by which a role divides its work, and the key that it stands under."""

    value: int
    key: str


@dataclass(frozen=True)
class RoleDevices:
    """Where a role wants to be, and how it divides."""

    role: str
    engine: str
    devices: Devices
    """Its devices; none where its mapping cannot be read."""
    devices_per_node: int
    pool: str
    """The pool whose devices it has as a whole; empty: it has a mapping."""
    mapping: object
    twice: Devices
    """Devices that the mapping names more than once."""
    fault: str
    """What is wrong with the mapping itself."""
    degrees: Mapping[str, Degree]
    """tensor, pipeline, virtual_pipeline, context, expert, expert_tensor, shard, replica_data: those that the
    engine knows."""

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
    """Machines and roles as asked for."""

    cluster: Cluster
    roles: Mapping[str, RoleDevices]
    nodes_key: str
    """The key that decides how many machines the trainer has."""
    per_node_key: str
    """The key that decides how many devices each of them has."""
    asked_nodes: int | None
    """cluster.nodes, as asked for."""
    asked_per_node: int | None
    """cluster.devices_per_node, as asked for."""
    layers_fixed: frozenset[str]
    """Roles whose configuration says by itself which layers stand where."""
    twofold: tuple[str, ...]
    """Roles that are given both devices and machines of their own."""

    @property
    def pools(self) -> dict[str, Pool]:
        """The pools by name."""
        return {pool.name: pool for pool in self.cluster.pools}


def read_topology(settings: Settings[PPOConfig], devices_per_node: int) -> Topology:
    """What is asked for; `devices_per_node` counts where neither `cluster` nor `trainer` says how many
    devices a machine has."""
    reader = _Reader(settings, devices_per_node)
    pools = reader.pools()
    roles = {role: reader.role(role, {pool.name: pool for pool in pools}) for role in reader.names()}
    return Topology(
        cluster=Cluster(tuple(pools)),
        roles=roles,
        nodes_key=reader.nodes_key,
        per_node_key=reader.per_node_key,
        asked_nodes=reader.cluster_nodes,
        asked_per_node=reader.cluster_per_node,
        layers_fixed=frozenset(role for role in roles if reader.says_layers(role)),
        twofold=tuple(role for role in roles if reader.is_twofold(role)),
    )


class _Reader:
    def __init__(self, settings: Settings[PPOConfig], devices_per_node: int):
        self.settings = settings
        self.config: PPOConfig = settings.config
        self.policy = self.config.actor_rollout_ref
        cluster, trainer = self.config.cluster, self.config.trainer
        self.cluster_nodes, self.cluster_per_node = cluster.nodes, cluster.devices_per_node
        self.nodes_key, self.per_node_key = NODES, PER_NODE
        self.per_node = self._yielding(trainer.n_gpus_per_node, PER_NODE) or devices_per_node
        if self.cluster_per_node is not None and self._yields(PER_NODE, CLUSTER_PER_NODE):
            self.per_node_key = CLUSTER_PER_NODE

    def names(self) -> list[str]:
        """The roles that run and hold a model."""
        runs = {
            "actor": True,
            "critic": needs_critic(self.config),
            "ref": own_reference(self.config),
            "rollout": True,
            "reward_model": self.config.reward.reward_model.enable,
        }
        return [role for role, does in runs.items() if does]

    # --- machines

    def pools(self) -> list[Pool]:
        """The trainer's machines, and those of roles that have their own."""
        rollout, reward = self.policy.rollout, self.config.reward.reward_model
        asked = []
        if rollout.nnodes > 0 and rollout.device_mapping is None:
            asked.append(
                (
                    "rollout",
                    rollout.nnodes,
                    self._yielding(rollout.n_gpus_per_node, f"{ROLLOUT}.n_gpus_per_node"),
                )
            )
        if reward.enable and reward.enable_resource_pool and reward.device_mapping is None:
            asked.append(
                (
                    "reward_model",
                    reward.nnodes,
                    self._yielding(reward.n_gpus_per_node, f"{REWARD}.n_gpus_per_node"),
                )
            )
        nodes = self._trainer_nodes(sum(count for _, count, _ in asked))
        pools = [Pool("trainer", nodes, self.per_node, 0)]
        for name, count, per_node in asked:
            assert per_node is not None
            pools.append(Pool(name, count, per_node, pools[-1].devices.stop))
        return pools

    def _trainer_nodes(self, others: int) -> int:
        asked = self.config.trainer.nnodes
        if self.cluster_nodes is None or not self._yields(NODES, CLUSTER_NODES):
            return asked
        self.nodes_key = CLUSTER_NODES
        return max(1, self.cluster_nodes - others)

    def _yielding(self, per_node: int | None, key: str) -> int | None:
        """A number of devices per machine; where it was not given, that of the cluster."""
        if self.cluster_per_node is not None and (per_node is None or self._yields(key, CLUSTER_PER_NODE)):
            return self.cluster_per_node
        return per_node

    def _yields(self, key: str, to: str) -> bool:
        return self.settings.strength(key) < self.settings.strength(to)

    # --- roles

    def role(self, role: str, pools: Mapping[str, Pool]) -> RoleDevices:
        """Where a role is: as its mapping says, on its own machines, with the actor, or on all of the
        trainer's devices."""
        mapping = self._mapping(role)
        follows_actor = role in ("ref", "rollout") and mapping is None and role not in pools
        if follows_actor:
            mapping = self.policy.actor.device_mapping
        pool = pools.get(role, pools["trainer"])
        mapped, fault = Mapped(pool.devices, Devices(())), ""
        if mapping is not None:
            try:
                mapped = parse(mapping)
            except ValueError as error:
                mapped, fault = Mapped(Devices(()), Devices(())), str(error)
        return RoleDevices(
            role=role,
            engine=self._engine(role),
            devices=mapped.devices,
            devices_per_node=pool.devices_per_node,
            pool="" if mapping is not None else pool.name,
            mapping=None if follows_actor else mapping,
            twice=mapped.twice,
            fault=fault,
            degrees=self._degrees(role),
        )

    def is_twofold(self, role: str) -> bool:
        """Whether a role is given both devices and machines of its own."""
        reward = self.config.reward.reward_model
        own = {"rollout": self.policy.rollout.nnodes > 0, "reward_model": reward.enable_resource_pool}
        return own.get(role, False) and self._mapping(role) is not None

    def _mapping(self, role: str) -> object:
        mappings = {
            "actor": self.policy.actor.device_mapping,
            "critic": self.config.critic.device_mapping,
            "ref": self.policy.ref.device_mapping,
            "rollout": self.policy.rollout.device_mapping,
            "reward_model": self.config.reward.reward_model.device_mapping,
        }
        return mappings[role]

    def _engine(self, role: str) -> str:
        if role == "rollout":
            return self.policy.rollout.name
        strategy = self.config.critic.strategy if role == "critic" else self.policy.actor.strategy
        return "megatron" if strategy == "megatron" and role != "reward_model" else "fsdp2"

    def _degrees(self, role: str) -> dict[str, Degree]:
        if role == "rollout":
            rollout = self.policy.rollout
            return {
                "tensor": Degree(rollout.tensor_model_parallel_size, f"{ROLLOUT}.tensor_model_parallel_size"),
                "pipeline": Degree(
                    rollout.pipeline_model_parallel_size, f"{ROLLOUT}.pipeline_model_parallel_size"
                ),
                "replica_data": Degree(rollout.data_parallel_size, f"{ROLLOUT}.data_parallel_size"),
            }
        if role == "reward_model":
            size = self.config.reward.reward_model.tensor_model_parallel_size
            return {"tensor": Degree(size, f"{REWARD}.tensor_model_parallel_size")}
        own = self.trained_degrees(role)
        if role != "ref":
            return own
        leader = self.trained_degrees("actor")
        return {
            name: self._following(degree, leader[name]) if name != "shard" else degree
            for name, degree in own.items()
        }

    def _following(self, own: Degree, leader: Degree) -> Degree:
        """The reference divides its model as the actor does, where nothing else is said."""
        return own if self.settings.strength(own.key) else leader

    def trained_degrees(self, role: str) -> dict[str, Degree]:
        """The sizes of a role with a training engine, as its own section says."""
        section = (
            self.config.critic
            if role == "critic"
            else self.policy.ref
            if role == "ref"
            else self.policy.actor
        )
        if self._engine(role) == "megatron":
            return megatron_degrees(section.megatron, f"{SECTIONS[role]}.megatron")
        return fsdp_degrees(section.fsdp_config, f"{SECTIONS[role]}.fsdp_config")

    def says_layers(self, role: str) -> bool:
        """Whether Megatron is told which layers each pipeline stage has."""
        if role not in ("actor", "critic", "ref") or self._engine(role) != "megatron":
            return False
        section = (
            self.config.critic
            if role == "critic"
            else self.policy.ref
            if role == "ref"
            else self.policy.actor
        )
        return any("pipeline" in key for key in section.megatron.override_transformer_config)


def fsdp_degrees(fsdp: FSDPConfig, prefix: str) -> dict[str, Degree]:
    """The sizes that FSDP knows."""
    return {
        "context": Degree(fsdp.ulysses_sequence_parallel_size, f"{prefix}.ulysses_sequence_parallel_size"),
        "shard": Degree(fsdp.fsdp_size, f"{prefix}.fsdp_size"),
    }


def megatron_degrees(megatron: MegatronConfig, prefix: str) -> dict[str, Degree]:
    """The sizes that Megatron-Core knows; experts are divided like the rest of a layer where nothing else is
    said."""
    tensor = Degree(megatron.tensor_model_parallel_size, f"{prefix}.tensor_model_parallel_size")
    own_tensor, chunks = megatron.expert_tensor_parallel_size, megatron.virtual_pipeline_model_parallel_size
    return {
        "tensor": tensor,
        "pipeline": Degree(megatron.pipeline_model_parallel_size, f"{prefix}.pipeline_model_parallel_size"),
        "virtual_pipeline": Degree(
            1 if chunks is None else chunks, f"{prefix}.virtual_pipeline_model_parallel_size"
        ),
        "context": Degree(megatron.context_parallel_size, f"{prefix}.context_parallel_size"),
        "expert": Degree(megatron.expert_model_parallel_size, f"{prefix}.expert_model_parallel_size"),
        "expert_tensor": tensor
        if own_tensor is None
        else Degree(own_tensor, f"{prefix}.expert_tensor_parallel_size"),
    }


def sizes(config: PPOConfig) -> list[tuple[str, int | None]]:
    """Every size of this file that must count at least one, where it is given and used."""
    rollout, reward, trainer, cluster = (
        config.actor_rollout_ref.rollout,
        config.reward.reward_model,
        config.trainer,
        config.cluster,
    )
    found = [
        (NODES, trainer.nnodes),
        (PER_NODE, trainer.n_gpus_per_node),
        (CLUSTER_NODES, cluster.nodes),
        (CLUSTER_PER_NODE, cluster.devices_per_node),
        (f"{ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size),
        (f"{ROLLOUT}.pipeline_model_parallel_size", rollout.pipeline_model_parallel_size),
        (f"{ROLLOUT}.data_parallel_size", rollout.data_parallel_size),
    ]
    if rollout.nnodes > 0:
        found += [
            (f"{ROLLOUT}.nnodes", rollout.nnodes),
            (f"{ROLLOUT}.n_gpus_per_node", rollout.n_gpus_per_node),
        ]
    if reward.enable:
        found += [
            (f"{REWARD}.tensor_model_parallel_size", reward.tensor_model_parallel_size),
            (f"{REWARD}.nnodes", reward.nnodes),
            (f"{REWARD}.n_gpus_per_node", reward.n_gpus_per_node),
        ]
    reader = _Reader(Settings(config, PPOConfig()), 1)
    trained = [role for role in reader.names() if role in ("actor", "critic", "ref")]
    for role in trained:
        degrees = reader.trained_degrees(role)
        found += [(degree.key, degree.value) for name, degree in degrees.items() if name != "shard"]
    return found
