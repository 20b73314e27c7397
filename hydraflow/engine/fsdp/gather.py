"""Full tensors of sharded parameters, many per collective: one gather per tensor would be mostly latency.

In: parameters by name, the same on every rank. Out: (name, full tensor), in order; at most a bucket of them
exists at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

BUCKET_BYTES = 64 * 2**20
"""Bytes of full tensors that are gathered together; a larger tensor is a bucket of its own."""

NamedTensor = tuple[str, torch.Tensor]


@torch.no_grad()
def gathered(parameters: Mapping[str, torch.Tensor]) -> Iterator[NamedTensor]:
    """Collective: every rank must exhaust the iterator. Unsharded tensors are passed through."""
    for bucket in _buckets(parameters):
        yield from _gather(bucket)


def _buckets(parameters: Mapping[str, torch.Tensor]) -> Iterator[list[NamedTensor]]:
    """Parameters of one type, in order, up to BUCKET_BYTES."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, parameter in parameters.items():
        nbytes = parameter.numel() * parameter.element_size()
        if bucket and (size + nbytes > BUCKET_BYTES or bucket[0][1].dtype != parameter.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += nbytes
    if bucket:
        yield bucket


def _gather(bucket: list[NamedTensor]) -> list[NamedTensor]:
    ranks = dist.get_world_size()
    sharded = [parameter for _, parameter in bucket if _is_split_by_rows(parameter)]
    pieces = [_padded_shard(parameter, ranks) for parameter in sharded]
    rows: Iterator[torch.Tensor] = iter(())
    if pieces:
        mine = torch.cat([piece.reshape(-1) for piece in pieces])
        everyone = mine.new_empty(ranks * len(mine))
        dist.all_gather_single(everyone, mine)
        rows = iter(everyone.view(ranks, -1).split([piece.numel() for piece in pieces], dim=1))
    return [
        (name, _joined(next(rows), parameter) if _is_split_by_rows(parameter) else _whole(parameter))
        for name, parameter in bucket
    ]


def _is_split_by_rows(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)


def _padded_shard(parameter: torch.Tensor, ranks: int) -> torch.Tensor:
    """This rank's rows, padded to those of the first rank, which has the most."""
    assert isinstance(parameter, DTensor)
    local = parameter.to_local()
    missing = -(-parameter.shape[0] // ranks) - local.shape[0]
    return local if not missing else torch.cat([local, local.new_zeros(missing, *local.shape[1:])])


def _joined(pieces: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """pieces (ranks, numbers of one padded shard)."""
    return pieces.reshape(-1, *parameter.shape[1:])[: parameter.shape[0]]


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
