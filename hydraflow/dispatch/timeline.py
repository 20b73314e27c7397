"""The timeline of a run: a Chrome trace that shows where each step's time went, for ui.perfetto.dev and
chrome://tracing.

In: phases of the controller, spans of every role and rank, and Ray's own task events. Out: one JSON file with
a process per role, a thread per rank, and Ray's workers below them. Within a step the time between two phases
is a span of its own (`dispatch`), so that the spans of a step add up to its length. Left out on purpose:
recording spans (`spans.py`), and when the file is written (`runtime.py`).
"""

from __future__ import annotations

import json
import logging
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray

from hydraflow.dispatch.spans import MOST_SPANS, Span
from hydraflow.errors import first_line
from hydraflow.system.paths import expanded
from hydraflow.system.role_logs import CONTROLLER
from hydraflow.system.whole_files import replacing

log = logging.getLogger(__name__)

TIMELINE = "ray_init.timeline_file"
STEP, REST = "step", "dispatch"
"""Names of the span of a step, and of the time in it that belongs to no phase."""
RAY_SECONDS = 15.0
"""Seconds for Ray to return its events."""
SLACK = 1e-6
"""Seconds by which a span may extend beyond its parent: rounding to microseconds."""
Event = dict[str, Any]
"""One entry of a Chrome trace."""


