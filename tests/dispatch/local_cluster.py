"""A program that starts a local cluster with one worker process, says where it is, and ends when its input
does."""

from __future__ import annotations

import json
import os
import sys

import psutil
import ray
from dispatch.probes import Described

from hydraflow.dispatch import template
from hydraflow.dispatch.config import RayInitConfig, RuntimeEnvConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec


def main(variables: dict[str, str]) -> None:
    """`variables`: ray_init.runtime_env.env_vars. A library may read them, so the worker imports everything
    itself, and the template need not."""
    template.LIBRARIES = ()
    with Runtime(
        RayInitConfig(runtime_env=RuntimeEnvConfig(dict(variables))), Timeouts(start=120, call=60)
    ) as runtime:
        runtime.start([ResourcePool("pool", [1])])
        role = runtime.group("pool", {"described": RoleSpec(Described)}).role("described")
        runtime.await_ready()
        [found] = role.call(Described.surroundings)
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        sockets = [
            line
            for process in family
            for line in process.net_connections()
            if line.status == psutil.CONN_LISTEN
        ]
        facts = {
            "gcs": ray.get_runtime_context().gcs_address,
            "pids": [process.pid for process in family],
            "session": ray._private.worker._global_node.get_session_dir_path(),
            "token": os.environ["RAY_AUTH_TOKEN_PATH"],
            "worker": {name: found.get(name) for name in [*variables, "GLOO_SOCKET_IFNAME", "scripting"]},
            "listening": sorted({socket.laddr.ip for socket in sockets}),
        }
        print(json.dumps(facts), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
