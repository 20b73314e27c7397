"""Workers without Ray: what a process would know of itself, written down."""

from __future__ import annotations

from hydraflow.dispatch.worker import ProcessContext, Worker


def process(rank: int = 0, world_size: int = 1, **roles: Worker) -> ProcessContext:
    """A process of a group on one node. Engines find torch.distributed ready, so nobody listens at the
    address."""
    return ProcessContext(rank, world_size, rank, "here", "127.0.0.1", 0, "cpu", 60.0, roles)
