"""A program that starts a Ray cluster of two nodes and a group over both that may replace its processes.
All processes of the second are killed; it prints how the pending call ends, and after how many seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from threading import Thread

from jobs.command import processes_with
from ray.cluster_utils import Cluster

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Group, Recovery, Timeouts
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.services import without_services
from hydraflow.dispatch.template import end_template, workers_from_template
from hydraflow.dispatch.worker import RoleSpec, Worker
from hydraflow.errors import WorkerError


class Waiting(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def main(workers_first: bool) -> None:
    name = f"second-{os.getpid()}"  # other test runs may share the machine
    node = dict(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
    with workers_from_template(), without_services(log_monitor=False):
        cluster = Cluster(initialize_head=True, head_node_args=node)
        second = cluster.add_node(num_cpus=2, object_store_memory=80_000_000, node_name=name)
    with Runtime(RayInitConfig(address=cluster.address), Timeouts(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("both", [1, 1])])
        group = runtime.group("both", {"waiting": RoleSpec(Waiting)})
        runtime.await_ready()
        group.recovery = Recovery(lambda rank: None, max_retries=2)
        role = group.role("waiting")
        role.call(Waiting.sleep, 0).get()
        pending = role.call(Waiting.sleep, 5)
        at = time.monotonic()
        raylets = processes_with(["/raylet/raylet", f"--node-name={name}"])
        workers = [process.pid for process in group.processes.values() if process.node_id == second.node_id]
        if workers_first:
            Thread(target=kill_raylets, args=[group, raylets]).start()
            kill(workers)
        else:
            kill([*raylets, *workers])
        try:
            pending.get()
        except WorkerError as error:
            print(f"after {time.monotonic() - at:.1f} s: {error}".splitlines()[0], flush=True)
    end_template()


def kill_raylets(group: Group, raylets: Sequence[int]) -> None:
    """Once a process is started again, which takes at least a tenth of a second."""
    while not group.replaced:
        time.sleep(0.005)
    kill(raylets)


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
