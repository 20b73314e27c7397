"""CPUs that this process may really use, against the processes and threads that the run starts on this
machine.

In: affinity mask, control groups, Slurm's allocation; the run's processes. Out: findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import Finding, note, ok, warning
from hydraflow.device import core_limits
from hydraflow.trainer.machine import Machine


def check_processors(context: CheckContext) -> Iterator[Finding]:
    """Worker processes times threads must not exceed the cores, nor Ray count more than there are."""
    yield judge(core_limits(), context.machine, ray_cpus=context.config.ray_init.num_cpus)


def judge(limits: Mapping[str, float], machine: Machine, *, ray_cpus: int | None) -> Finding:
    """`limits`: what limits the cores -> to how many. `ray_cpus`: what the user lets Ray count."""
    source, least = min(limits.items(), key=lambda limit: limit[1])
    cores, each = max(1, int(least)), machine.threads
    each_limit = ", ".join(f"{name} {amount:g}" for name, amount in limits.items())
    seen = f"{least:g} cores by {source} ({each_limit})"
    threads = "1 thread" if each == 1 else f"{each} threads"
    busy = f"{machine.processes_per_node} training processes of {threads}"
    if ray_cpus is not None and ray_cpus > cores:
        evidence = f"ray_init.num_cpus={ray_cpus} is more than {seen}: Ray starts workers for all of them"
        return warning(evidence, f"ray_init.num_cpus={cores}")
    if machine.processes_per_node * each <= cores:
        return ok(f"{busy} on {seen}")
    if each == 1:
        once = f"trainer.n_gpus_per_node={cores} uses each core once"
        return note(f"{busy} on {seen}: they take turns", once)
    fitting = max(1, cores // machine.processes_per_node)
    evidence = f"{busy} are more than {seen}: they will slow each other down"
    return warning(evidence, f"trainer.threads_per_process={fitting}")
