"""Isolates training from a tracker's faults and delays: one warning, and the run continues.

In: a tracker's constructor. Out: a Tracker whose calls return at once and never raise; the calls themselves
are made in a thread, one after the other. Failed calls are retried; those that keep failing are counted and
dropped, and metrics.jsonl still has everything.

    training:  log(1)  log(2)  log(3)                     close()
    thread:      open    log(1)  log(2): fails, again, ok   log(3)  close

Left out on purpose: the file tracker, which must not miss a step and reports its own errors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from hydraflow.redact import public_text
from hydraflow.tracking.base import Forwarder, RunInfo, Tracker, TrackerFactory

PAUSES = (1.0, 10.0)
"""Seconds before the second and the third attempt of a call."""
HELD_CALLS = 2000
"""Calls queued for a slow tracker; more are dropped."""
FLUSH_SECONDS = 5.0
"""Seconds that a checkpoint waits for a tracker. One that is still behind is not waited for again."""
CLOSE_SECONDS = 30.0
"""Seconds that the end of a run waits for all trackers together: batch systems give a run a minute or two
to stop."""

logger = logging.getLogger(__name__)
Call = Callable[[Tracker], None]


class BackgroundTracker(Forwarder):
    """A tracker in its own thread, for trackers that talk to a server or write elaborate files. `name` is
    for the log."""

    def __init__(self, name: str, factory: TrackerFactory, run: RunInfo):
        self.name, self._factory, self._run = name, factory, run
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._ending = threading.Event()
        self._deadline = 0.0
        self._flushed = threading.Event()
        self._flushed.set()
        self._failing = False
        """The last call failed permanently: later ones are tried once."""
        self._lost = 0
        self._warned = False
        self._tracker: Tracker | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Waits until the tracker has written everything, at most FLUSH_SECONDS; does not wait for one that
        fails or lags."""
        if self._failing or not self._flushed.is_set() or not self._thread.is_alive():
            return
        self._flushed = done = threading.Event()
        self._calls.put(lambda tracker: tracker.flush())
        self._calls.put(lambda tracker: done.set())
        done.wait(FLUSH_SECONDS)

    def begin_closing(self, *, failed: bool = False) -> None:
        """Asks the tracker to end once its queue is empty; the timeout of `close` counts from here."""
        self._calls.put(lambda tracker: tracker.close(failed=failed))
        self._calls.put(None)
        self._ending.set()
        self._deadline = time.monotonic() + CLOSE_SECONDS

    def close(self, *, failed: bool = False) -> None:
        """Waits for pending calls, at most CLOSE_SECONDS, and logs what was lost."""
        if not self._ending.is_set():
            self.begin_closing(failed=failed)
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            text = "%s: gave up after waiting %g seconds for pending calls"
            logger.warning(f"{text}; metrics.jsonl has everything", self.name, CLOSE_SECONDS)
        elif self._lost:
            text = "%s: %d %s were lost in total; metrics.jsonl has everything"
            logger.warning(text, self.name, self._lost, "call" if self._lost == 1 else "calls")

    def _pass(self, call: Call) -> None:
        if self._calls.qsize() >= HELD_CALLS:
            self._lose(f"too slow: {HELD_CALLS} calls are waiting")
        else:
            self._calls.put(call)

    # --- in the thread --------------------------------------------------

    def _work(self) -> None:
        opened = self._tried(self._open)
        while (call := self._calls.get()) is not None:
            if opened:
                self._tried(call)

    def _open(self, _: object) -> None:
        self._tracker = self._factory(self._run)

    def _tried(self, call: Callable[..., None]) -> bool:
        """Whether the call worked, at once or after a retry. Libraries may raise anything, and no error may
        end the run."""
        for pause in () if self._failing else PAUSES:
            if self._attempt(call) is None:
                return True
            if self._ending.wait(pause):
                break
        wrong = self._attempt(call)
        self._failing = wrong is not None
        if wrong is not None:
            self._lose(wrong)
        return wrong is None

    def _attempt(self, call: Callable[..., None]) -> str | None:
        try:
            call(self._tracker)
        except BaseException as error:  # SystemExit, too: it would silently end this thread
            return public_text(f"{type(error).__name__}: {error}".splitlines()[0][:300])
        return None

    def _lose(self, why: str) -> None:
        self._lost += 1
        if not self._warned:
            self._warned = True
            did = "could not be opened" if self._tracker is None else "lost a call"
            text = "tracker %s %s (%s); training continues; metrics.jsonl has everything"
            logger.warning(text, self.name, did, why)


class ForegroundTracker(Forwarder):
    """A tracker that must draw in the calling thread: a terminal that is gone, or a full disk behind stdout,
    costs one warning."""

    def __init__(self, name: str, tracker: Tracker):
        self.name, self.tracker = name, tracker
        self._warned = False

    def _pass(self, call: Call) -> None:
        try:
            call(self.tracker)
        except Exception as error:  # a full disk, a closed stream, or whatever the library raises for it
            if not self._warned:
                self._warned = True
                logger.warning("%s: %s; training continues; metrics.jsonl has everything", self.name, error)
