"""Skipped optimizer steps, whose gradient is not finite: their rows are kept for inspection, and too many
in a row end the run.

In: whether a step was skipped, and its rows. Out: a file for each rank and skipped step, `read_skipped` to
open it, or GuardStop. All ranks see the same gradient norm, so all count the same. How many were skipped in a
row is saved with a checkpoint.

    skipped/step_12_actor_1_rank_0.safetensors   training step 12, the actor's optimizer step 1, rank 0's rows

Left out on purpose: the skipping itself, which leaves weights and optimizer as they were (`engine/`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hydraflow.errors import GuardStop
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.stored import read_batch, write_batch

logger = logging.getLogger(__name__)

MOST_FILES = 32
"""Per process: a run that recovers again and again must not fill the disk."""


@dataclass(frozen=True)
class SkipLimits:
    """When to stop the run, and where to write the rows."""

    in_a_row: int = 3
    """Consecutive skipped optimizer steps of one model that end the run."""
    folder: str | None = None
    """None: rows are not kept."""


class SkipGuard:
    """Counts one model's skipped steps; `role` names it."""

    def __init__(self, limits: SkipLimits, role: str, rank: int):
        self._limits, self._role, self._rank = limits, role, rank
        self.in_a_row = 0
        """Skipped optimizer steps since the last successful one."""
        self._files = 0

    def note(
        self, rows: DataProto, *, skipped: bool, step: int, number: int, facts: Mapping[str, float]
    ) -> None:
        """Counts optimizer step `number` of training step `step`. If it was skipped, writes its rows and
        `facts`, and raises GuardStop at the limit."""
        if not skipped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        logger.warning(
            "step %d: optimizer step %d of the %s is skipped: its gradient is not finite",
            step,
            number,
            self._role,
        )
        self._keep(rows, step, number, facts)
        if self.in_a_row >= self._limits.in_a_row:
            raise GuardStop(
                f"the gradient of the {self._role} was not finite in {self.in_a_row} optimizer steps in a"
                f" row, the last one in step {step} (trainer.max_skipped_steps={self._limits.in_a_row}). The"
                f" weights are as they were before. The rows are in {self._limits.folder}. Usual causes: a"
                " learning rate that is too high, 16-bit types, a reward or a loss that is not a number."
            )

    def _keep(self, rows: DataProto, step: int, number: int, facts: Mapping[str, float]) -> None:
        if self._limits.folder is None or self._files >= MOST_FILES or not len(rows):
            return
        path = Path(self._limits.folder) / f"step_{step}_{self._role}_{number}_rank_{self._rank}.safetensors"
        self._files += 1
        tensors = [name for name, column in rows.items() if isinstance(column, torch.Tensor)]
        about = {"step": step, "role": self._role, "optimizer_step": number, "rank": self._rank, **facts}
        try:
            write_batch(path, rows.select(tensors, []), about)
        except OSError as error:
            logger.warning("the rows of a skipped step cannot be written: %s", error)


def read_skipped(path: Path) -> tuple[DataProto, dict[str, Any]]:
    """The rows and the facts of a file in `skipped/`: step, role, optimizer_step, rank, grad_norm, and the
    role's metrics on this rank."""
    return read_batch(path)
