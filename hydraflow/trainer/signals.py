"""Signals that ask a run to save and end: SIGTERM; SIGHUP, when its terminal is closed; and SIGUSR1, which
Slurm sends ahead of a time limit if asked to.

In: a signal to this process. Out: its name, which the loop checks between steps. A repeated SIGTERM does not
wait for the step, which may hang: it ends the run as Ctrl-C does (`system/interrupts.py`), with another exit
code. Left out on purpose: signals to worker processes. A signal to a whole job kills its workers; the run
then resumes from its last checkpoint.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

from hydraflow.system.interrupts import SHUTDOWN, TERMINATED

logger = logging.getLogger(__name__)

WATCHED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
REPEATED = 5.0
"""Seconds after which another SIGTERM counts as repeated. One request often arrives twice: timeout(1) signals
its child and then the group, and a batch script forwards what its step received. SIGUSR1 only warns, so a
SIGTERM after it counts as the first: a save may be running."""


class StopSignals:
    """Remembers the first signal that arrives inside its block. Catches none outside the main thread, where
    Python allows no handlers."""

    def __init__(self) -> None:
        self.received = ""
        """Name of the signal; empty until one arrives."""
        self.insisted = False
        """Whether SIGTERM was repeated."""
        self.terminated_at: float | None = None
        """time.monotonic() of the first SIGTERM."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in WATCHED}
            # ignored by nohup; an ignored SIGUSR1 is handled: a batch script ignores it until now
            if self._before[signal.SIGHUP] == signal.SIG_IGN:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        SHUTDOWN.asked = True
        if not self.received:
            self.received = signal.Signals(number).name
            text = "%s: saves after this step, then ends; a SIGTERM %g s or more after the first ends it now"
            logger.warning(text, self.received, REPEATED)
        if number != signal.SIGTERM:
            return
        now = time.monotonic()
        if self.terminated_at is None:
            self.terminated_at = now
        elif now - self.terminated_at >= REPEATED:
            self.insisted = True
            SHUTDOWN.interrupt(TERMINATED)
