"""Profiles of one process over one training step: operators and allocations with torch, or a range for Nsight
Systems; and whether the requested profiler works on this machine.

In: `global_profiler`. Out: ConfigError before anything starts; files in the step's folder, named by roles and
rank. torch: a Chrome trace and a table of operators; torch_memory: the same with allocations, on a GPU a
snapshot for pytorch.org/memory_viz; nsys: the range of the report that Nsight Systems writes. Left out on
purpose: which steps are profiled (`runtime.py`).
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import profiler

from hydraflow.device import begin_range, end_range, keep_allocations, write_allocations
from hydraflow.dispatch.config import ProfilerConfig
from hydraflow.dispatch.observability import Observability
from hydraflow.errors import ConfigError
from hydraflow.system.paths import expanded
from hydraflow.system.whole_files import prove_writable

KEY = "global_profiler"
MEMORY, NSYS = "torch_memory", "nsys"
"""Values of global_profiler.tool other than torch."""
ROWS = 40
"""Number of operators in the table."""
ALLOCATIONS = 100_000
"""Number of allocations to record."""


def require_profiler(config: ProfilerConfig) -> None:
    """Raises ConfigError when the tool is not installed here or its folder is not writable."""
    if config.tool is None:
        return
    if config.tool == NSYS and shutil.which("nsys") is None:
        rule = "the program nsys is not found on PATH; every machine of the run needs NVIDIA Nsight Systems"
        raise ConfigError.one(f"{KEY}.tool", config.tool, rule, f"{KEY}.tool=torch")
    if config.tool == NSYS and Path(shutil.which("python") or "/").parent != Path(sys.executable).parent:
        first = "Ray starts profiled workers with the first `python` on PATH"
        rule = f"{first}, which is not that of {sys.prefix}"
        remedy = f"source {sys.prefix}/bin/activate or {KEY}.tool=torch"
        raise ConfigError.one(f"{KEY}.tool", config.tool, rule, remedy)
    if config.save_path is None:
        return
    try:
        prove_writable(expanded(config.save_path))
    except OSError as error:
        key, rule = f"{KEY}.save_path", f"the folder cannot be written ({error.strerror})"
        raise ConfigError.one(key, config.save_path, rule, f"{key}=<a folder you may write to>") from error


def nsight_options(
    observability: Observability, name: str, rank: int, device_type: str
) -> dict[str, str] | None:
    """Options of `nsys profile` for a process, as Ray's runtime_env takes them; None: not used.

    On a GPU it records each profiled step and writes a report for each; on a CPU it records the whole run.
    """
    asked = observability.profiler
    if asked is None or asked.tool != NSYS or not asked.steps:
        return None
    if asked.ranks is not None and rank not in asked.ranks:
        return None
    Path(observability.profiles).mkdir(parents=True, exist_ok=True)  # nsys does not create it
    options = {"o": f"{observability.profiles}/{name}-{rank}", "force-overwrite": "true"}
    if device_type == "cpu":
        return options | {"t": "osrt,nvtx"}
    ends = {
        "capture-range": "cudaProfilerApi",
        "capture-range-end": f"repeat-shutdown:{len(set(asked.steps))}",
        "kill": "none",  # the process runs on after its last report
    }
    return options | {"t": "cuda,nvtx,cublas,ucx"} | ends


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
