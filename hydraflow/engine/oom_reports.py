"""Exchanges reports of micro-batches that were too large for a rank.

In: this rank's micro-batch, if it was too large. Out: the reports of all ranks. Left out on purpose: getting
all ranks to this collective (`fsdp/oom_recovery.py`, `megatron/oom_recovery.py`).
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from hydraflow.engine import process_group
from hydraflow.engine.base import OomReport
from hydraflow.models.packing import row_tokens
from hydraflow.protocol.batch import DataProto

logger = logging.getLogger(__name__)


def note_out_of_memory(data: DataProto, error: BaseException) -> None:
    """Logs the micro-batch that did not fit on this rank."""
    tokens = int(row_tokens(data).sum())
    logger.warning("out of memory in a micro-batch of %d rows, %d tokens: %s", len(data), tokens, error)


def reports_of(too_large: DataProto | None) -> list[OomReport]:
    """The reports of all ranks, the same on each. Collective. too_large: the rows on which this rank ran out
    of memory; None: it did not."""
    facts = torch.zeros(dist.get_world_size(), 2)
    if too_large is not None:
        facts[dist.get_rank()] = torch.tensor([len(too_large), int(row_tokens(too_large).sum())])
    found = process_group.all_reduce(facts).long().tolist()
    return [OomReport(rank, rows, tokens) for rank, (rows, tokens) in enumerate(found) if rows]
