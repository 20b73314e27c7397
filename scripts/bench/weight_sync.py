"""Measures how fast the generation engine gets the actor's weights, against the machine's memory-copy rate.

    python scripts/bench/weight_sync.py [--models small,wide,large] [--publishes 5] [--bucket-megabytes 64]

For each model (random fp32 weights, written on the spot) a run's workers are started, one actor rank and one
rollout process: both roles in the same process, then in two processes on a node, then on two Ray nodes (both
on this machine). A publish transfers all weights. The first one is not counted, and only it compares
checksums. The copy rate is that of one thread copying one array to another, after each publish, so that other
load on the machine slows both. Prints one JSON object per model: for each link, the bytes per second of the
median and the fastest publish, and their ratios to the median and the fastest copy; the size of the slots of
shared memory; and the largest growth of the actor's and the rollout's process, including shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
from ray.cluster_utils import Cluster
from transformers import AutoConfig, AutoModelForCausalLM

from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.services import without_services
from hydraflow.dispatch.template import end_template, workers_from_template
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.engine.config import FSDPConfig
from hydraflow.generation.config import RolloutConfig, SamplingConfig
from hydraflow.models.config import ModelConfig
from hydraflow.trainer.weight_links import Broadcast, SameProcess, SeparateProcesses, SharedMemory, WeightLink
from hydraflow.workers.actor import ActorSpec, ActorWorker
from hydraflow.workers.config import ActorConfig
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker

MODELS: Mapping[str, Mapping[str, int]] = {
    # 29 M parameters
    "small": dict(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8)
    | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64),
    # 71 M parameters, all but 4 M of them in an embedding of 256 MiB
    "wide": dict(vocab_size=131072, hidden_size=512, intermediate_size=512, num_hidden_layers=2)
    | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64),
    # 494 M parameters, the sizes of Qwen2.5-0.5B
    "large": dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
    | dict(num_attention_heads=14, num_key_value_heads=2, head_dim=64),
}
COPIED_BYTES = 256 * 2**20
NEVER = 10**9


def write_model(sizes: Mapping[str, int], folder: Path) -> int:
    """Writes a model with random weights; returns their size in bytes."""
    config = AutoConfig.for_model("qwen3", **sizes, tie_word_embeddings=True, dtype="float32")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def roles(model: str) -> dict[str, RoleSpec]:
    """Actor and rollout as a run builds them."""
    batches = MicroPlan(rows=1, max_tokens=None)
    actor = ActorSpec(
        ModelConfig(path=model),
        ActorConfig(fsdp_config=FSDPConfig(dtype="fp32")),
        RolePlan(1, 1, 1, 1, epochs=1, shuffle=False, micro=batches, optimizer_steps_per_step=1),
        log_prob=batches,
        ref=None,
        temperature=1.0,
        response_tokens=1,
        total_steps=1,
        seed=0,
    )
    rollout = RolloutSpec(
        ModelConfig(path=model), SamplingConfig(dtype="fp32"), max_prompt=1, max_tokens=1, seed=0
    )
    return {"actor": RoleSpec(ActorWorker, (actor,)), "rollout": RoleSpec(RolloutWorker, (rollout,))}


@contextmanager
def same_process(model: str) -> Iterator[WeightLink]:
    """One process with both roles."""
    with Runtime(RayInitConfig(), Timeouts()) as runtime:
        runtime.start([ResourcePool("both", [1])])
        group = runtime.group("both", roles(model))
        runtime.await_ready()
        yield SameProcess(group.role("rollout"))


@contextmanager
def two_processes(model: str, bucket_megabytes: int) -> Iterator[SharedMemory]:
    """A process for each role."""
    with Runtime(RayInitConfig(), Timeouts()) as runtime:
        runtime.start([ResourcePool(name, [1]) for name in ("actor", "rollout")])
        groups = {name: runtime.group(name, {name: spec}) for name, spec in roles(model).items()}
        runtime.await_ready()
        actor, rollout = groups["actor"].role("actor"), groups["rollout"].role("rollout")
        yield SharedMemory(rollout, actor, rollout_settings(bucket_megabytes))


@contextmanager
def two_nodes(model: str, bucket_megabytes: int) -> Iterator[Broadcast]:
    """A node for each role."""
    with _cluster(model) as address, Runtime(RayInitConfig(address=address), Timeouts()) as runtime:
        runtime.start([ResourcePool("both", [1, 1])])
        groups = [
            runtime.group("both", {name: spec}, [device])
            for device, (name, spec) in enumerate(roles(model).items())
        ]
        runtime.await_ready()
        actor, rollout = groups[0].role("actor"), groups[1].role("rollout")
        yield Broadcast(rollout, actor, rollout_settings(bucket_megabytes))


@contextmanager
def _cluster(folder: str) -> Iterator[str]:
    """Two Ray nodes on this machine, with their files in `folder`; yields the address of the first."""
    node: dict[str, Any] = dict(num_cpus=2, object_store_memory=3 * 10**9)
    with patch.dict(os.environ, RAY_TMPDIR=folder):
        with workers_from_template(), without_services(log_monitor=False):
            cluster = Cluster(initialize_head=True, head_node_args=node | dict(include_dashboard=False))
            cluster.add_node(**node)
        try:
            yield cluster.address
        finally:
            cluster.shutdown()
            end_template()


def rollout_settings(bucket_megabytes: int) -> RolloutConfig:
    """Rollout settings without checksums."""
    return RolloutConfig(
        dtype="fp32", update_weights_bucket_megabytes=bucket_megabytes, verify_weights_every=NEVER
    )


def slot_bytes(link: SharedMemory) -> int:
    """Bytes of the shared-memory slots of the actor's process."""
    files = [one for one in Path(f"/proc/{pids(link)['actor']}/fd").iterdir() if "memfd" in os.readlink(one)]
    # by inode: several descriptors may be of one slot
    return sum({found.st_ino: found.st_blocks * 512 for found in map(os.stat, files)}.values())


