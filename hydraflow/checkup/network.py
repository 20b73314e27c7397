"""Whether ports can be opened and reached, and whether the Ray clusters that are named answer.

In: this machine's sockets, RAY_ADDRESS, the file in which `ray start` leaves its address. Out: findings. A
run takes free ports as it needs them; none is fixed. The usual fault is that the machine's own address does
not lead back to it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import CheckSkipped, Finding, note, ok, problem
from hydraflow.dispatch import cluster
from hydraflow.system.network import ANYWHERE, source_address
from hydraflow.system.node_folder import RAY_BASE
from hydraflow.trainer.machine import require_room, scoring_pool, training_pool

CONNECT_SECONDS = 2.0
CLUSTER_FILE = "ray/ray_current_cluster"
PORTS_PER_PROCESS = 16
"""Ports that Ray and torch.distributed take for a worker process, rounded up."""


def check_ports(context: CheckContext) -> Iterator[Finding]:
    """Opens a port on each of this machine's own addresses and connects to it."""
    if wrong := [reason for address in own_addresses() if (reason := unreachable(address))]:
        remedy = "repair its address in /etc/hosts, disconnect the VPN, or open the firewall for this machine"
        yield problem("; ".join(wrong), remedy)
        return
    free, needed = free_ports(), PORTS_PER_PROCESS * (context.machine.processes_per_node + 2)
    seen = f"a port of {' and of '.join(own_addresses())} can be opened and reached; about {free} are free"
    if free >= needed:
        yield ok(seen)
    else:
        yield problem(f"{seen}, and about {needed} are needed", "stop what holds ports: ss -tan shows it")


def own_addresses() -> list[str]:
    """Loopback, and the address by which other machines would reach this one."""
    outside = source_address(ANYWHERE)
    return ["127.0.0.1", *([outside] if outside else [])]


def unreachable(address: str) -> str | None:
    """Why a port of this machine's `address` cannot be opened and connected to; None: it can."""
    try:
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"a port of {address} cannot be opened and reached ({error})"
    return None


def free_ports(proc: Path = Path("/proc")) -> int:
    """Number of ephemeral ports that no TCP socket holds. `proc`: where procfs is mounted."""
    try:
        low, high = (int(port) for port in (proc / "sys/net/ipv4/ip_local_port_range").read_text().split())
        files = [file for name in ("tcp", "tcp6") if (file := proc / "net" / name).is_file()]
        tables = [file.read_text().splitlines()[1:] for file in files]
    except (OSError, ValueError):
        return 65536 - 1024
    taken = {int(line.split()[1].rpartition(":")[2], 16) for table in tables for line in table}
    return high - low + 1 - sum(low <= port <= high for port in taken)


def check_ray(context: CheckContext) -> Iterator[Finding]:
    """Which cluster the run will use, and whether it answers."""
    config, folder = context.config, Path(os.environ.get(RAY_BASE) or "/tmp")
    require_room(config.trainer, config.ray_init, [training_pool(context.machine), scoring_pool()])
    yield judge_ray(config.ray_init.address, environ=os.environ, folder=folder)


def judge_ray(address: str, *, environ: Mapping[str, str], folder: Path) -> Finding:
    """`address`: ray_init.address. `folder`: Ray's temporary folder, in which `ray start` leaves the address
    of its cluster."""
    named = named_clusters(environ, folder)
    if address == "local":
        return _beside(named)
    if address != "auto":
        return _joined(address, "ray_init.address")
    if not named:
        none = "neither RAY_ADDRESS nor a started cluster's file names an address"
        raise CheckSkipped(f"ray_init.address=auto, and {none}: Ray looks by itself")
    source, found = next(iter(named.items()))
    return _joined(found, source)


def named_clusters(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Where an address was found -> the address, in the order in which Ray tries them."""
    found = {}
    if address := environ.get("RAY_ADDRESS"):
        found["RAY_ADDRESS"] = address
    try:
        if address := (folder / CLUSTER_FILE).read_text().strip():
            found[str(folder / CLUSTER_FILE)] = address
    except OSError:
        pass
    return found


def _beside(named: Mapping[str, str]) -> Finding:
    """The finding if the run starts its own Ray: other clusters are only worth a note."""
    for source, address in named.items():
        if address in ("auto", "local"):
            continue
        if reason := _silent(address):
            gone = f"{source} names {address}, where no Ray answers ({reason})"
            return note(f"{gone}; not used, since ray_init.address=local", _forget(source))
        there = f"a Ray cluster runs at {address} ({source}); this run starts its own beside it"
        return note(there, "ray_init.address=auto joins it")
    return ok("the run starts its own cluster; no other is configured")


def _joined(address: str, source: str) -> Finding:
    reason = _silent(address)
    if reason is None:
        return ok(f"a Ray cluster answers at {address} ({source})")
    local = "ray_init.address=local"
    remedy = local if source == "ray_init.address" else f"{_forget(source)}, or {local}"
    return problem(f"{source} names {address}, where no Ray answers ({reason})", remedy)


def _forget(source: str) -> str:
    """The command that removes the address from its source."""
    return "unset RAY_ADDRESS" if source == "RAY_ADDRESS" else f"rm {source}"


def _silent(address: str) -> str | None:
    """Why no Ray answers at host:port; None: one does."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return "it is not host:port"
    return cluster.silence(f"{host}:{port}")
