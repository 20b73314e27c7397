"""Environment variables of a worker process, set before any library reads them.

In: the rank, and its address. Out: compiler caches per rank, a cache per node for code that ships with
models, OpenMP's spin count, and the network interface for collectives. Folders from the user's environment
are kept, with a subfolder per rank. Left out on purpose: `ray_init.runtime_env.env_vars` in a process that
Ray starts (`host.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hydraflow.system.network import VARIABLE, interface_variables, node_address
from hydraflow.system.node_folder import MODULES, make_node_folder, node_folder

COMPILER_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Two ranks that compile the same kernel at the same time would write the same files, which breaks both on a
network drive."""
SPINS, FEW_SPINS = "GOMP_SPINCOUNT", "1000"
"""How often an OpenMP thread polls for work before it sleeps; by default it spins for milliseconds. On a busy
machine a spinning thread keeps the core from the thread that it waits for. Ten training steps with two
threads on two cores took 281 s beside ten busy processes, and 13 s with this."""
LOOPBACK = "127.0.0.1"
"""Rendezvous address of a group on a single node."""


def variables(rank: int, *, node_ip: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables to set in a rank's process. `node_ip`: the address at which the group's other processes
    reach this one.

    Raises ConfigError when HYDRAFLOW_NETWORK_INTERFACE names an interface that does not exist.
    """
    found = {}
    for name, folder in COMPILER_CACHES.items():
        base = Path(environ[name]) if environ.get(name) else node_folder() / folder
        own = f"rank_{rank}"  # a second start in this process finds what the first one set
        found[name] = str(base if base.name == own else base / own)
    found |= shared_variables(environ)
    address = node_address(environ=environ) if environ.get(VARIABLE) else node_ip
    return found | interface_variables(address, environ)


def shared_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The subset of `variables` that is the same in all processes of a node and that torch and transformers
    read on import."""
    found = {} if environ.get(MODULES) else {MODULES: str(node_folder() / "hf_modules")}
    if not any(environ.get(name) for name in (SPINS, "OMP_WAIT_POLICY")):
        found[SPINS] = FEW_SPINS
    return found


def settle_command() -> None:
    """Sets `shared_variables` in a command's process; call it before torch and transformers are imported.
    Raises EnvironmentFault as `settle` does."""
    make_node_folder()
    os.environ.update(shared_variables())


def settle(rank: int, *, node_ip: str = LOOPBACK, given: Mapping[str, str] = MappingProxyType({})) -> None:
    """Sets `given`, then `variables`, in this process. Raises EnvironmentFault when the folder for caches
    belongs to another user."""
    make_node_folder()
    os.environ.update(given)
    os.environ.update(variables(rank, node_ip=node_ip))