def pids(link: SeparateProcesses) -> dict[str, int]:
    """Process id of each role."""
    return {"actor": link.actor.group.processes[0].pid, "rollout": link.rollout.group.processes[0].pid}


@contextmanager
def watched(link: SeparateProcesses) -> Iterator[dict[str, int]]:
    """Fills, on exit, the bytes by which each role's process grew at most. Weights are published once before,
    because the rollout allocates its own only then."""
    link.publish(1)()
    grown: dict[str, int] = {}
    before = {role: psutil.Process(pid).memory_info().rss for role, pid in pids(link).items()}
    for pid in pids(link).values():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets VmHWM
    yield grown
    for role, pid in pids(link).items():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        [peak] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
        grown[role] = peak - before[role]


def rates(link: WeightLink, size: int, times: int) -> dict[str, float]:
    """Bytes per second of `times` publishes of `size` bytes, and their ratio to the copy rate, after a
    warm-up publish and copy."""
    source, target = np.ones(COPIED_BYTES, dtype=np.uint8), np.zeros(COPIED_BYTES, dtype=np.uint8)
    published, copied = list[float](), list[float]()
    for _ in range(times + 1):
        published.append(seconds(lambda: link.publish(1)()))
        copied.append(seconds(lambda: np.copyto(target, source)))
    found: dict[str, float] = {}
    summaries: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "fastest": min}
    for name, of in summaries.items():
        sent, copy = size / of(published[1:]), COPIED_BYTES / of(copied[1:])
        found |= {name: sent, f"{name}_copy": copy, f"{name}_share": round(sent / copy, 3)}
    return found


def seconds(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    since = time.perf_counter()
    work()
    return time.perf_counter() - since


def measure(model: str, publishes: int, bucket_megabytes: int) -> dict[str, Any]:
    """Measures all links with one model."""
    found: dict[str, Any] = {"model": model}
    with tempfile.TemporaryDirectory() as folder:
        found["bytes"] = size = write_model(MODELS[model], Path(folder))
        with same_process(folder) as within:
            found["same_process"] = rates(within, size, publishes)
        with two_processes(folder, bucket_megabytes) as near:
            with watched(near) as grew:
                found["shared_memory"] = rates(near, size, publishes)
            found["shared_memory"] |= {"slots": slot_bytes(near), "grew": grew}
        with two_nodes(folder, bucket_megabytes) as far:
            with watched(far) as grew:
                found["broadcast"] = rates(far, size, publishes)
            found["broadcast"] |= {"grew": grew}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated names")
    parser.add_argument("--publishes", type=int, default=5, help="timed publishes of each link")
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        print(json.dumps(measure(name, arguments.publishes, arguments.bucket_megabytes)), flush=True)


if __name__ == "__main__":
    main()
