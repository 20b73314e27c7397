"""Which ranks of a role do what together.

- The data group, all ranks (torch.distributed's default group): a batch is split over it. Metrics, the
  gradient's norm and reports of memory are reduced over it, and rank 0 broadcasts weights to it when a model
  is loaded.
- A shard group, `fsdp_size` neighbouring ranks: holds one copy of weights, gradients and optimizer state.
  FSDP gathers weights and scatters summed gradients in it.
- A replica group, the ranks of all shard groups with the same shard: sums the gradients of that shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hydraflow.engine import process_group


@dataclass(frozen=True)
class RankGroups:
    """The groups that this rank is in besides the data group."""

    shards: DeviceMesh
    """One dimension: the ranks that share a copy of the model."""
    replicas: dist.ProcessGroup | None
    """The ranks with the same shard as this one; None: there is only one copy."""

    @classmethod
    def make(cls, fsdp_size: int, device_type: str) -> RankGroups:
        """Collective. fsdp_size: ranks per copy of the model, a divisor of the number of ranks; -1: all."""
        ranks = dist.get_world_size()
        if fsdp_size in (-1, ranks):
            return cls(init_device_mesh(device_type, (ranks,)), None)
        neighbours, replicas = process_group.groups_of(fsdp_size)
        return cls(DeviceMesh.from_group(neighbours, device_type), replicas)

    @property
    def copies(self) -> int:
        """Copies of the model."""
        return 1 if self.replicas is None else self.replicas.size()