class Timeline:
    """Collects spans and writes them. Keeps the newest `MOST_SPANS`; without a file it keeps none."""

    def __init__(self, path: str | None = None):
        self.path = expanded(path) if path else None
        self._rows: deque[tuple[str, int, Span]] = deque(maxlen=MOST_SPANS)
        self._dropped = 0

    @property
    def wanted(self) -> bool:
        """Whether there will be a file."""
        return self.path is not None

    def note(self, role: str, rank: int, spans: Iterable[Span]) -> None:
        """Records spans of one rank of a role."""
        for span in spans if self.wanted else ():
            self._dropped += len(self._rows) == MOST_SPANS
            self._rows.append((span.role or role, rank, span))

    def write(self, ray_events: Sequence[Event], workers: Mapping[str, str]) -> None:
        """Writes the file, completely or not at all; logs a warning when it cannot. `workers`: Ray's worker
        id -> readable name."""
        if self.path is None:
            return
        trace = {
            "traceEvents": [*_our_events(self._rows), *_rays_events(ray_events, workers)],
            "displayTimeUnit": "ms",
            "otherData": {"program": "hydraflow", "spans_dropped": self._dropped},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as unfinished:
                unfinished.write_text(json.dumps(trace))
        except OSError as error:
            log.warning("the timeline cannot be written to %s: %s", self.path, error)
        else:
            log.info("timeline: %s (open it in ui.perfetto.dev)", self.path)


def _our_events(rows: Iterable[tuple[str, int, Span]]) -> Iterator[Event]:
    """Roles as processes, the controller first, then in the order in which they first did something."""
    by_role: dict[str, dict[int, list[Span]]] = {}
    for role, rank, span in rows:
        by_role.setdefault(role, {}).setdefault(rank, []).append(span)
    first = {
        role: min(span.start for spans in ranks.values() for span in spans) for role, ranks in by_role.items()
    }
    for pid, role in enumerate(sorted(by_role, key=lambda role: (role != CONTROLLER, first[role])), 1):
        yield from _named(pid, role, sort=pid)
        for rank, spans in sorted(by_role[role].items()):
            yield _metadata("thread_name", pid, rank, name=f"rank {rank}")
            spans += _gaps(spans)
            yield from (_complete(span, role, pid, rank) for span in sorted(spans, key=_outermost_first))


def _outermost_first(span: Span) -> tuple[float, float]:
    return span.start, -span.seconds


def _gaps(spans: Sequence[Span]) -> list[Span]:
    """The time of each step between its phases."""
    found = []
    in_order = sorted((span for span in spans if span.name != STEP), key=_outermost_first)
    starts = [span.start for span in in_order]
    for step in (span for span in spans if span.name == STEP):
        at, end = step.start, step.start + step.seconds
        for span in in_order[bisect_left(starts, at) : bisect_right(starts, end)]:
            if span.start + span.seconds > end + SLACK:
                continue
            if span.start > at:
                found.append(Span(REST, at, span.start - at, step.step))
            at = max(at, span.start + span.seconds)
        if end > at:
            found.append(Span(REST, at, end - at, step.step))
    return found


def _complete(span: Span, role: str, pid: int, rank: int) -> Event:
    name = f"{STEP} {span.step}" if span.name == STEP and span.step is not None else span.name
    args = {} if span.step is None else {"step": span.step}
    return {
        "name": name,
        "cat": role,
        "ph": "X",
        "ts": span.start * 1e6,
        "dur": span.seconds * 1e6,
        "pid": pid,
        "tid": rank,
        "args": args,
    }


def _metadata(kind: str, pid: int, tid: int, **args: object) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _named(pid: int, name: str, *, sort: int) -> Iterator[Event]:
    yield _metadata("process_name", pid, 0, name=name)
    yield _metadata("process_sort_index", pid, 0, sort_index=sort)


# --- Ray's --------------------------------------------------

RAY_PIDS = 10_000
"""Number of the first of Ray's processes in the trace, above all of ours."""
LANES = 1000
"""Thread ids reserved for each of Ray's workers."""


def _rays_events(events: Sequence[Event], workers: Mapping[str, str]) -> Iterator[Event]:
    """Ray's events with numbers in place of its names for processes and threads, because viewers need
    numbers. Overlapping spans of one thread are spread over several."""
    for pid, (node, here) in enumerate(_grouped(events, "pid").items(), RAY_PIDS):
        yield from _named(pid, f"Ray on {node}", sort=pid)
        for tid, (worker, done) in enumerate(_grouped(here, "tid").items(), 1):
            name = workers.get(str(worker).partition(":")[2], str(worker)[:20])
            for lane, inside in enumerate(_lanes(done)):
                number = tid * LANES + lane
                yield _metadata("thread_name", pid, number, name=name if not lane else f"{name} ({lane + 1})")
                for event in inside:
                    yield {**event, "dur": max(0.0, event["dur"]), "pid": pid, "tid": number}


def _grouped(events: Iterable[Event], key: str) -> dict[object, list[Event]]:
    found: dict[object, list[Event]] = {}
    for event in events:
        found.setdefault(event[key], []).append(event)
    return found


def _lanes(events: Sequence[Event]) -> list[list[Event]]:
    """Packs events into rows, first fit: two events of a row are nested or disjoint.

    >>> lanes = _lanes([{"ts": 0, "dur": 5}, {"ts": 1, "dur": 2}, {"ts": 4, "dur": 3}])
    >>> [[event["ts"] for event in lane] for lane in lanes]
    [[0, 1], [4]]
    """
    lanes: list[list[Event]] = []
    open_ends: list[list[float]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            if not ends or end <= ends[-1]:
                lane.append(event)
                ends.append(end)
                break
        else:
            lanes.append([event])
            open_ends.append([end])
    return lanes


def ray_events() -> list[Event]:
    """Ray's events of all nodes; none, with a warning, when they do not arrive in time. Takes a second: Ray
    waits for late ones."""
    found: list[Event] = []
    chatty = logging.getLogger("ray._private.state")
    level = chatty.level

    def ask() -> None:
        try:
            found.extend(ray.timeline())
        except (ray.exceptions.RayError, RuntimeError, OSError) as error:
            log.warning("Ray's own events are missing in the timeline: %s", first_line(error))

    chatty.setLevel(logging.ERROR)  # silences a notice about how later versions will return the events
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(RAY_SECONDS)
    chatty.setLevel(level)
    if asking.is_alive():
        log.warning("Ray's own events are missing in the timeline: no answer in %g seconds", RAY_SECONDS)
        return []
    return found
