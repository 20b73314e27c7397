"""The process groups of a role's ranks, and what each is for.

- All ranks (torch.distributed's default group): the gradient norm and out-of-memory reports are reduced over
  them, and rank 0 broadcasts weights to them when a model is loaded.
- A shard group, `fsdp_size` neighbouring ranks: holds one copy of weights, gradients and optimizer state.
  FSDP gathers weights and scatters summed gradients in it.
- A replica group, the ranks of all shard groups with the same shard: sums the gradients of that shard.
- A sequence group, `ulysses_sequence_parallel_size` neighbouring ranks: they get the same rows, and each
  computes a slice of the tokens (`engine/token_exchange.py`).
- A data group, the ranks at the same position in all sequence groups: together they have each row of a batch
  exactly once, so counts of rows and tokens are reduced over it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hydraflow.engine import process_group
from hydraflow.engine.config import FSDPConfig


@dataclass(frozen=True)
class RankGroups:
    """This rank's groups, besides the default group."""

    shards: DeviceMesh
    """One dimension: the ranks that share a copy of the model."""
    replicas: dist.ProcessGroup | None
    """The ranks with the same shard as this one; None: there is only one copy."""
    sequence: dist.ProcessGroup | None
    """The ranks with the same rows as this one; None: each rank has different rows."""
    data: dist.ProcessGroup | None
    """The ranks that have each row once; None: all."""

    @classmethod
    def make(cls, fsdp: FSDPConfig, device_type: str) -> RankGroups:
        """Collective. Both configured sizes must divide the number of ranks."""
        ranks, copy, sharers = dist.get_world_size(), fsdp.fsdp_size, fsdp.ulysses_sequence_parallel_size
        sequence, data = process_group.groups_of(sharers, "tokens") if sharers > 1 else (None, None)
        if copy in (-1, ranks):
            return cls(init_device_mesh(device_type, (ranks,)), None, sequence, data)
        neighbours, replicas = process_group.groups_of(copy, "copies")
        return cls(DeviceMesh.from_group(neighbours, device_type), replicas, sequence, data)

    @property
    def copies(self) -> int:
        """Copies of the model."""
        return 1 if self.replicas is None else self.replicas.size()

    @property
    def sharers(self) -> int:
        """Ranks that share the tokens of a row."""
        return 1 if self.sequence is None else self.sequence.size()
