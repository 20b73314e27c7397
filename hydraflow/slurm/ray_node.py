"""Starts Ray on one node of a job: this process becomes `ray start --block`, so that ending it ends exactly
this Ray.

In: the job's folder, Slurm's variables, the settings of the job. Out: a file `address` in the folder (first
node), and Ray. The other nodes wait for that file and for the port behind it; the error after the time limit
says what they waited for. Left out on purpose: ending (`scripts/slurm/node.sh`), and whether all nodes have
joined (`dispatch/cluster.py`).
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hydraflow.dispatch.config import RAY_SETTINGS
from hydraflow.errors import EnvironmentFault
from hydraflow.slurm.job_settings import JobSettings
from hydraflow.slurm.ports import ReservedPorts, hold
from hydraflow.system.allocation import Allocation, allocation, node_names
from hydraflow.system.network import interface_variables, node_address, unreachable
from hydraflow.system.whole_files import replacing

ADDRESS, FACTS = "address", "facts"
HEAD_SECONDS = 3600.0
"""Seconds for the first node to write the settings: it may pull a container's image. If it fails, the job
ends."""
STORE_SHARE, SHM_SHARE, STORE_LEAST = 0.3, 0.9, 80 * 2**20
"""Object store: share of the job's memory, share of /dev/shm, and the smallest that Ray accepts."""
DEFAULTS = {
    # A node that is gone is noticed after 4 * (3 + 6) s at the latest; Ray's own numbers make that 65.
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "6000",
    "RAY_health_check_failure_threshold": "4",
    # A node whose head is gone ends after this many seconds instead of 60.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
    # Ray would wait half a minute when it is asked to stop, though nothing is left to finish.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    **{f"RAY_{name}": str(int(value)) for name, value in RAY_SETTINGS.items()},
}
"""Default settings of Ray; the user's environment takes precedence."""


def own_name(environ: Mapping[str, str] = os.environ) -> str:
    """Slurm's name of this node."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def job_nodes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Slurm's names of the job's nodes; Ray's head runs on the first."""
    return node_names(environ.get("SLURM_JOB_NODELIST", "")) or [own_name(environ)]


def start(folder: Path, temporary: Path, *, dashboard: bool) -> None:
    """Becomes Ray. Raises EnvironmentFault if the head does not start, ConfigError for a wrong interface."""
    nodes = job_nodes()
    head = own_name() == nodes[0]
    address = "" if head else await_head(folder, nodes[0])
    settings = JobSettings.from_shell((folder / FACTS).read_text())
    # srun was called on the first node, so this is the address by which Slurm reaches that node
    own = node_address(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "") if head else address.rpartition(":")[0])
    environment = {**DEFAULTS, **os.environ, **interface_variables(own)}
    held = hold(4 if head else 1)
    words = _common(own, temporary, settings, held)
    words += _head(held, dashboard) if head else [f"--address={address}"]
    if head:
        with replacing(folder / ADDRESS) as unfinished:  # a reader sees all of it or nothing
            unfinished.write_text(f"{own}:{held.ports[0]}\n")
    held.open_up()
    print(f"{own_name()}: Ray's {'head' if head else 'node'} at {own}, {settings.cpus} CPUs", flush=True)
    program = "ray.scripts.scripts" if dashboard else "hydraflow.dispatch.services"
    os.execve(sys.executable, [sys.executable, "-m", program, "start", *words, "--block"], environment)


def _common(own: str, temporary: Path, settings: JobSettings, held: ReservedPorts) -> list[str]:
    words = [
        f"--node-ip-address={own}",
        f"--node-name={own_name()}",
        f"--num-cpus={settings.cpus}",
        f"--temp-dir={temporary}",
        f"--dashboard-agent-listen-port={held.ports[-1]}",
        # the system chooses: Ray's default range would be the same for two jobs on a node
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--disable-usage-stats",
    ]
    if settings.gpus >= 0:
        words.append(f"--num-gpus={settings.gpus}")
    if store := object_store(allocation(), shutil.disk_usage("/dev/shm").free):
        words.append(f"--object-store-memory={store}")
    return words


def _head(held: ReservedPorts, dashboard: bool) -> list[str]:
    ray_port, client_port, dashboard_port, _ = held.ports
    return [
        "--head",
        "--no-monitor",  # the monitor is the autoscaler, which the cluster does not need
        f"--port={ray_port}",
        f"--ray-client-server-port={client_port}",  # used with a dashboard only (`dispatch/services.py`)
        f"--include-dashboard={str(dashboard).lower()}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard_port}",
    ]


def object_store(given: Allocation | None, shared_memory: int) -> int | None:
    """Bytes of Ray's object store: a share of the job's memory, where Ray would take a share of the
    machine's.

    >>> object_store(Allocation("1", memory_bytes=10 * 2**30), 2**40) == int(3 * 2**30)
    True
    """
    if given is None or given.memory_bytes is None:
        return None
    return max(STORE_LEAST, int(min(given.memory_bytes * STORE_SHARE, shared_memory * SHM_SHARE)))


def await_head(folder: Path, head: str, seconds: float = HEAD_SECONDS) -> str:
    """The address in the job's folder, once something listens there. Raises EnvironmentFault after
    `seconds`, or, once the head has written the settings, trainer.start_timeout later."""
    started, has_settings = time.monotonic(), False
    deadline, address, reason = started + seconds, "", "it wrote no address"
    while time.monotonic() < deadline:
        if not has_settings and (has_settings := (folder / FACTS).is_file()):
            deadline = time.monotonic() + JobSettings.from_shell((folder / FACTS).read_text()).start_timeout
        address = (folder / ADDRESS).read_text().strip() if (folder / ADDRESS).is_file() else ""
        if address:
            reason = unreachable(address, 5.0)
            if not reason:
                return address
        time.sleep(0.5)
    waited = time.monotonic() - started
    where = f"{head} at {address}" if address else head
    raise EnvironmentFault(f"{own_name()}: waited {waited:.0f} s for Ray's head on {where}: {reason}")
