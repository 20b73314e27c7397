"""The memory of a planned run: by role, by group of devices and phase, and on the machines. `estimate` is the
package's entry point.

In: the plan, the configuration, the model's shape, limits. Out: a `MemoryReport`. The estimate is the peak
with every row at maximum length; the fixed costs of a process (CUDA context, libraries) are not in a device's
numbers. Roles of one process work one after another; idle roles count with their memory at rest. Left out on
purpose: memory that allocators cache beyond what is in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hydraflow.batch_plan.layout import Devices, Layout
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.roles import dist_checkpoints
from hydraflow.batch_plan.topology import SECTIONS
from hydraflow.memory.advice import advise
from hydraflow.memory.limits import BytesPerNumber, MemoryLimits
from hydraflow.memory.report import (
    PHASES,
    DeviceGroup,
    HostMemoryEstimate,
    MemoryReport,
    RoleMemory,
    size_text,
)
from hydraflow.memory.roles import ALONE, EstimateInputs, role_memory, slot_bytes, slots_are_on_device
from hydraflow.memory.shape import ModelShape
from hydraflow.schema import PPOConfig
from hydraflow.workers.config import CriticConfig, RefConfig

PROCESS_BYTES = 360 * 2**20
"""Host memory of a worker process after its imports; measured by scripts/bench/memory.py."""


def estimate(
    plan: BatchPlan,
    config: PPOConfig,
    shape: ModelShape,
    *,
    limits: MemoryLimits,
    critic_shape: ModelShape | None = None,
) -> MemoryReport:
    """The report of a run of that plan. `critic_shape` None: the critic starts from the policy's model."""
    inputs = EstimateInputs(plan, config, shape, critic_shape or shape, limits)
    report = measured(inputs)
    if report.fits is not False:
        return report
    return replace(report, advice=tuple(advise(inputs, report, measured)))


def measured(inputs: EstimateInputs) -> MemoryReport:
    """The estimate itself, without advice."""
    plan, limits = inputs.plan, inputs.limits
    roles = tuple(role_memory(inputs, name, layout) for name, layout in plan.layouts.items())
    groups = tuple(device_groups(plan.layouts, {role.role: role for role in roles}, limits.device_bytes))
    host = _host(inputs, roles, groups)
    return MemoryReport(limits, roles, groups, host, tuple(_notes(inputs)))


def device_groups(
    layouts: Mapping[str, Layout], roles: Mapping[str, RoleMemory], limit: int | None
) -> Iterator[DeviceGroup]:
    """Devices with the same roles together, and what each phase needs there."""
    together: dict[tuple[str, ...], Devices] = {(): Devices(())}
    for layout in layouts.values():
        together[()] = together[()] | layout.devices
    for name, layout in layouts.items():
        split: dict[tuple[str, ...], Devices] = {}
        for names, devices in together.items():
            for key, part in (((*names, name), devices & layout.devices), (names, devices - layout.devices)):
                if len(part):
                    split[key] = part
        together = split
    for names, devices in sorted(together.items(), key=lambda item: item[1].ranges[0].start):
        sizes = {phase: _phase([roles[name] for name in names], phase) for phase in PHASES}
        phases = {phase: size for phase, size in sizes.items() if size is not None}
        yield DeviceGroup(str(devices), len(devices), names, phases, limit)


def _phase(roles: list[RoleMemory], phase: str) -> int | None:
    """Bytes with the active role at its peak and the others at rest; None: no role works in this phase. While
    weights are sent, both the sending and the receiving role are active."""
    active = [role for role in roles if phase in role.phases]
    if not active:
        return None
    resting = sum(role.resting.total for role in roles)
    added = [role.phases[phase].total - role.resting.total for role in active]
    return resting + (sum(added) if phase == "sync" else max(added))


