"""Start and end of a Ray of our own, in a process of its own: nothing is left behind, and Ctrl-C ends a
wait."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from dispatch import programs
from jobs import command

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.start import _join, _local_cpus, require_room
from hydraflow.errors import ConfigError

PROGRAM = """
    import signal, time
    from dispatch.probes import Troubled
    from hydraflow.dispatch.config import RayInitConfig
    from hydraflow.dispatch.group import Timeouts
    from hydraflow.dispatch.placement import ResourcePool
    from hydraflow.dispatch.runtime import Runtime
    from hydraflow.dispatch.worker import RoleSpec

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Runtime(RayInitConfig(), Timeouts(start=120, call=300)) as runtime:
        runtime.start([ResourcePool("pool", [3])])
        role = runtime.group("pool", {"troubled": RoleSpec(Troubled)}).role("troubled")
        runtime.await_ready()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        print("ready", *role.call(Troubled.pids), flush=True)
        try:
            role.call(Troubled.sleep_on, 0, 300.0)
        except KeyboardInterrupt:
            print("interrupted", time.monotonic(), flush=True)
            runtime.stop()
            print("stopped", flush=True)
            time.sleep(60)
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_wait_and_leaves_no_process(tmp_path: Path) -> None:
    process, log = programs.start(tmp_path, f"{programs.FORKS_WORKERS}\n{textwrap.dedent(PROGRAM)}")
    try:
        command.wait_for(lambda: "ready" in log.read_text(), 120, "its workers")
        pids = [int(pid) for pid in log.read_text().split()[1:]]
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(pids) == 3 and set(pids) <= {child.pid for child in children}
        time.sleep(0.5)
        since = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # reaches all its processes, as a terminal's Ctrl-C does
        command.wait_for(lambda: "stopped" in log.read_text(), 60, "its end")
        interrupted, stopped = log.read_text().splitlines()[1:]
        word, at = interrupted.split()
        assert word == "interrupted" and float(at) - since < 3 and stopped == "stopped"
        gone, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, [child.cmdline() for child in alive]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


def test_a_local_cluster_counts_the_cpus_that_the_pools_need() -> None:
    assert _local_cpus(RayInitConfig(), 1000) == 1000
    assert _local_cpus(RayInitConfig(num_cpus=6), 5) == 6
    with pytest.raises(
        ConfigError, match="ray_init.num_cpus=4: must be at least 5, which the worker groups need"
    ):
        _local_cpus(RayInitConfig(num_cpus=4), 5)


def test_a_local_cluster_has_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests of this process may share one
    pools = [ResourcePool("train", [2, 2]), ResourcePool("score", [1])]
    with pytest.raises(
        ConfigError,
        match="before anything was started:\n.*ray_init.address=local: .* the run needs 2 nodes",
    ):
        require_room(RayInitConfig(), pools)
    require_room(RayInitConfig(address="auto"), pools)
    require_room(RayInitConfig(), pools[1:])


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "refused"),
        ("ray://127.0.0.1:1", "refused"),
        ("auto", "refused"),
        ("nonsense", "Invalid address format"),
    ],
)
def test_an_address_where_no_cluster_is(address: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # what `auto` stands for
    since = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        _join(address, {})
    assert time.monotonic() - since < 5
    (problem,) = caught.value.problems
    assert (problem.field, problem.value, problem.remedy) == (
        "ray_init.address",
        address,
        "ray_init.address=local",
    )
    assert words in problem.rule
