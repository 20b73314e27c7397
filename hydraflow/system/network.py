"""Network interfaces of this machine, which of them leads to the other nodes, and whether an address accepts
connections. Standard library only.

In: HYDRAFLOW_NETWORK_INTERFACE, or a peer's address. Out: names and IPv4 addresses.
Left out on purpose: ports (`slurm/ports.py`, `dispatch/worker.py`).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

from hydraflow.errors import ConfigError

VARIABLE = "HYDRAFLOW_NETWORK_INTERFACE"
SIOCGIFADDR = 0x8915
"""The request of ioctl for an interface's IPv4 address (netdevice(7))."""
ANYWHERE = "192.0.2.1"
"""A documentation address (RFC 5737): connecting a UDP socket to it selects the default route without
sending anything."""


def interfaces() -> dict[str, str]:
    """Name of each interface that has an IPv4 address -> that address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_of(address: str) -> str | None:
    """The interface that has the address; None if no interface of this machine has it."""
    return next((name for name, own in interfaces().items() if own == address), None)


def interface_variables(address: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that select the interface with `address` for collectives, unless `environ` has them. Always
    gloo's, because gloo looks up this host's name, which may give an address that other nodes cannot reach;
    NCCL's only if HYDRAFLOW_NETWORK_INTERFACE names an interface."""
    if (name := interface_of(address)) is None:
        return {}
    found = {"GLOO_SOCKET_IFNAME": name}
    if environ.get(VARIABLE):
        found["NCCL_SOCKET_IFNAME"] = f"={name}"
    return {variable: value for variable, value in found.items() if not environ.get(variable)}


def node_address(peer: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """The address by which other nodes reach this one: of HYDRAFLOW_NETWORK_INTERFACE, else of the interface
    that leads to `peer` (a host name or address), else of the default route, else of the first interface that
    is not the loopback.

    Raises ConfigError when the variable names an interface that this machine does not have.
    """
    if wanted := environ.get(VARIABLE, ""):
        found = interfaces()
        if wanted not in found:
            here = ", ".join(f"{name} ({address})" for name, address in found.items())
            rule = f"{socket.gethostname()} has no such interface with an address; it has {here}"
            remedy = " or ".join(f"{VARIABLE}={name}" for name in found if name != "lo")
            raise ConfigError.one(VARIABLE, wanted, rule, remedy)
        return found[wanted]
    others = [address for address in interfaces().values() if not address.startswith("127.")]
    return source_address(peer) or source_address(ANYWHERE) or next(iter(others), "127.0.0.1")


def unreachable(address: str, seconds: float) -> str:
    """Why host:port accepts no connection within `seconds`, or is no such address; empty if it does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ""


def source_address(host: str) -> str | None:
    """This machine's source address on the route to a host; None if there is no route, or only loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # sends nothing
        except OSError:
            return None
        own = str(probe.getsockname()[0])
    return None if own.startswith("127.") or own == "0.0.0.0" else own