def _host(
    inputs: EstimateInputs, roles: tuple[RoleMemory, ...], groups: tuple[DeviceGroup, ...]
) -> HostMemoryEstimate:
    """The fullest machine, assuming that there is one on which every role has devices."""
    layouts, limits = inputs.plan.layouts, inputs.limits
    offload, per_node = 0, 0
    for role in roles:
        layout = layouts[role.role]
        offload += role.host * min(len(layout.devices), layout.devices_per_node)
        per_node = max(per_node, layout.devices_per_node)
    running = 0
    if limits.device_type == "cpu":
        running = max(group.peak * min(group.count, per_node) for group in groups)
    load, text = _load(inputs)
    rows = _row_bytes(inputs)
    slots = 0 if slots_are_on_device(inputs) else slot_bytes(inputs)
    processes = per_node * PROCESS_BYTES
    return HostMemoryEstimate(load, text, offload, processes, running, limits.host_bytes, rows, slots)


def _row_bytes(inputs: EstimateInputs) -> int:
    """Bytes of a step's columns (`protocol/fields.py`) in the first machine's object store: 8 per token id
    and mask value, 4 per other number of a response token. Rank 0 makes rewards, advantages and returns of
    all rows; every other column is made by the rank that has the rows."""
    plan, data = inputs.plan, inputs.config.data
    numbers = 2 + bool(plan.ref) + bool(plan.values)  # rollout, old and reference log-probs, values
    shared = 8 * data.max_prompt_length + (16 + 4 * numbers) * data.max_response_length
    on_the_first = 3 * 4 * data.max_response_length
    layout = plan.layouts["actor"]
    machines = -(-len(layout.devices) // layout.devices_per_node)
    rows = plan.trajectories_per_step
    return -(-rows // machines) * shared + rows * on_the_first


def _load(inputs: EstimateInputs) -> tuple[int, str]:
    """Rank 0 of each role with weights of its own reads its whole model; colocated roles load one after the
    other in that process."""
    readers: dict[int, int] = {}
    for name, layout in inputs.plan.layouts.items():
        if name == "rollout":
            continue  # its weights come from the actor
        first = layout.devices.ranges[0].start
        readers[first] = max(readers.get(first, 0), _read_bytes(inputs, name, layout))
    load = sum(readers.values())
    text = "rank 0 of each role reads its whole model, the others read nothing"
    if dist_checkpoints(inputs.config):
        text += "; from a checkpoint of Megatron-Core, each rank a tensor at a time"
    return load, f"{size_text(load)} on machine 0 while models load: {text}"


def _read_bytes(inputs: EstimateInputs, role: str, layout: Layout) -> int:
    policy, limits = inputs.config.actor_rollout_ref, inputs.limits
    others: dict[str, CriticConfig | RefConfig] = {"critic": inputs.config.critic, "ref": policy.ref}
    section = others.get(role, policy.actor)
    shape = inputs.critic_shape if role == "critic" else inputs.shape
    numbers = shape.value_parameters if role == "critic" else shape.parameters
    if SECTIONS.get(role) in dist_checkpoints(inputs.config):
        numbers = shape.largest_tensor
    if layout.engine == "megatron":
        return numbers * limits.bytes_of(section.megatron.dtype)
    return numbers * BytesPerNumber.of(section.fsdp_config, limits).kept


def _notes(inputs: EstimateInputs) -> Iterator[str]:
    yield from inputs.shape.notes
    if inputs.critic_shape is not inputs.shape:
        yield from (f"critic: {note}" for note in inputs.critic_shape.notes)
    yield from inputs.limits.notes
    engines = {layout.engine for layout in inputs.plan.layouts.values()}
    if "megatron" in engines and inputs.shape.experts:
        yield "activations in Megatron's experts follow Megatron-Core's own formula, and were not measured"
    if "reward_model" in inputs.plan.layouts:
        yield "the reward model is counted as a model of the policy's shape"
    if engines & ALONE and inputs.limits.device_bytes is None:
        share = "the memory of the device, of which rollout.gpu_memory_utilization is a share, is not known"
        yield f"{share}: the cache is what its sequences need"
    loading = "loading: rank 0 broadcasts the model tensor by tensor and each rank keeps its shard"
    yield f"{loading}; roles of one process load one after another"
    if inputs.limits.device_type == "cpu":
        freed = "the C library's allocator keeps freed memory"
        yield f"{freed}: a process on a CPU may show up to twice these numbers"
