"""Signals that ask a run to save and end: SIGTERM, and SIGUSR1, which Slurm sends ahead of a time limit if asked to.

In: a signal to this process. Out: its name, which the loop looks at between steps. SIGINT is not among them: it ends at once.
Left out on purpose: signals to worker processes. Whoever signals a whole job kills its workers; the checkpoint before it counts then.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

WATCHED = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers the first signal that comes inside its block. Elsewhere than in the main thread it hears none."""

    def __init__(self) -> None:
        self.received = ""
        """Name of the signal; empty while none has come."""
        self.terminated_at: float | None = None
        """time.monotonic() of the first SIGTERM."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in WATCHED}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received = signal.Signals(number).name
            logger.warning("%s: saves after this step, then ends", self.received)
        if number == signal.SIGTERM and self.terminated_at is None:
            self.terminated_at = time.monotonic()
