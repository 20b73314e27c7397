"""Profiles of one process over one training step: operators and allocations with torch, or a range for Nsight
Systems.

In: the tool and a folder. Out: files there, named by roles and rank. torch: a Chrome trace and a table of
operators; torch_memory: the same with allocations, on a GPU a snapshot for pytorch.org/memory_viz; nsys: the
range of the report that Nsight Systems writes. Left out on purpose: which steps and ranks are profiled
(`profiler.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import profiler

from hydraflow.device import begin_range, end_range, keep_allocations, write_allocations

MEMORY, NSYS = "torch_memory", "nsys"
"""Values of global_profiler.tool besides torch."""
ROWS = 40
"""Number of operators in the table."""
ALLOCATIONS = 100_000
"""Number of allocations to record."""


@dataclass
class Profile:
    """One process's profile; `start` and `stop` are called in it."""

    tool: str
    folder: str
    """Folder of the step."""
    name: str
    """Roles in the process."""
    _torch: Any = None
    _device: str = "cpu"

    def start(self, device_type: str) -> None:
        """Starts recording."""
        self._device = device_type
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        if self.tool == NSYS:
            begin_range(device_type)
            return
        if self.tool == MEMORY:
            keep_allocations(device_type, ALLOCATIONS)
        self._torch = profiler.profile(profile_memory=self.tool == MEMORY, record_shapes=self.tool == MEMORY)
        self._torch.start()

    def stop(self, rank: int) -> None:
        """Stops recording and writes the files."""
        if self.tool == NSYS:
            end_range(self._device)
            return
        self._torch.stop()
        stem = Path(self.folder) / f"{self.name}-{rank}"
        self._torch.export_chrome_trace(f"{stem}.json")
        device = "cpu" if self._device == "cpu" else "device"
        amount = "memory_usage" if self.tool == MEMORY else "time_total"
        table = self._torch.key_averages().table(sort_by=f"self_{device}_{amount}", row_limit=ROWS)
        Path(f"{stem}.txt").write_text(table)
        if self.tool == MEMORY:
            write_allocations(self._device, f"{stem}.pickle")
        self._torch = None
