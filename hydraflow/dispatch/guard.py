"""Watches the two Ray processes that a local cluster cannot do without: its control service and its node
process.

In: this process's children. Out: the name of one that has ended. While Ray's client waits for it inside its
own code (up to a minute, after which it exits the process with code 1), this thread ends the command instead.
If the node process ends, the command is ended at once: Ray's client would exit with code 1 when it connects
to the node, or on its next access to the object store, even just to release a buffer.
Left out on purpose: clusters that were joined (`head.py` asks their control service), and workers
(`future.py`).
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress

import psutil

from hydraflow.dispatch.head import RESUME
from hydraflow.dispatch.processes import lives
from hydraflow.errors import EnvironmentFault
from hydraflow.system.interrupts import SHUTDOWN, end_at_once, kill_family
from hydraflow.system.node_folder import session_folder

VITAL = {"gcs_server": "control service", "raylet": "node process"}
PERIOD = 0.25
"""Seconds between two scans for new processes; an exit is noticed at once."""
START_PATIENCE = 3.0
"""Seconds for Ray's own code to report the end of the control service during start-up."""
PATIENCE = 30.0
"""Seconds for the run, once Ray is up, to start shutting down by itself: it reports dead workers first."""


class RayGuard:
    """A thread that runs from `watch` to `stop`."""

    def __init__(self) -> None:
        self._up = False
        """Whether Ray has started."""
        self._last_words = f"{_fault('raylet')}\n".encode(errors="replace")
        """What to print if the node process ends, ready before it does."""
        self._seen: dict[str, psutil.Process] = {}
        self._names: dict[int, str] = {}
        """Name of the process by its descriptor."""
        self._ends = select.poll()
        self._stopped = threading.Event()
        self._before = _children()

    def watch(self) -> None:
        """Starts the thread; call it before Ray starts."""
        threading.Thread(target=self._run, name="ray-guard", daemon=True).start()

    def started(self) -> None:
        """Ray is up: from now on the run can notice a failure itself."""
        self._up = True

    def stop(self) -> None:
        """Ends the thread; Ray may end after that."""
        self._stopped.set()

    def fault(self) -> EnvironmentFault | None:
        """The error for the process that has ended; None if both live."""
        for name, process in list(self._seen.items()):  # the thread may add one meanwhile
            if not lives(process):
                return _fault(name)
        return None

    def children(self) -> list[psutil.Process]:
        """Processes started since `watch`, with their descendants."""
        found = []
        for process in _children() - self._before:
            with suppress(psutil.NoSuchProcess):
                found += [process, *process.children(recursive=True)]
        return found

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            for descriptor in self._names:
                os.close(descriptor)

    def _watch(self) -> None:
        since: float | None = None
        while not self._stopped.is_set():
            for descriptor, _ in self._ends.poll(1000 * PERIOD):
                self._ends.unregister(descriptor)  # an ended process stays readable
                if self._names[descriptor] == "raylet":
                    self._end_without_node()
            self._find_vital()
            fault = self.fault()
            since = None if fault is None else since or time.monotonic()
            patience = PATIENCE if self._up else START_PATIENCE
            if fault is None or since is None or time.monotonic() - since < patience:
                continue
            if self._may_end():
                SHUTDOWN.message = str(fault)
                end_at_once(fault.exit_code, "Ray's client does not come back")
            return

    def _end_without_node(self) -> None:
        """Exits before Ray's client does. Once Ray is up nothing is killed here: that would take longer than
        the client needs, and the other processes of Ray and of the rewards end with their parent. Processes
        that are still starting may not, so before Ray is up they are killed first."""
        if self._may_end() and not SHUTDOWN.asked:  # asked: a signal may have gone to the whole run
            os.write(2, self._last_words)
            if not self._up:
                kill_family()
            os._exit(EnvironmentFault.exit_code)

    def _may_end(self) -> bool:
        return SHUTDOWN.commanded and SHUTDOWN.since is None and not self._stopped.is_set()

    def _find_vital(self) -> None:
        if len(self._seen) < len(VITAL):
            for process in _children() - self._before:
                with suppress(psutil.NoSuchProcess, ProcessLookupError):  # pidfd_open raises the second
                    if (name := process.name()) in VITAL and name not in self._seen:
                        descriptor = os.pidfd_open(process.pid)
                        self._seen[name], self._names[descriptor] = process, name
                        self._ends.register(descriptor, select.POLLIN)


def _fault(name: str) -> EnvironmentFault:
    text = f"Ray's {VITAL[name]} ({name}) has ended: it was killed, or it failed"
    logs = f"{session_folder()}/session_latest/logs"
    return EnvironmentFault(f"{text} ({logs}). {RESUME}")


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())
