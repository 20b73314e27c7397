"""Profiles of real workers: torch's, allocations, and the command that Nsight Systems would be started
with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from dispatch import programs
from dispatch.probes import Probe

from hydraflow.dispatch.config import LogConfig, ProfilerConfig, RayInitConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.local import LocalRuntime
from hydraflow.dispatch.observability import Observability, observability_of
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.profiler import nsight_options, require_profiler
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import ConfigError
from hydraflow.protocol.batch import DataProto


def watched(folder: Path, tool: str, **settings: object) -> Observability:
    return observability_of(
        folder, LogConfig(), ProfilerConfig(tool=tool, steps=[2], **settings), debug=False
    )  # type: ignore[arg-type]


def train(runtime: Runtime) -> None:
    """Three steps of one call each."""
    role = runtime.groups[0].role("probe")
    for step in (1, 2, 3):
        with runtime.profiled(step):
            role.call(Probe.double, DataProto.from_dict({"x": torch.arange(4)}), factor=step)


@pytest.mark.parametrize(
    ("ranks", "expected"), [([0], ["probe-0"]), ([1], ["probe-1"]), (None, ["probe-0", "probe-1"])]
)
def test_operators_of_a_step_on_the_ranks_that_were_asked_for(
    tmp_path: Path, ray_session: None, ranks: list[int] | None, expected: list[str]
) -> None:
    with Runtime(
        RayInitConfig(), Timeouts(start=120, call=60), observability=watched(tmp_path, "torch", ranks=ranks)
    ) as runtime:
        runtime.start([ResourcePool("pool", [2], cpus=0.25)])
        runtime.group("pool", {"probe": RoleSpec(Probe)})
        runtime.await_ready()
        train(runtime)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_2"]
    assert sorted(path.stem for path in (tmp_path / "profile" / "step_2").glob("*.json")) == expected
    for name in expected:
        trace = json.loads((tmp_path / "profile" / "step_2" / f"{name}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("probe.double") >= 1 and "aten::mul" in names
        assert "aten::mul" in (tmp_path / "profile" / "step_2" / f"{name}.txt").read_text()


def test_allocations_on_a_cpu(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    runtime = LocalRuntime(
        RayInitConfig(), Timeouts(), observability=watched(tmp_path, "torch_memory", save_path=str(elsewhere))
    )
    runtime.start([ResourcePool("pool", [1])])
    for name in ("probe", "other"):
        runtime.group("pool", {name: RoleSpec(Probe)})
    train(runtime)
    (trace,) = elsewhere.glob("step_2/*.json")
    assert trace.name == "all-0.json", "one process has one profile"
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("name") == "[memory]" for event in events)
    assert "CPU Mem" in trace.with_suffix(".txt").read_text()


def test_a_rank_that_no_group_has_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = LocalRuntime(RayInitConfig(), Timeouts(), observability=watched(tmp_path, "torch", ranks=[7]))
    runtime.start([ResourcePool("pool", [1])])
    runtime.group("pool", {"probe": RoleSpec(Probe)})
    train(runtime)
    assert [record.getMessage() for record in caplog.records] == [
        "step 2 is not profiled: global_profiler.ranks=[7], and no worker group has such a rank"
    ]
    assert not list(tmp_path.iterdir())


def test_a_step_that_fails_is_not_covered_by_its_profile(tmp_path: Path) -> None:
    runtime = LocalRuntime(RayInitConfig(), Timeouts(), observability=watched(tmp_path, "torch"))
    with pytest.raises(ZeroDivisionError), runtime.profiled(2):
        raise ZeroDivisionError


FAKE_NSYS = """#!/bin/sh
# takes the options of `nsys profile`, writes them down, and runs the program
echo "$@" >> {said}
while [ $# -gt 0 ]; do case "$1" in profile|--*) shift;; -t|-o) shift 2;; *) break;; esac; done
exec "$@"
"""


UNDER_NSYS = """
    import sys
    from pathlib import Path
    from dispatch.test_profiler import Probe, RoleSpec, train, watched
    from hydraflow.dispatch.config import RayInitConfig
    from hydraflow.dispatch.group import Timeouts
    from hydraflow.dispatch.placement import ResourcePool
    from hydraflow.dispatch.runtime import Runtime

    observability = watched(Path(sys.argv[1]), "nsys")
    with Runtime(RayInitConfig(), Timeouts(start=120, call=60), observability=observability) as runtime:
        runtime.start([ResourcePool("pool", [2])])
        runtime.group("pool", {"probe": RoleSpec(Probe)})
        runtime.await_ready()
        train(runtime)
        print("done")
"""


@pytest.mark.slow
def test_nsight_systems_starts_the_workers(tmp_path: Path) -> None:
    """In a Ray of its own, whose processes find the program on PATH."""
    (tmp_path / "nsys").write_text(FAKE_NSYS.format(said=tmp_path / "said"))
    (tmp_path / "nsys").chmod(0o755)
    path = f"{tmp_path}:{sys.prefix}/bin:{os.environ['PATH']}"
    done = programs.run(tmp_path, UNDER_NSYS, tmp_path, PATH=path)
    assert done.stdout.strip().endswith("done"), done.stderr[-2000:]
    said = [line for line in (tmp_path / "said").read_text().splitlines() if "default_worker.py" in line]
    assert len(said) == 1, "rank 0 alone"
    for option in (f"-o {tmp_path}/profile/probe-0 ", "--force-overwrite=true ", "-t osrt,nvtx "):
        assert option in said[0]


def test_on_a_gpu_only_the_steps_are_collected(tmp_path: Path) -> None:
    observability = observability_of(
        tmp_path, LogConfig(), ProfilerConfig(tool="nsys", steps=[2, 5]), debug=False
    )
    options = nsight_options(observability, "actor+rollout", 0, "cuda")
    assert options is not None
    assert (
        options["capture-range"] == "cudaProfilerApi" and options["capture-range-end"] == "repeat-shutdown:2"
    )
    assert options["o"] == f"{tmp_path}/profile/actor+rollout-0"
    assert nsight_options(observability, "actor+rollout", 1, "cuda") is None, "global_profiler.ranks is [0]"
    assert nsight_options(Observability(), "actor", 0, "cuda") is None


def test_what_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="global_profiler.tool=nsys: the program nsys is not found on PATH"):
        require_profiler(ProfilerConfig(tool="nsys", steps=[1]))
    for name in ("nsys", "python"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(ConfigError, match="the first `python` on PATH, which is not that of"):
        require_profiler(ProfilerConfig(tool="nsys", steps=[1]))
    require_profiler(ProfilerConfig(tool="torch", steps=[1], save_path=str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="global_profiler.save_path=/proc/x: the folder cannot be written"):
        require_profiler(ProfilerConfig(tool="torch", steps=[1], save_path="/proc/x"))
