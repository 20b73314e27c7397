"""Ends a call on all ranks alike when one of them runs out of memory.

This works for ranks that exchange nothing between the first pass of a call and the gradient reduction: those
of an undivided model, whose optimizer state may be sharded. The rank that ran out reports it in a collective
before the reduction. Ranks that divide a model exchange activations in every layer, and a rank that ran out
has none to send: there the error ends the run.

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
        self._is_undivided = max(sizes) == 1
        self.current: DataProto | None = None
        """The micro-batch that this rank is computing; None after `agree`."""

    def run(self, passes: Callable[[], Result]) -> Result:
        """Runs the passes of a call, which must call `agree` once."""
        try:
            return passes()
        except (RuntimeError, MemoryError) as error:
            if not (self._is_undivided and self.current is not None and ran_out_of_memory(error)):
                raise
            note_out_of_memory(self.current, error)
        gc.collect()  # the error's frames keep the pass's tensors alive
        self.agree(self.current)
        raise AssertionError("agree raises: this rank has just reported")

    def agree(self, too_large: DataProto | None = None) -> None:
        """Raises OutOfMemory on every rank when any of them ran out of memory. Collective. too_large: the
        micro-batch on which this rank did."""
        self.current = None  # from now on the others reduce gradients, and would not hear a second report
        if self._is_undivided and (reports := reports_of(too_large)):
            raise OutOfMemory(reports)
