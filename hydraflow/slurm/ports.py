"""TCP ports for one job on one node, held from when they are chosen until the process that uses them opens
them.

In: how many. Out: `ReservedPorts`. Two jobs on a node never get the same port: for each, a socket with the
port's name in the abstract namespace of Unix sockets (unix(7)) is bound as a lock. It belongs to the network
namespace, as ports do, so it works across users and containers, and the system releases it when its last
holder ends. Programs that do not know the lock are kept away by a bound TCP socket until shortly before the
port is used, and by a choice of ports that the system does not hand out by itself. Left out on purpose: ports
that Ray lets the system choose, and torch's (`dispatch/worker.py`).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydraflow.errors import EnvironmentFault

LOWEST, HIGHEST = 20000, 65535
RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Ephemeral ports, which the system assigns to programs that do not request a specific one."""


@dataclass(frozen=True)
class ReservedPorts:
    """Ports that are reserved for this process."""

    ports: list[int] = field(default_factory=list)
    locks: list[socket.socket] = field(default_factory=list)
    """Locks to keep while the ports are used; a program that this process execs inherits them."""
    sockets: list[socket.socket] = field(default_factory=list)
    """Sockets bound to the ports."""

    def open_up(self) -> None:
        """Closes the sockets, so that a program can open the ports; the locks stay."""
        for held in self.sockets:
            held.close()

    def release(self) -> None:
        self.open_up()
        for lock in self.locks:
            lock.close()


def hold(count: int, candidates: Sequence[int] | None = None) -> ReservedPorts:
    """Reserves `count` ports that are free on every address of this machine. Raises EnvironmentFault if there
    are fewer.

    >>> held = hold(2)
    >>> len(set(held.ports)), held.ports[0] in hold(1, candidates=[*held.ports, held.ports[0] + 1]).ports
    (2, False)
    """
    candidates = _candidates() if candidates is None else candidates
    found = ReservedPorts()
    for port in candidates:
        if len(found.ports) == count:
            break
        if (lock := _lock(port)) is None:
            continue
        if (held := _bound(port)) is None:
            lock.close()
            continue
        found.ports.append(port)
        found.locks.append(lock)
        found.sockets.append(held)
    if len(found.ports) < count:
        found.release()
        there = f"{socket.gethostname()} has {len(found.ports)} (ss -ltn shows who holds them)"
        raise EnvironmentFault(f"{count} free ports are needed, and {there}")
    return found


def _lock(port: int) -> socket.socket | None:
    """The lock of a port; None if another process has it."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(f"\0hydraflow-port-{port}")
    except OSError:
        lock.close()
        return None
    lock.set_inheritable(True)
    return lock


def _bound(port: int) -> socket.socket | None:
    """A socket bound to the port on every address; None if the port is in use."""
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            held = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a machine without IPv6
        try:
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # IPv4, too
            held.bind(("", port))
            return held
        except OSError:
            held.close()
            return None
    return None


def _candidates() -> list[int]:
    """Ports outside of the ephemeral range, in a different order for each process."""
    try:
        low, high = (int(number) for number in RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    outside = [port for port in range(LOWEST, HIGHEST + 1) if not low <= port <= high]
    return random.sample(outside or range(LOWEST, HIGHEST + 1), min(2000, len(outside) or 2000))
