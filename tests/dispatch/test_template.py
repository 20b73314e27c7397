"""Workers of a local cluster are forked from a template, and are what Ray's own would be."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import numpy as np
import psutil
import pytest
import torch
from dispatch import programs
from jobs.command import wait_for

from hydraflow.dispatch import template, template_client, template_server
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.template_client import ADDRESS
from hydraflow.dispatch.worker import Worker
from hydraflow.system.node_folder import session_folder

pytestmark = pytest.mark.slow
SERVER, CLIENT = Path(template_server.__file__), Path(template_client.__file__)


class Newborn(Worker):
    """Says how its process came to be."""

    @register(Dispatch.ONE_TO_ALL)
    def facts(self) -> dict[str, Any]:
        with torch.enable_grad():
            torch.ones(3, requires_grad=True).sum().backward()  # starts a thread
        return {
            "pid": os.getpid(),
            "parent": psutil.Process(os.getppid()).cmdline()[1],
            "blocked": sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "oom_score": int(Path("/proc/self/oom_score_adj").read_text()),
            "cwd": os.getcwd(),
            "variables": sorted(name for name in os.environ if name.startswith(("RAY_JOB", "RAY_RAYLET"))),
            "handlers": [repr(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGCHLD)],
            "path": sys.path[0],
            "threads": torch.get_num_threads(),
            "random": [random.random(), float(np.random.rand())],
        }


PROGRAM = """
import json, resource, signal, time
asked = json.loads(sys.argv[1])
if "early" in asked:
    from hydraflow.dispatch.config import RayInitConfig
    from hydraflow.dispatch.forked_template import READY, fork_template
    from hydraflow.trainer.config import RunConfig
    print("said once", end=" ")
    fork_template(RayInitConfig(), RunConfig(device=asked["early"]))
    time.sleep(0.5)
    os.kill(READY[0][1], signal.SIGUSR1)  # Slurm warns every process
from dispatch.test_template import Newborn
from hydraflow.dispatch.config import RayInitConfig, RuntimeEnvConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch import template
from hydraflow.dispatch.worker import RoleSpec

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if "libraries" in asked:
        template.LIBRARIES = tuple(asked["libraries"])
    runtime_env = RuntimeEnvConfig(asked.get("variables", {}))
    with Runtime(RayInitConfig(runtime_env=runtime_env), Timeouts(start=180, call=60)) as runtime:
        runtime.start([ResourcePool("pool", [asked.get("workers", 2)], threads=2)])
        role = runtime.group("pool", {"newborn": RoleSpec(Newborn)}).role("newborn")
        runtime.await_ready()
        print(json.dumps(role.call(Newborn.facts)), flush=True)
        if "wait" in asked:
            print([started.process.pid for started in template.STARTED], flush=True)
            time.sleep(60)
"""


def run(tmp_path: Path, asked: dict[str, Any]) -> tuple[forked.Background, Path]:
    """The program, as a command in the background, and what it prints."""
    (tmp_path / "busy.py").write_text("import threading\nthreading.Timer(60, print).start()\n")
    return programs.start(tmp_path, PROGRAM, json.dumps(asked))


def reported(log: Path) -> list[Any]:
    """The lists that it has printed."""
    lines = [line for line in log.read_text().splitlines() if line.removeprefix("said once ")[:1] == "["]
    return [json.loads(line.removeprefix("said once ")) for line in lines]


@pytest.mark.timeout(900)  # four starts of Ray, each with an import of everything
def test_a_forked_worker_differs_from_rays_own_in_its_parent_only(tmp_path: Path) -> None:
    """Ray starts its own for variables that a library may read, and where a library has started a thread. The
    template is a fork of the command, if that asks for one in time."""
    found = []
    alone = {"workers": 1}  # each imports everything itself, so the template need not
    by_ray = {"variables": {"SOME": "variable"}, "libraries": [], **alone}, {"libraries": ["busy"], **alone}
    for asked in ({}, {"early": "auto"}, *by_ray):
        process, log = run(tmp_path, asked)
        assert process.wait(timeout=240) == 0, log.read_text()[-3000:]
        found += reported(log)
        assert log.read_text().count("said") == ("early" in asked)
    late, early, own, left = found
    assert all(one.pop("parent").endswith("dispatch/template_server.py") for one in late)
    assert all(one.pop("parent").endswith("/forked.py") for one in early), (
        "a fork of the command is the parent"
    )
    assert not any(one.pop("parent").endswith(("_server.py", "/forked.py")) for one in [*own, *left])
    pids = [one.pop("pid") for several in found for one in several]
    drawn = [one.pop("random") for several in found for one in several]
    assert len(set(pids)) == 6 and len({number for numbers in drawn for number in numbers}) == 12
    assert late == early == own * 2 == left * 2 and late[0]["threads"] == 2 and late[0]["variables"]


def test_what_it_imports_is_there() -> None:
    """It skips what cannot be imported, such as a name that has changed."""
    needed = [name for name in template_server.LIBRARIES if name.startswith(("hydraflow", "torch", "transf"))]
    assert len(needed) > 8 and [name for name in needed if importlib.util.find_spec(name) is None] == []


def test_half_a_request_costs_no_worker(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        words = [str(listener.fileno()), str(os.getpid()), json.dumps(sys.path), "[]"]
        server = subprocess.Popen(
            [sys.executable, str(SERVER), *words], pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL
        )
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "socket"))
            client.sendall((1000).to_bytes(8, "big") + b"half")
    (tmp_path / "worker.py").write_text("import sys; print('worker', *sys.argv[1:], flush=True)")
    environ = {**os.environ, ADDRESS: str(tmp_path / "socket")}
    words = [sys.executable, str(CLIENT), str(tmp_path / "worker.py"), "--language=PYTHON", "given"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "worker given\n"
    server.kill()
    server.wait()


def test_ctrl_c_does_not_reach_a_template_that_is_only_starting() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        server = template.start_server(listener)
    for _ in range(20):
        server.send_signal(signal.SIGINT)
        time.sleep(0.02)
    assert server.poll() is None
    server.kill()
    server.wait()


def test_a_killed_command_leaves_no_template(tmp_path: Path) -> None:
    process, log = run(tmp_path, {"wait": True})
    wait_for(lambda: len(reported(log)) == 2, 240, "both lists")
    facts, started = reported(log)
    workers, templates = [psutil.Process(one["pid"]) for one in facts], list(map(psutil.Process, started))
    assert len(templates) == 1 and len(workers) == 2
    assert len(list(session_folder().glob(f"template.{process.pid}.*"))) == 1
    process.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([*templates, *workers], timeout=20)[1] == []
    assert not list(session_folder().glob(f"template.{process.pid}.*"))
