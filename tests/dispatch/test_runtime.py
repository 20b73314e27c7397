"""Start and end of a Ray of our own, in a process of its own: nothing is left behind, and Ctrl-C ends a
wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.start import _join, _local_cpus, require_room
from hydraflow.errors import ConfigError

TESTS = Path(__file__).parents[1]
PROGRAM = """
    import signal, sys, time
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
def test_ctrl_c_ends_a_wait_and_leaves_no_process() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    # A session of its own, so that the signal reaches all its processes, as a terminal's Ctrl-C does.
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()[1:]]
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(pids) == 3 and set(pids) <= {child.pid for child in children}
        time.sleep(0.5)
        begun = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        word, at = process.stdout.readline().split()
        assert word == "interrupted" and float(at) - begun < 3
        assert process.stdout.readline() == "stopped\n"
        gone, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, [child.cmdline() for child in alive]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
    begun = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        _join(address, {})
    assert time.monotonic() - begun < 5
    (problem,) = caught.value.problems
    assert (problem.field, problem.value, problem.remedy) == (
        "ray_init.address",
        address,
        "ray_init.address=local",
    )
    assert words in problem.rule
