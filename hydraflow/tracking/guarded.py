"""Keeps a tracker's faults and waits away from training: one warning, and the run goes on.

In: what opens a tracker. Out: a Tracker whose calls return at once and never raise; the calls themselves are
made in a thread, one after the other. What fails is tried again; what fails for good is counted and left out,
and metrics.jsonl has it all the same.

    training:  log(1)  log(2)  log(3)                     close()
    thread:      open    log(1)  log(2): fails, again, ok   log(3)  close

Left out on purpose: the file tracker, which must not miss a step and says so itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from hydraflow.redact import public_text
from hydraflow.tracking.base import RunInfo, Sample, Tracker, TrackerFactory

PAUSES = (1.0, 10.0)
"""Seconds before the second and the third try of a call."""
HELD_CALLS = 2000
"""Calls that wait for a slow tracker; more are left out."""
FLUSH_SECONDS = 5.0
"""What a checkpoint waits for a tracker; not again until that one has caught up."""
CLOSE_SECONDS = 30.0
"""What the end of a run waits for its trackers, all together: batch systems give a run that they stop a
minute or two."""

logger = logging.getLogger(__name__)
Call = Callable[[Tracker], None]


class Background:
    """A tracker in a thread of its own. `name`: for the warning. Used for all that talk to a server or write
    elaborate files."""

    def __init__(
        self,
        name: str,
        factory: TrackerFactory,
        run: RunInfo,
        *,
        pauses: Sequence[float] = PAUSES,
        flush_seconds: float = FLUSH_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ):
        self.name, self._factory, self._run, self._pauses = name, factory, run, tuple(pauses)
        self._flush_seconds, self._close_seconds = flush_seconds, close_seconds
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._ending = threading.Event()
        self._last_moment = 0.0
        self._flushed = threading.Event()
        self._flushed.set()
        self._failing = False
        """The last call failed for good: others are tried once."""
        self._lost = 0
        self._warned = False
        self._tracker: Tracker | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Has the tracker take the numbers."""
        kept = dict(metrics)
        self._hand_over(lambda tracker: tracker.log(kept, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Has the tracker take the samples."""
        kept = list(samples)
        self._hand_over(lambda tracker: tracker.log_samples(kept, step))

    def flush(self) -> None:
        """Waits until the tracker has taken and written everything, `flush_seconds` at most; not for one that
        fails or lags."""
        if self._failing or not self._flushed.is_set() or not self._thread.is_alive():
            return
        self._flushed = done = threading.Event()
        self._calls.put(lambda tracker: tracker.flush())
        self._calls.put(lambda tracker: done.set())
        done.wait(self._flush_seconds)

    def begin_closing(self, *, failed: bool = False) -> None:
        """Tells the tracker to end once it has taken what is held; the wait of `close` counts from here."""
        self._calls.put(lambda tracker: tracker.close(failed=failed))
        self._calls.put(None)
        self._ending.set()
        self._last_moment = time.monotonic() + self._close_seconds

    def close(self, *, failed: bool = False) -> None:
        """Waits for what is under way, `close_seconds` at most, and says what did not get there."""
        if not self._ending.is_set():
            self.begin_closing(failed=failed)
        self._thread.join(max(0.0, self._last_moment - time.monotonic()))
        if self._thread.is_alive():
            text = (
                "%s: waited %g seconds for it to take what was logged, and gave up; metrics.jsonl has"
                " everything"
            )
            logger.warning(text, self.name, self._close_seconds)
        elif self._lost:
            text = "%s: %d %s did not get there in all; metrics.jsonl has everything"
            logger.warning(text, self.name, self._lost, "call" if self._lost == 1 else "calls")

    def _hand_over(self, call: Call) -> None:
        if self._calls.qsize() >= HELD_CALLS:
            self._lose(f"it is too slow: {HELD_CALLS} calls wait")
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
        """Whether the call worked, the first time or after a pause. Libraries raise whatever they like, and
        none may end a run."""
        for pause in () if self._failing else self._pauses:
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
        except (
            BaseException
        ) as error:  # SystemExit, too: it would end this thread, and no one would hear of it
            return public_text(f"{type(error).__name__}: {error}".splitlines()[0][:300])
        return None

    def _lose(self, why: str) -> None:
        self._lost += 1
        if not self._warned:
            self._warned = True
            did = "could not be opened" if self._tracker is None else "does not take what is logged"
            logger.warning(
                "tracker %s %s (%s); training goes on, and metrics.jsonl has everything", self.name, did, why
            )


class Forgiving:
    """A tracker that must draw in the calling thread: a terminal that is gone, or a full disk behind stdout,
    costs one warning."""

    def __init__(self, name: str, tracker: Tracker):
        self.name, self.tracker = name, tracker
        self._warned_at: float | None = None

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Has the tracker take the numbers."""
        self._tried(lambda: self.tracker.log(metrics, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Has the tracker take the samples."""
        self._tried(lambda: self.tracker.log_samples(samples, step))

    def flush(self) -> None:
        """As the tracker."""
        self._tried(self.tracker.flush)

    def close(self, *, failed: bool = False) -> None:
        """As the tracker."""
        self._tried(lambda: self.tracker.close(failed=failed))

    def _tried(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (
            Exception
        ) as error:  # a full disk, a stream that somebody closed, whatever the library makes of it
            if self._warned_at is None:
                self._warned_at = time.monotonic()
                logger.warning("%s: %s; training goes on, and metrics.jsonl has everything", self.name, error)
