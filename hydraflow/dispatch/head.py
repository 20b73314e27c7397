"""Ray's head process (its control service): whether it still answers, and shutting down without it.

In: its address, and whether the process of a local one has ended. Out: HeadLost soon after it has gone.
Without this a run would continue until its next request to the service, and a minute later Ray would exit the
controller with code 1 and leave all other processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import ray

from hydraflow.dispatch.processes import end_processes, own_ray_processes
from hydraflow.dispatch.template import end_template, stop_forking
from hydraflow.errors import EnvironmentFault
from hydraflow.system.network import unreachable

PERIOD = 2.0
"""Seconds between two checks; one costs a fraction of a millisecond."""
PATIENCE = 8.0
"""Seconds without an answer after which the service counts as gone."""
RESUME = "Start the same command again to resume from the last checkpoint."
"""The remedy when a part of Ray has ended."""


class HeadLost(EnvironmentFault):
    """Ray's control service is gone; its workers will follow."""


class RayHead:
    """The control service of the cluster that this process has joined."""

    def __init__(self, address: str, fault: Callable[[], EnvironmentFault | None] | None = None):
        """fault: of a local cluster, the error for a process of it that has ended, if one has."""
        self.address, self._fault = address, fault
        self.is_gone = False
        self._next = time.monotonic() + PERIOD
        self._silent_since: float | None = None

    def look(self) -> None:
        """Raises HeadLost when the service's process has ended, or has been silent for PATIENCE seconds; does
        nothing most of the time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PERIOD
        if self._fault is not None and (ended := self._fault()):
            self.is_gone = True
            raise HeadLost(str(ended))
        if not unreachable(self.address, 1.0):
            self._silent_since = None
            return
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since > PATIENCE:
            self.is_gone = True
            silence = f"has not answered for {now - self._silent_since:.0f} seconds"
            why = f"it was killed, or its machine is gone. {RESUME}"
            raise HeadLost(f"Ray's control service (gcs_server) at {self.address} {silence}: {why}")


def end_without_head() -> None:
    """Disconnects from Ray and ends the processes that this one started; left alone, workers would look for
    the head for a minute."""
    stop_forking()
    end_processes(own_ray_processes(), grace=0.0)
    end_template()
    ray.shutdown()
