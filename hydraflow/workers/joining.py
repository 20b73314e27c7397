"""Joins a worker's process to the torch.distributed group that its role needs."""

from __future__ import annotations

from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine import process_group


def join_group(process: ProcessContext, size: int | None = None) -> None:
    """Waits until all processes of the worker group have joined. `size`: neighbouring ranks form separate
    process groups of that size; None: one group of all ranks."""
    process_group.start(
        rank=process.rank,
        world_size=process.world_size,
        address=process.master_addr,
        port=process.master_port,
        device_type=process.device_type,
        timeout_s=process.timeout_s,
        listen_fd=process.listen_fd,
        group_size=size,
    )
