"""The timeline as a file: what viewers need of it, gaps that are filled, Ray's events in rows that nest."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import ray
from dispatch import trace_format
from dispatch.probes import Probe
from hypothesis import given
from hypothesis import strategies as st

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.spans import Span
from hydraflow.dispatch.timeline import Timeline, _lanes
from hydraflow.dispatch.worker import RoleSpec


def written(timeline: Timeline, ray: list[dict] | None = None) -> dict:
    timeline.write(ray or [], {"w1": "actor rank 0"})
    assert timeline.path is not None
    trace = json.loads(timeline.path.read_text())
    trace_format.check(trace)
    return trace


def test_the_spans_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    timeline = Timeline(str(tmp_path / "new" / "t.json"))
    phases = [
        Span("gen", 100.25, 0.5, 3),
        Span("update_actor", 101.0, 0.75, 3),
        Span("step", 100.0, 2.0, 3),
        Span("testing", 102.5, 1.0),
    ]
    timeline.note("controller", 0, phases)
    trace = written(timeline)
    shown = [
        (event["name"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in trace_format.spans(trace, "controller")
    ]
    assert shown == [
        ("step 3", 100.0, 2.0),
        ("dispatch", 100.0, 0.25),
        ("gen", 100.25, 0.5),
        ("dispatch", 100.75, 0.25),
        ("update_actor", 101.0, 0.75),
        ("dispatch", 101.75, 0.25),
        ("testing", 102.5, 1.0),
    ]
    assert sum(seconds for name, _, seconds in shown if name in ("dispatch", "gen", "update_actor")) == 2.0


@pytest.mark.slow
def test_a_long_run_is_written_at_once(tmp_path: Path) -> None:
    """As many spans as are kept, of steps and of ranks: the end of a run that was asked to stop has seconds,
    not minutes."""
    timeline = Timeline(str(tmp_path / "t.json"))
    phases = [f"phase {number}" for number in range(9)]
    for step in range(15_000):
        begin = 10.0 * step
        timeline.note(
            "controller",
            0,
            [
                *(Span(name, begin + k, 0.5, step) for k, name in enumerate(phases)),
                Span("step", begin, 10.0, step),
            ],
        )
    for rank in range(150):
        timeline.note("actor", rank, [Span("update", float(number), 0.5) for number in range(1000)])
    began = time.monotonic()
    timeline.write([], {})
    assert time.monotonic() - began < 60
    assert timeline.path is not None
    events = json.loads(timeline.path.read_text())["traceEvents"]
    assert sum(event["name"] == "dispatch" for event in events) == 15_000 * 9
    assert sum(event["name"] == "update" for event in events) == 150_000


def test_roles_are_processes_and_ranks_are_threads(tmp_path: Path) -> None:
    timeline = Timeline(str(tmp_path / "t.json"))
    timeline.note("actor", 1, [Span("update", 5.0, 1.0)])
    timeline.note("actor", 0, [Span("update", 5.0, 2.0), Span("start", 1.0, 1.0, role="rollout")])
    timeline.note("controller", 0, [Span("step", 4.0, 4.0, 1)])
    trace = written(timeline)
    assert list(trace_format.processes(trace)) == ["controller", "rollout", "actor"], (
        "the controller first, then as they began"
    )
    assert [event["dur"] for event in trace_format.spans(trace, "actor", 1)] == [1e6]
    assert trace["otherData"]["spans_dropped"] == 0


def test_rays_events_get_numbers_names_and_rows_that_nest(tmp_path: Path) -> None:
    timeline = Timeline(str(tmp_path / "t.json"))
    common = {"cat": "task", "pid": "10.0.0.1", "ph": "X", "args": {}}
    rows = [("a", "w1", 0.0, 10.0), ("b", "w1", 8.0, 10.0), ("c", "w2", 1.0, -0.1)]
    events = [
        {**common, "name": name, "tid": f"worker:{worker}", "ts": ts, "dur": dur}
        for name, worker, ts, dur in rows
    ]
    trace = written(timeline, events)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["actor rank 0", "actor rank 0 (2)", "worker:w2"]
    assert list(trace_format.processes(trace)) == ["Ray on 10.0.0.1"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_lanes_nest_whatever_overlaps(times: list[tuple[int, int]]) -> None:
    lanes = _lanes([{"ts": begin, "dur": length} for begin, length in times])
    assert sum(map(len, lanes)) == len(times)
    for lane in lanes:
        for i, event in enumerate(lane):
            for other in lane[i + 1 :]:
                apart = other["ts"] >= event["ts"] + event["dur"]
                assert apart or other["ts"] + other["dur"] <= event["ts"] + event["dur"]


def test_only_the_newest_spans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydraflow.dispatch.timeline.MOST_SPANS", 3)
    timeline = Timeline(str(tmp_path / "t.json"))
    timeline.note("actor", 0, [Span(str(number), float(number), 0.5) for number in range(5)])
    trace = written(timeline)
    assert [event["name"] for event in trace_format.spans(trace, "actor")] == ["2", "3", "4"]
    assert trace["otherData"]["spans_dropped"] == 2


def test_without_a_file_nothing_is_kept() -> None:
    timeline = Timeline()
    timeline.note("actor", 0, [Span("update", 0.0, 1.0)])
    timeline.write([], {})
    assert not timeline.wanted and not timeline._rows


def test_real_workers_and_real_ray(tmp_path: Path, ray_session: None) -> None:
    file = tmp_path / "t.json"
    with Runtime(RayInitConfig(timeline_file=str(file)), Timeouts(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("pool", [2], cpus=0.25)])
        role = runtime.group("pool", {"probe": RoleSpec(Probe), "other": RoleSpec(Probe, (7,))}).role("probe")
        runtime.await_ready()
        role.call(Probe.nothing)
    trace = json.loads(file.read_text())
    trace_format.check(trace)
    for rank in (0, 1):
        assert [event["name"] for event in trace_format.spans(trace, "probe", rank)] == [
            "start",
            "read",
            "nothing",
            "write",
        ]
        assert [event["name"] for event in trace_format.spans(trace, "other", rank)] == ["start"]
    assert [event["name"] for event in trace_format.spans(trace, "controller")] == ["start workers"]
    tasks = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] >= 10_000}
    assert "invoke" in tasks, "Ray's own events are there"
    rows = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"probe+other rank 0", "probe+other rank 1"} <= rows, "under the names of our roles"


def test_without_a_file_ray_keeps_no_event_of_a_call(ray_session: None) -> None:
    with Runtime(RayInitConfig(), Timeouts(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("pool", [1])])
        probe = runtime.group("pool", {"probe": RoleSpec(Probe)}).role("probe")
        runtime.await_ready()
        probe.call(Probe.nothing)
        mine = probe.group.processes[0].worker_id
        time.sleep(2.5)  # Ray's processes report once a second
        found = [event for event in ray.timeline() if mine in str(event.get("tid", ""))]
    assert found == []
