"""A running cluster with a token, looked at from outside by processes that have the right one, a wrong one
and none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from dispatch import programs
from jobs.command import processes_with

from hydraflow.slurm.ports import hold

LOOK = """
import sys, time
from hydraflow.dispatch import cluster
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.start import start_ray, stop_ray
from hydraflow.errors import HydraflowError
address, what = sys.argv[1:3]
since = time.monotonic()
try:
    if what == "silence":
        print("silent", cluster.silence(address))
    elif what == "join":
        print("joined", start_ray(RayInitConfig(address=address), 1))
        stop_ray()
    elif what == "look":
        print(cluster.refusal(address), sorted(cluster.alive(address)), sorted(cluster.lost(address)))
    else:
        ended = sys.argv[3] if len(sys.argv) > 3 else None
        cluster.await_nodes(address, what.split(","), 2.0, ended=lambda: ended)
        print("all are there")
except HydraflowError as error:
    print(error)
print("SECONDS", time.monotonic() - since)
"""


@dataclass(frozen=True)
class Head:
    """A cluster of one node, `first`, that takes a token."""

    address: str
    token: Path
    client_port: int

    def tell(self, *words: str, mode: str = "token", token: Path | None = None) -> tuple[str, float]:
        """What a process with this authentication sees, and how long it looked."""
        variables = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": str(token or self.token)}
        done = programs.run(self.token.parent, LOOK, self.address, *words, **variables)
        said, _, seconds = done.stdout.partition("SECONDS ")
        assert seconds, done.stderr[-3000:]
        return said, float(seconds)


@contextmanager
def ray_node(token: Path, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node of Ray that runs in its block."""
    environ = {
        # What the local Ray of other tests has set in this process would forbid it to join one.
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TMPDIR": f"/tmp/hft{os.getpid()}",
    }
    always = ["start", "--node-ip-address=127.0.0.1", "--num-cpus=2", "--disable-usage-stats", "--block"]
    command = [sys.executable, "-m", "hydraflow.dispatch.services", *always, *words]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def await_joined(head: Head, names: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while "all are there" not in head.tell(names)[0]:
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    folder = tmp_path_factory.mktemp("head")
    token, log = folder / "token", folder / "log"
    token.write_text("0123456789abcdef" * 4)
    held = hold(3)
    port, client, agent = held.ports
    ports = [f"--port={port}", f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
    made = Head(f"127.0.0.1:{port}", token, client)
    held.open_up()
    with ray_node(token, log, "--head", "--node-name=first", "--include-dashboard=false", *ports) as process:
        await_joined(made, "first", process, log)
        yield made
    held.release()


def test_who_has_the_token_sees_the_nodes_and_joins(head: Head) -> None:
    assert head.tell("look")[0] == "None ['first'] []\n"
    assert head.tell("join")[0] == "joined True\n"


def test_nothing_listens_for_clients_of_ray(head: Head) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", head.client_port), timeout=5)


def test_a_wrong_token_is_reported_at_once(head: Head, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("f" * 64)
    said, seconds = head.tell("join", token=wrong)
    assert f"ray_init.address={head.address}: a Ray cluster answers there, but it refuses our token" in said
    assert "-> RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=<the file with the cluster's token>" in said
    assert seconds < 5, "Ray's own client tries for 20 s and more"
    said, seconds = head.tell("first", token=wrong)
    assert f"Ray at {head.address} refuses our token" in said and seconds < 2


def test_no_token_is_reported_at_once(head: Head, tmp_path: Path) -> None:
    said, seconds = head.tell("join", mode="disabled")
    assert "it requires a token, and we have none (RAY_AUTH_MODE is not token)" in said and seconds < 5
    said, seconds = head.tell("join", token=tmp_path / "nowhere")
    assert (
        f"RAY_AUTH_TOKEN_PATH is set but file cannot be opened or is empty: {tmp_path}/nowhere" in said
        and seconds < 5
    )


def test_whether_a_ray_answers_needs_no_token(head: Head, tmp_path: Path) -> None:
    assert head.tell("silence", token=tmp_path / "nowhere")[0] == "silent None\n"


def test_a_node_whose_processes_are_gone_is_lost_before_ray_notices(head: Head, tmp_path: Path) -> None:
    log, name = tmp_path / "log", f"other-{os.getpid()}"  # other test runs may share the machine
    with ray_node(head.token, log, f"--address={head.address}", f"--node-name={name}") as process:
        await_joined(head, name, process, log)
        assert head.tell("look")[0] == f"None ['first', '{name}'] []\n"
        [raylet] = processes_with(["/raylet/raylet", f"--node-name={name}"])
        os.kill(raylet, signal.SIGKILL)
        assert head.tell("look")[0] == f"None ['first', '{name}'] ['{name}']\n"


def test_nodes_that_do_not_come_are_named_after_the_limit(head: Head) -> None:
    said, seconds = head.tell("first,second,third")
    assert f"2 of 3 nodes have not joined Ray at {head.address}: second, third (waited 2 s)" in said
    assert 2 <= seconds < 8


def test_a_reason_that_they_will_never_come_ends_the_wait(head: Head) -> None:
    said, seconds = head.tell("first,second", "second: no room in /dev/shm")
    assert "second (second: no room in /dev/shm)" in said and seconds < 2
