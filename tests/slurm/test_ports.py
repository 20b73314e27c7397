"""Ports that are held: by whom, for how long, and across processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hydraflow.errors import EnvironmentFault
from hydraflow.slurm.ports import RANGE_FILE, hold

CHILD = """
import os, sys, time
from hydraflow.slurm.ports import hold
held = hold(1, candidates=[int(port) for port in sys.argv[1:]])
held.open_up()
print(held.ports[0], flush=True)
os.execv("/bin/sleep", ["sleep", "60"])
"""


def test_two_at_the_same_time_get_different_ports_outside_of_the_systems_range() -> None:
    low, high = (int(number) for number in RANGE_FILE.read_text().split())
    first, second = hold(50), hold(50)
    try:
        assert len({*first.ports, *second.ports}) == 100
        assert not [port for port in first.ports if low <= port <= high]
    finally:
        first.release()
        second.release()


def test_a_held_port_is_refused_to_others_until_its_user_opens_it() -> None:
    held = hold(1)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("", held.ports[0]))
    held.open_up()
    socket.create_server(("", held.ports[0])).close()
    with pytest.raises(EnvironmentFault, match="1 free ports are needed, and .* has 0"):
        hold(1, candidates=held.ports)
    held.release()
    hold(1, candidates=held.ports).release()


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        free = hold(1)
        free.release()
        found = hold(1, candidates=[taken, free.ports[0]])
        assert list(found.ports) == [free.ports[0]]
        found.release()


def test_a_program_that_its_holder_becomes_keeps_the_lock_and_its_end_frees_it() -> None:
    found = hold(2)
    found.release()
    words = [sys.executable, "-c", CHILD, *map(str, found.ports)]
    holder = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert holder.stdout is not None
        first = int(holder.stdout.readline())
        assert first == found.ports[0]
        other = hold(1, candidates=found.ports)
        assert list(other.ports) == [found.ports[1]], "nobody listens on the first, but it is locked"
        other.release()
    finally:
        holder.kill()
        holder.wait()
    hold(1, candidates=[first]).release()
