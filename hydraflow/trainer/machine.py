"""Device, processes and threads of a run, resolved once from the configuration and this machine.

In: `trainer.*`. Out: `Machine`, or a ConfigError that says what the machine has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydraflow.device import CPU_PROCESSES, gpu_count, resolve_device, usable_cores
from hydraflow.dispatch import start
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.local import LocalRuntime
from hydraflow.dispatch.observability import Observability
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.errors import ConfigError
from hydraflow.trainer.config import RunConfig

TRAIN, SCORE = "train", "score"
"""Names of the resource pools."""


@dataclass(frozen=True)
class Machine:
    """Device and processes of the training roles."""

    device_type: str
    nodes: int
    processes_per_node: int
    threads: int
    """Threads of each process."""

    @property
    def processes(self) -> int:
        """Training processes of the run."""
        return self.nodes * self.processes_per_node


def resolve_machine(trainer: RunConfig) -> Machine:
    """Raises ConfigError for a missing device and for more GPUs than the machine has."""
    device = resolve_device(trainer.device)
    gpus = gpu_count()
    if device != "cpu" and not gpus:
        raise ConfigError.one(
            "trainer.device", trainer.device, "this machine has no such device", "trainer.device=cpu"
        )
    per_node = trainer.n_gpus_per_node or (CPU_PROCESSES if device == "cpu" else gpus)
    if device != "cpu" and trainer.nnodes == 1 and per_node > gpus:
        raise ConfigError.one(
            "trainer.n_gpus_per_node", per_node, f"this machine has {gpus}", f"trainer.n_gpus_per_node={gpus}"
        )
    threads = trainer.threads_per_process or max(1, usable_cores() // per_node)
    return Machine(device, trainer.nnodes, per_node, threads)


def training_pool(machine: Machine, *, devices: Sequence[int] | None = None, groups: int = 1) -> ResourcePool:
    """The pool of training processes. `devices`: number on each node; None: the machine's. `groups`: largest
    number of worker groups on a device."""
    return ResourcePool(
        TRAIN,
        devices or [machine.processes_per_node] * machine.nodes,
        gpus=0 if machine.device_type == "cpu" else 1,
        threads=machine.threads,
        groups=groups,
    )


def scoring_pool() -> ResourcePool:
    """The pool of the reward function: one process besides the training processes."""
    return ResourcePool(SCORE, [1])


def require_room(trainer: RunConfig, ray_init: RayInitConfig, pools: Sequence[ResourcePool]) -> None:
    """Raises ConfigError when it is known before the start that the pools do not fit."""
    if not trainer.debug.local:
        start.require_room(ray_init, pools)


def open_runtime(
    trainer: RunConfig,
    ray_init: RayInitConfig,
    machine: Machine,
    pools: Sequence[ResourcePool],
    observability: Observability | None = None,
) -> Runtime:
    """Starts Ray, or with `debug.local` uses this process alone, and reserves the pools. ConfigError when
    there is no room for them."""
    timeouts = Timeouts(start=trainer.start_timeout, call=trainer.rpc_timeout)
    kind = LocalRuntime if trainer.debug.local else Runtime
    opened = kind(ray_init, timeouts, device_type=machine.device_type, observability=observability)
    opened.start(pools)
    return opened
