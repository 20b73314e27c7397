"""A program that starts a Ray cluster of two nodes with two GPUs each, as Ray counts them, and worker groups
on overlapping devices. Prints which GPU of which node each process sees. Workers are forked, which saves
nine imports of all libraries; a run with GPUs forks none."""

from __future__ import annotations

import json
import os

import ray
from ray.cluster_utils import Cluster

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.services import without_services
from hydraflow.dispatch.template import end_template, workers_from_template
from hydraflow.dispatch.worker import RoleSpec, Worker


class Seeing(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, str, int]:
        """Node, visible GPUs, local rank."""
        gpus = os.environ["CUDA_VISIBLE_DEVICES"]
        return ray.get_runtime_context().get_node_id(), gpus, self.process.local_rank


def main(groups: list[list[int]]) -> None:
    node = dict(num_cpus=4, num_gpus=2, include_dashboard=False, object_store_memory=80_000_000)
    with workers_from_template(), without_services(log_monitor=False):
        cluster = Cluster(initialize_head=True, head_node_args=node)
        cluster.add_node(**{name: node[name] for name in ("num_cpus", "num_gpus", "object_store_memory")})
    with Runtime(RayInitConfig(address=cluster.address), Timeouts(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("small", [1]), ResourcePool("train", [2, 2], gpus=1, groups=3)])
        roles = [
            runtime.group("train", {"seeing": RoleSpec(Seeing)}, devices).role("seeing") for devices in groups
        ]
        runtime.await_ready()
        print(json.dumps([role.call(Seeing.where) for role in roles]), flush=True)
    cluster.shutdown()
    end_template()
