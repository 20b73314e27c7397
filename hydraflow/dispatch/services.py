"""Starts Ray without services that a run does not use, and with more time to start. `python -m
hydraflow.dispatch.services start ...` is `ray start` with the same changes, for nodes of a cluster without a
dashboard.

In: Ray's own start, in this process. Out: fewer processes. Ray has no option for this, so its functions are
patched.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from ray._private import ray_constants, services, utils
from ray._private.node import Node

from hydraflow.dispatch import agent
from hydraflow.system.importing import importing

OTHER_COMMANDS = ("ray.dashboard.modules.job.cli", "ray.serve.scripts", "ray.util.state.state_cli")
"""Modules of Ray's other commands; `ray start` needs none of them."""
START_SECONDS = 180.0
"""Time limit for a new raylet to register. Ray's own 30 seconds are too short on a busy machine."""


@contextmanager
def without_services(*, log_monitor: bool) -> Iterator[None]:
    """In this block Ray starts without its autoscaler, its dashboard's server and agent and its server for
    clients (ray://), and without waiting for an agent's imports; without `log_monitor`, nothing reads its log
    files either.

    These take four seconds of CPU time, and `ray.init` waits for the dashboard's server and agent."""
    unwanted = ["start_monitor", "start_api_server", "start_ray_client_server"]
    if not log_monitor:
        unwanted.append("start_log_monitor")
    interpreter = services._build_python_executable_command_memory_profileable

    def command(component: str, *args: Any, **kwargs: Any) -> list[str]:
        ours = [sys.executable, "-I", "-S", agent.__file__]
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [*ours, agent.DASHBOARD]
        given = interpreter(component, *args, **kwargs)
        is_agent = component == ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT
        return [*ours, agent.RUNTIME_ENV, *given] if is_agent else given

    replaced: list[tuple[Any, str, Callable]] = [
        *((Node, name, lambda *args, **kwargs: None) for name in unwanted),
        (services, interpreter.__name__, command),
        # otherwise Ray imports the dashboard's libraries here just to see whether they are installed
        (utils, "get_dashboard_dependency_error", lambda: ImportError("a run has no dashboard")),
        (services, "get_node", _patient(services.get_node, others=_raylets())),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(replaced, before, strict=True):
            setattr(owner, name, function)


def _patient(get_node: Callable[[str, str], Any], others: set[psutil.Process]) -> Callable[[str, str], Any]:
    """Ray's `get_node`, which raises RuntimeError while the node's raylet is not registered. This one retries
    for `START_SECONDS`, as long as this process has a running raylet besides `others`."""

    def registered(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > deadline or not _raylets() - others:
                    raise
            time.sleep(0.1)

    return registered


def _raylets() -> set[psutil.Process]:
    """The running raylets that this process has started."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child)
    return found


if __name__ == "__main__":
    with importing():
        # Ray leaves out commands that it cannot import; their libraries take half a second
        sys.modules.update(dict.fromkeys(OTHER_COMMANDS))  # type: ignore[arg-type]
        from ray.scripts.scripts import main

    with without_services(log_monitor=True):
        main()
