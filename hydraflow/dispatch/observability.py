"""Observability settings of a run's processes: log files, spans for the timeline, folders for stacks and
profiles, the debugger.

In: the run folder and its settings. Out: an `Observability`, passed to every process of the run. Without a
run folder (`main_generate`) processes write to Ray's own files, and stacks go to a folder for temporary
files.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hydraflow.dispatch.config import LogConfig, ProfilerConfig
from hydraflow.system.paths import expanded
from hydraflow.system.role_logs import CONTROLLER, LogSettings, RoleLogs, apply_level


@dataclass(frozen=True)
class Observability:
    """Passed to every process; everything is off by default."""

    logs: LogSettings | None = None
    """Log files; None: the process keeps its own stdout and stderr."""
    stacks: str | None = None
    """Folder for the stacks of all processes when a deadline passes; None: the temporary folder."""
    profiler: ProfilerConfig | None = None
    profiles: str = "profile"
    """Folder for profiles."""
    traced: bool = False
    """Whether methods record spans."""
    debug: bool = False
    """Whether Ray's debugger is on."""

    def open_logs(self, rank: int, role: str) -> RoleLogs | None:
        """Redirects everything that this process writes to its log files. Logs a warning if they cannot be
        created."""
        if self.logs is None or (logs := open_role_logs(self.logs, rank, role)) is None:
            return None
        # Ray's debugger prints its address to file descriptor 2, which must still lead to the console
        logs.capture(below_python=not self.debug)
        logging.getLogger().handlers = [logs]
        apply_level(self.logs.log.level)
        return logs

    def stacks_folder(self) -> Path:
        """The folder for stacks, created."""
        folder = Path(self.stacks or tempfile.mkdtemp(prefix="hydraflow-stacks-"))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def environment(self) -> dict[str, str]:
        """Environment variables of worker processes."""
        return {"RAY_DEBUG": debugger()} if self.debug else {}


def observability_of(run: Path, log: LogConfig, profiler: ProfilerConfig, *, debug: bool) -> Observability:
    """The observability settings of a run with that folder."""
    profiles = expanded(profiler.save_path).resolve() if profiler.save_path else run / "profile"
    return Observability(log_settings(run, log), str(run / "stacks"), profiler, str(profiles), debug=debug)


def log_settings(run: Path, log: LogConfig) -> LogSettings:
    """The log settings of a run's processes."""
    return LogSettings(str(run / "logs"), log)


def open_role_logs(settings: LogSettings, rank: int, role: str) -> RoleLogs | None:
    """A process's log files; None, with a warning, if they cannot be created: a run can do without."""
    try:
        return RoleLogs(settings, rank, role)
    except OSError as error:
        logging.getLogger(__name__).warning("no log files in %s: %s", settings.folder, error)
        return None


@contextmanager
def controller_log(run: Path, log: LogConfig) -> Iterator[RoleLogs | None]:
    """Within the block the controller also logs to its file in the run folder; None: there is none."""
    logs = open_role_logs(log_settings(run, log), 0, CONTROLLER)
    if logs is None:
        yield None
        return
    logging.getLogger().addHandler(logs)
    try:
        yield logs
    finally:
        logging.getLogger().removeHandler(logs)
        logs.close()


def of_role(logs: RoleLogs | None, role: str) -> AbstractContextManager[None]:
    """Attributes log lines written in its body to this role."""
    return nullcontext() if logs is None else logs.of(role)


def debugger() -> str:
    """The value of RAY_DEBUG for the available debugger: the one for editors if debugpy is installed, else
    `ray debug`."""
    return os.environ.get("RAY_DEBUG") or ("1" if find_spec("debugpy") else "legacy")
