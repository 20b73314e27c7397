"""What a Chrome trace must be for viewers to show it: the fields of the format's description, and spans that
nest."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

PHASES = {"X": {"name", "cat", "ts", "dur", "pid", "tid"}, "M": {"name", "pid", "tid", "args"}}
"""Kind of event -> fields that it must have."""


def check(trace: dict[str, Any]) -> None:
    """Asserts that a trace is well formed."""
    assert set(trace) >= {"traceEvents"} and trace.get("displayTimeUnit", "ms") in ("ms", "ns")
    named: set[int] = set()
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert set(event) >= PHASES[event["ph"]], event
        assert (
            isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        ), event
        if event["ph"] == "M":
            named |= {event["pid"]} if event["name"] == "process_name" else set()
            continue
        assert event["ts"] >= 0 and event["dur"] >= 0, event
        threads[event["pid"], event["tid"]].append(event)
    assert {pid for pid, _ in threads} <= named, "every process has a name"
    for events in threads.values():
        _check_nesting(events)


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """In the order of the file: sorted by begin, the outer one first; each is inside the one around it or
    after it."""
    ends: list[float] = []
    before = 0.0
    for event in events:
        assert event["ts"] >= before, "sorted by begin"
        before, end = event["ts"], event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 1.0:
            ends.pop()
        assert not ends or end <= ends[-1] + 1.0, (
            f"{event} reaches out of what is around it by {end - ends[-1]} us"
        )
        ends.append(end)


def processes(trace: dict[str, Any]) -> dict[str, int]:
    """Name of each process -> its number."""
    return {
        event["args"]["name"]: event["pid"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }


def spans(trace: dict[str, Any], process: str, thread: int = 0) -> list[dict[str, Any]]:
    """The spans of a thread of a process."""
    pid = processes(trace)[process]
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and (event["pid"], event["tid"]) == (pid, thread)
    ]
