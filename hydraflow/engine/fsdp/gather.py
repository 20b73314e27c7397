"""Gathers full tensors of sharded parameters, many per collective: one gather per tensor would be mostly
latency.

In: parameters by name, the same on every rank. Out: (name, full tensor), in order, on every rank or on one;
at most a bucket of them exists at a time. Ranks gather among those that share a copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from hydraflow.engine.config import GATHERED_BYTES
from hydraflow.engine.process_group import gather_parts
from hydraflow.weights.buckets import NamedTensor


@torch.no_grad()
def gathered(parameters: Mapping[str, torch.Tensor], *, to: int | None = None) -> Iterator[NamedTensor]:
    """Collective: every rank must exhaust the iterator. Tensors that this rank has whole are passed
    through.

    to: the only rank that gets the tensors; the others get ones without values, on the meta device.
    """
    for bucket in _buckets(parameters):
        yield from _gather(bucket, to)


def _buckets(parameters: Mapping[str, torch.Tensor]) -> Iterator[list[NamedTensor]]:
    """Groups consecutive parameters of one dtype, up to GATHERED_BYTES each."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, parameter in parameters.items():
        nbytes = parameter.numel() * parameter.element_size()
        if bucket and (size + nbytes > GATHERED_BYTES or bucket[0][1].dtype != parameter.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += nbytes
    if bucket:
        yield bucket


def _gather(bucket: list[NamedTensor], to: int | None) -> list[NamedTensor]:
    rows = _rows_of_all([parameter for _, parameter in bucket if _is_split_by_rows(parameter)], to)
    whole = {name: _whole(parameter) for name, parameter in bucket if not _is_split_by_rows(parameter)}
    if to not in (None, dist.get_rank()):
        return [(name, torch.empty(one.shape, dtype=one.dtype, device="meta")) for name, one in bucket]
    pieces = iter(rows)
    for name, parameter in bucket:
        if name not in whole:  # (ranks, numbers of one padded shard)
            whole[name] = next(pieces).reshape(-1, *parameter.shape[1:])[: parameter.shape[0]]
    return [(name, whole[name]) for name, _ in bucket]


def _rows_of_all(sharded: list[torch.Tensor], to: int | None) -> Sequence[torch.Tensor]:
    """For each parameter the padded shards of all ranks of a copy, (ranks, numbers of one shard); empty on
    ranks that receive nothing."""
    if not sharded:
        return []
    assert isinstance(sharded[0], DTensor)
    group = sharded[0].device_mesh.get_group()
    if to not in (None, *dist.get_process_group_ranks(group)):
        return []
    ranks = group.size()
    shards = [_padded_shard(parameter, ranks) for parameter in sharded]
    mine = torch.cat([shard.reshape(-1) for shard in shards])
    here = to in (None, dist.get_rank())
    everyone = mine.new_empty(ranks if here else 0, len(mine))
    if to is None:
        gather_parts(everyone.view(-1), mine, group)
    else:
        dist.gather(mine, list(everyone) if here else None, dst=to, group=group)
    return everyone.split([shard.numel() for shard in shards], dim=1)


def _is_split_by_rows(parameter: torch.Tensor) -> bool:
    return (
        isinstance(parameter, DTensor)
        and parameter.placements == (Shard(0),)
        and parameter.device_mesh.size() > 1
    )


def _padded_shard(parameter: torch.Tensor, ranks: int) -> torch.Tensor:
    """This rank's rows, padded to the number of the first rank, which has the most."""
    assert isinstance(parameter, DTensor)
    local = parameter.to_local()
    missing = -(-parameter.shape[0] // ranks) - local.shape[0]
    return local if not missing else torch.cat([local, local.new_zeros(missing, *local.shape[1:])])


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    return parameter.full_tensor() if parameter.device_mesh.size() > 1 else parameter.to_local().detach()
