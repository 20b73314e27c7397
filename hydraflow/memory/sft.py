"""The memory of a planned supervised run: one model in training, conversations in place of prompts and
responses.

In: `SFTPlan`, `SFTConfig`, the model's shape, limits. Out: a `MemoryReport` without advice: the run has one
role and few keys.
"""

from __future__ import annotations

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.memory.activations import RowSizes, tokens_of
from hydraflow.memory.estimate import PROCESS_BYTES, device_groups
from hydraflow.memory.limits import Limits, Types
from hydraflow.memory.report import HostMemory, MemoryReport, RoleMemory, size_text
from hydraflow.memory.roles import micro_batches, sharded_model
from hydraflow.memory.shape import ModelShape
from hydraflow.schema import SFTConfig


def estimate_sft(plan: SFTPlan, config: SFTConfig, shape: ModelShape, *, limits: Limits) -> MemoryReport:
    """The report of a supervised run; every conversation is as long as it may be, and nearly all of it is
    trained on."""
    ((name, layout),) = plan.layouts.items()
    length = config.data.max_length
    sharded = sharded_model(
        layout, shape, config.model, config.fsdp_config, limits, trained=True, policy=True
    )
    rows = RowSizes(1, length - 1, samples=1, packed=config.model.use_remove_padding)
    micro: MicroPlan = plan.role.micro
    tokens = tokens_of(micro, rows, most_rows=plan.role.rows_per_rank, devices=layout.context)
    accumulates = micro_batches(plan.role, length) > 1
    update = sharded.update(tokens, accumulates=accumulates, entropy=False, trained_entropy=False)
    role = RoleMemory(name, layout.engine, len(layout.devices), sharded.resting, {"update": update})
    groups = tuple(device_groups(plan.layouts, {name: role}, limits.device_bytes))
    on_node = min(len(layout.devices), layout.devices_per_node)
    load = shape.parameters * Types.of(config.fsdp_config, limits).kept
    host = HostMemory(
        load=load,
        load_text=(
            f"{size_text(load)} on machine 0 while the model loads: rank 0 reads it whole, the others read"
            " nothing"
        ),
        offload=role.host * on_node,
        processes=layout.devices_per_node * PROCESS_BYTES,
        running=role.total * on_node if limits.device_type == "cpu" else 0,
        limit=limits.host_bytes,
    )
    return MemoryReport(limits, (role,), groups, host, (*shape.notes, *limits.notes))
