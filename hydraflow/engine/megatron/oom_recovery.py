"""Ends a call on all ranks alike when one of them runs out of memory.

This works for ranks that exchange nothing between the first pass of a call and the gradient reduction: those
of an undivided model, whose optimizer state may be sharded. The rank that ran out reports it in a collective
before the reduction. Ranks that divide a model exchange activations in every layer, which cannot be replaced:
there the error ends the run.

In: the passes of a call. Out: their results, or OutOfMemory on every rank. Left out on purpose: which
micro-batches are tried next (`engine/micro_batcher.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from hydraflow.device import ran_out_of_memory
from hydraflow.engine.base import OutOfMemory
from hydraflow.engine.megatron.parallel import Place
from hydraflow.engine.oom_reports import note_out_of_memory, reports_of
from hydraflow.protocol.batch import DataProto

Result = TypeVar("Result")


class OomRecovery:
    """The out-of-memory recovery of one engine."""

    def __init__(self, place: Place):
        sizes = (
            place.tensor_size,
            place.context_size,
            place.stages,
            place.expert_size,
            place.expert_tensor_size,
        )
        self._is_whole = max(sizes) == 1
        self.computes: DataProto | None = None
        """The micro-batch that this rank is computing."""

    def run(self, passes: Callable[[], Result]) -> Result:
        """The passes of a call, in which `agree` is called once."""
        try:
            return passes()
        except (RuntimeError, MemoryError) as error:
            if not (self._is_whole and self.computes is not None and ran_out_of_memory(error)):
                raise
            note_out_of_memory(self.computes, error)
        gc.collect()  # the error's frames keep the pass's tensors alive
        self.agree(self.computes)
        raise AssertionError("agree raises: this rank has just reported")

    def agree(self, too_large: DataProto | None = None) -> None:
        """Raises OutOfMemory on every rank when one of them had no memory for a micro-batch."""
        if self._is_whole and (reports := reports_of(too_large)):
            raise OutOfMemory(reports)
