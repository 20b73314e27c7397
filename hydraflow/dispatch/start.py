"""Starts Ray, or joins a cluster, and leaves it.

In: the Ray section of the configuration. Out: a Ray that this process may use. A cluster that was started
here is private to the user (`private.py`). Left out on purpose: what happens when it fails to start
(`runtime.py`).
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import AuthenticationError

from hydraflow.device import usable_cores
from hydraflow.dispatch.cluster import refusal
from hydraflow.dispatch.config import RAY_SETTINGS, RayInitConfig
from hydraflow.dispatch.placement import FEWER_NODES, ResourcePool, cpus_needed
from hydraflow.dispatch.private import close_to_others
from hydraflow.dispatch.processes import end_processes, own_ray_processes
from hydraflow.dispatch.services import without_services
from hydraflow.dispatch.template import end_template, stop_forking, workers_from_template
from hydraflow.errors import ConfigError
from hydraflow.system.interrupts import FOR_THE_COMMAND, blocked
from hydraflow.system.node_folder import remove_old_sessions

PROBE_SECONDS = 5.0
"""Seconds for a cluster's address to accept a connection."""


def start_ray(config: RayInitConfig, cpus: float, *, console: bool = False, forks: bool = True) -> bool:
    """Starts or joins Ray; True when it is ours to stop. A Ray that this process is already connected to is
    used unchanged.

    cpus: logical CPUs that the pools need; a local cluster declares at least that many, whatever the machine
    has. console: show on this console what processes write to Ray's files, deduplicated (RAY_DEDUP_LOGS=0 in
    the environment shows all). forks: a local cluster forks its workers from a template (`template.py`).
    Raises ConfigError when there is no cluster at the address. The processes of a local cluster ignore
    SIGUSR1, with which Slurm warns every process of a step, and SIGHUP, which a closed terminal sends to all:
    only this one handles them."""
    if ray.is_initialized():
        return False
    handler = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = dict(include_dashboard=False, log_to_driver=console, logging_level=logging.ERROR)
    with blocked(*FOR_THE_COMMAND):
        if config.address == "local":
            cores = _local_cpus(config, math.ceil(cpus))
            sessions = close_to_others()
            private: dict[str, Any] = dict(_temp_dir=str(sessions), _system_config=RAY_SETTINGS)
            with workers_from_template() if forks else nullcontext(), without_services(log_monitor=console):
                ray.init(address="local", num_cpus=cores, **private, **quiet)
            remove_old_sessions(sessions)
        else:
            _join(config.address, quiet)
    if threading.current_thread() is threading.main_thread():
        # ray.init replaces the handler that makes a run save before it ends
        signal.signal(signal.SIGTERM, handler)
    return True


def _local_cpus(config: RayInitConfig, needed: int) -> int:
    if config.num_cpus is None:
        return max(usable_cores(), needed)
    if config.num_cpus < needed:
        rule = f"must be at least {needed}, which the worker groups need"
        raise ConfigError.one("ray_init.num_cpus", config.num_cpus, rule, f"ray_init.num_cpus={needed}")
    return config.num_cpus


def require_room(config: RayInitConfig, pools: Sequence[ResourcePool]) -> None:
    """Raises ConfigError when a cluster that the run starts itself cannot hold the pools. The resources of
    another cluster are known once it is joined."""
    if config.address != "local" or ray.is_initialized():
        return
    nodes = max(len(pool.devices_on_nodes) for pool in pools)
    if nodes > 1:
        rule = f"starts Ray on this machine alone, and the run needs {nodes} nodes"
        raise ConfigError.one("ray_init.address", "local", rule, FEWER_NODES)
    _local_cpus(config, math.ceil(cpus_needed(pools)))


def _join(address: str, options: dict[str, Any]) -> None:
    try:
        found = _probe(address)
        reason = refusal(found) if found else None
        if reason is None:
            ray.init(address=address, **options)
            return
    except AuthenticationError as error:  # a token is required, and its file is missing
        reason = str(error).partition(". ")[0]
    except (OSError, ValueError) as error:
        rule, remedy = f"no Ray cluster answers there: {error}", "ray_init.address=local"
        raise ConfigError.one("ray_init.address", address, rule, remedy) from None
    token = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=<the file with the cluster's token>"
    rule, remedy = f"a Ray cluster answers there, but {reason}", f"{token} in the environment of this command"
    raise ConfigError.one("ray_init.address", address, rule, remedy)


def _probe(address: str) -> str | None:
    """Resolves an address to a host:port that accepts connections; None: Ray has to find it. Raises OSError
    when the connection fails, ValueError for an invalid address. Ray itself would retry for over a minute.

    Ray's own function resolves `auto`; RAY_ADDRESS or a file may name a cluster that is gone. A client
    address (ray://) belongs to another service, which cannot be asked whether it accepts our token."""
    found = canonicalize_bootstrap_address(address.removeprefix("ray://"))
    if found is None:
        return None
    host, _, port = found.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    return None if address.startswith("ray://") else found


def stop_ray() -> None:
    """Disconnects from Ray; a cluster that this process started ends with all its processes."""
    stop_forking()
    processes = own_ray_processes()
    end_template()
    ray.shutdown()
    end_processes(processes)
