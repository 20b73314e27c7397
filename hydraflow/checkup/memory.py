"""Devices and memory of this machine against the plan: number of GPUs, GPU memory, and host memory while
models are loaded.

In: the plan, the models' shapes, what the machine has free. Out: findings; bytes are estimates
(`hydraflow/memory/`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import CheckSkipped, Finding, ok, problem, warning
from hydraflow.checkup.probe import run_python
from hydraflow.device import gpu_count, gpu_runtime, listed_gpus
from hydraflow.memory.estimate import estimate
from hydraflow.memory.limits import MachineMemory, host_memory, limits_of
from hydraflow.memory.report import MemoryReport, size_text

MARGIN = 1.25
"""Estimates may be off by a fifth: up to this multiple of the memory is a warning, above it a problem."""

GPU_SECONDS = 60.0
_EACH_GPU = """
import json, sys, torch
from hydraflow.device import current_device, gpu_count, gpu_memory, gpu_name
for index in range(gpu_count()):
    free, total = gpu_memory(index)
    ones = torch.ones(64, 64, device=current_device(sys.argv[1], index))
    assert (ones @ ones).sum().item() == 64**3
    print(json.dumps({"name": gpu_name(index), "free": free, "total": total}))
"""


def check_devices(context: CheckContext) -> Iterator[Finding]:
    """GPUs that torch sees, against those that the plan uses on one machine."""
    machine = context.machine  # raises ConfigError for more GPUs than there are
    if machine.device_type == "cpu":
        yield judge_unused(context.config.trainer.device, listed_gpus())
        return
    yield ok(f"{machine.processes_per_node} of {gpu_count()} GPUs of each machine will be used")


def judge_unused(device: str, present: int) -> Finding:
    """`device`: trainer.device. `present`: GPUs that NVIDIA's driver lists."""
    if not present or device == "cpu":
        return ok(f"trainer.device={device}: runs on the CPU")
    built = f"is built for CUDA {runtime}" if (runtime := gpu_runtime()) else "is built without CUDA"
    evidence = f"the driver lists {present} GPUs, but torch sees none: it {built}"
    return warning(evidence, "install a torch built for this driver's CUDA, or trainer.device=cpu")


def check_host_memory(context: CheckContext) -> Iterator[Finding]:
    """Host memory that the plan is estimated to need, against what is free now."""
    host = host_memory()
    yield judge_host(_report(context, host_bytes=host.available), host)


def check_gpus(context: CheckContext) -> Iterator[Finding]:
    """Computes on every GPU and compares its free memory with the estimate. In a separate process, so that
    this one holds no GPU memory."""
    if context.machine.device_type == "cpu":
        raise CheckSkipped("no GPU is used")
    ended = run_python(_EACH_GPU, context.device_type, seconds=GPU_SECONDS)
    if ended.code != 0:
        needed = "a torch built for the driver's CUDA and for this kind of GPU is needed"
        remedy = f"nvidia-smi shows driver and processes; {needed}"
        yield problem(f"a GPU cannot be used: {ended.reason}", remedy)
        return
    lines = [line for line in ended.output.splitlines() if line.startswith("{")]
    gpus = [json.loads(line) for line in lines[: context.machine.processes_per_node]]
    free, total = min((gpu["free"], gpu["total"]) for gpu in gpus)
    kinds = ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus))
    where = f"of {len(gpus)} GPUs ({kinds}) the fullest has {size_text(free)} of {size_text(total)} free"
    # gpu_memory_utilization is a share of the whole device
    yield judge_device(_report(context, device_bytes=total), free, where)


def _report(context: CheckContext, **measured: int) -> MemoryReport:
    """The estimate with this machine's measured memory instead of the configured limits, so that its advice
    is for this machine."""
    limits = replace(limits_of(context.config), **measured)  # type: ignore[arg-type]
    shapes = context.shape, context.critic_shape
    return estimate(context.plan, context.config, shapes[0], limits=limits, critic_shape=shapes[1])


def judge_device(report: MemoryReport, free: int, where: str) -> Finding:
    """The fullest device of the plan, against `free` bytes."""
    fullest = max(report.groups, key=lambda group: group.peak)
    when = f"{fullest.peak_phase}: {', '.join(fullest.roles)}"
    evidence = f"the plan needs about {size_text(fullest.peak)} per device ({when}); {where}"
    return _compared(evidence, fullest.peak, free, report, "device")


def judge_host(report: MemoryReport, host: MachineMemory) -> Finding:
    """Host memory of the fullest machine of the plan, against what `host` has available."""
    available = f"{size_text(host.available)} of {size_text(host.total)} available"
    evidence = f"the plan needs about {size_text(report.host.total)} of host memory; {available}"
    return _compared(evidence, report.host.total, host.available, report, "host")


def _compared(evidence: str, needed: int, available: int, report: MemoryReport, where: str) -> Finding:
    if needed <= available:
        return ok(evidence)
    # each change is meant on top of those before it
    last = max((i for i, one in enumerate(report.advice) if one.where == where), default=-1)
    changes = " ".join(one.override for one in report.advice[: last + 1])
    found = problem if needed > MARGIN * available else warning
    return found(evidence, changes or "stop other programs that use it")
