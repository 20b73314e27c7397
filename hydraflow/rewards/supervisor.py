"""A small process between a pool and each process that runs a reward function, so that no process started by
the function outlives the pool.

In: descriptors of a socket to the pool, of shared memory, and of the leash that only the pool's process holds
(`system/tether.py`). Out: the function's own exit code or signal.
"""

from __future__ import annotations

import resource

from hydraflow.rewards import child
from hydraflow.system.tether import end_like, supervise


def main(socket: int, shared: int, leash: int) -> None:
    """Starts the function's process and stays until it ends or the leash closes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end_like(supervise(lambda: child.main(socket, shared), leash, own=(socket, shared)))
