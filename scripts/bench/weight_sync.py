"""Measures how fast the generation engine gets the actor's weights, against this machine's memory-copy rate.

    python scripts/bench/weight_sync.py [--models small,wide,large] [--publishes 5] [--bucket-megabytes 64]

For each model (random fp32 weights, written on the spot) the run's own workers are started, one actor rank
and one rollout process: both roles in the same process, then in two that Ray's object store joins, then on
two Ray nodes (both on this machine), joined by a broadcast and, to compare, by the object store. A publish
hands over all weights. The first one is not counted, and it alone compares checksums. The copy rate
is that of one thread that copies one array onto another. Prints one JSON object per model: bytes per second,
of the median and of the fastest publish, and the medians' shares of the copy rate; the most memory that the
object store has taken; and by how much that of the actor's and of the rollout's process has grown at most,
shared memory included.
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
from hydraflow.dispatch.group import RoleGroup, Timeouts
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.engine.config import FSDPConfig
from hydraflow.generation.config import RolloutConfig, SamplingConfig
from hydraflow.models.config import ModelConfig
from hydraflow.trainer.weight_links import MEGABYTE, Broadcast, ObjectStore, SameProcess, WeightLink
from hydraflow.workers.actor import ActorSpec, ActorWorker
from hydraflow.workers.config import ActorConfig
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker

MODELS: Mapping[str, Mapping[str, int]] = {
    # 29 M parameters
    "small": dict(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8)
    | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64),
    # 71 M parameters, of which an embedding of 256 MiB has all but 4 M
    "wide": dict(vocab_size=131072, hidden_size=512, intermediate_size=512, num_hidden_layers=2)
    | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64),
    # 494 M parameters, the sizes of Qwen2.5-0.5B
    "large": dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
    | dict(num_attention_heads=14, num_key_value_heads=2, head_dim=64),
}
COPIED_BYTES = 256 * MEGABYTE
NEVER = 10**9


def write_model(sizes: Mapping[str, int], folder: Path) -> int:
    """Writes a model with random weights; returns their bytes."""
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
        RolePlan.simple(mini_batch_trajectories=1),
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
def object_store(model: str, bucket_megabytes: int) -> Iterator[ObjectStore]:
    """A process for each role."""
    with Runtime(RayInitConfig(), Timeouts()) as runtime:
        runtime.start([ResourcePool(name, [1]) for name in ("actor", "rollout")])
        groups = {name: runtime.group(name, {name: spec}) for name, spec in roles(model).items()}
        runtime.await_ready()
        actor, rollout = groups["actor"].role("actor"), groups["rollout"].role("rollout")
        yield ObjectStore(actor, rollout, how(bucket_megabytes))


@contextmanager
def two_nodes(model: str, bucket_megabytes: int) -> Iterator[tuple[Broadcast, ObjectStore]]:
    """A node for each role, and two ways between them."""
    with _cluster(model) as address, Runtime(RayInitConfig(address=address), Timeouts()) as runtime:
        runtime.start([ResourcePool("both", [1, 1])])
        groups = [
            runtime.group("both", {name: spec}, [device])
            for device, (name, spec) in enumerate(roles(model).items())
        ]
        runtime.await_ready()
        actor, rollout = groups[0].role("actor"), groups[1].role("rollout")
        settings = actor, rollout, how(bucket_megabytes)
        yield Broadcast(*settings), ObjectStore(*settings)


@contextmanager
def _cluster(folder: str) -> Iterator[str]:
    """Two Ray nodes on this machine, whose files are in `folder`; the address of the first."""
    node = dict(num_cpus=2, object_store_memory=3 * 10**9)
    with patch.dict(os.environ, RAY_TMPDIR=folder):
        cluster = Cluster(initialize_head=True, head_node_args=node | dict(include_dashboard=False))
        try:
            cluster.add_node(**node)
            yield cluster.address
        finally:
            cluster.shutdown()


def how(bucket_megabytes: int) -> RolloutConfig:
    """Without checksums."""
    return RolloutConfig(
        dtype="fp32", update_weights_bucket_megabytes=bucket_megabytes, verify_weights_every=NEVER
    )


def store_bytes() -> int:
    """Memory that Ray's object store has ever taken, of the Ray that this process has started: the pages of
    its file, which keeps them."""
    raylets = [one for one in psutil.Process().children(recursive=True) if one.name() == "raylet"]
    files = [file for raylet in raylets for file in Path(f"/proc/{raylet.pid}/fd").iterdir()]
    return sum(os.stat(file).st_blocks * 512 for file in files if "plasma" in os.readlink(file))


@contextmanager
def watched(link: ObjectStore) -> Iterator[dict[str, int]]:
    """By how many bytes the memory of each role's process has grown at most, once the context has ended. The
    weights are published once before: only then does the rollout have the memory of its own."""
    link.publish(1)()
    grown: dict[str, int] = {}
    pids = {"actor": link.actor.group.processes[0].pid, "rollout": link.rollout.group.processes[0].pid}
    before = {role: psutil.Process(pid).memory_info().rss for role, pid in pids.items()}
    for pid in pids.values():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from now on
    yield grown
    for role, pid in pids.items():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        [peak] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
        grown[role] = peak - before[role]


def rates(size: int, work: Callable[[], Any], times: int) -> dict[str, float]:
    """Bytes per second of `times` calls that move `size` bytes each; one before them is not counted."""
    taken = []
    for _ in range(times + 1):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return {"median": size / statistics.median(taken[1:]), "fastest": size / min(taken[1:])}


def copy_rates(times: int) -> dict[str, float]:
    """Bytes per second of one thread."""
    source, target = np.ones(COPIED_BYTES, dtype=np.uint8), np.zeros(COPIED_BYTES, dtype=np.uint8)
    return rates(COPIED_BYTES, lambda: np.copyto(target, source), times)


def bucket_sizes(actor: RoleGroup, bucket_megabytes: int) -> list[int]:
    """Bytes of each bucket."""
    sizes, is_last = list[int](), False
    while not is_last:
        most = bucket_megabytes * MEGABYTE
        asked = actor.call(ActorWorker.send_bucket, len(sizes), 0, most, "fp32", False)
        stored, is_last = asked.get()[0]
        sizes.append(sum(array.nbytes for array in stored.read().arrays))
    return sizes


def measure(model: str, publishes: int, bucket_megabytes: int) -> dict[str, Any]:
    """One model's figures."""
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(MODELS[model], Path(folder))
        with same_process(folder) as link:
            within = rates(size, lambda: link.publish(1)(), publishes)
        with object_store(folder, bucket_megabytes) as link:
            before = store_bytes()
            with watched(link) as grown:
                between = rates(size, lambda: link.publish(1)(), publishes)
            held = store_bytes() - before
            sizes = bucket_sizes(link.actor, bucket_megabytes)
        with two_nodes(folder, bucket_megabytes) as links:
            names = ("broadcast_to_a_node", "object_store_to_a_node")
            far, far_grown = {}, {}
            for name, link in zip(names, links, strict=True):
                with watched(link) as far_grown[name]:
                    far[name] = rates(size, lambda link=link: link.publish(1)(), publishes)
    found = {"same_process": within, "object_store": between, **far}
    copy = copy_rates(publishes)
    shares = {f"{link}_share": round(rate["median"] / copy["median"], 3) for link, rate in found.items()}
    found["memory_copy"] = copy
    pair = max(sum(sizes[first : first + 2]) for first in range(len(sizes)))
    facts = {"model": model, "bytes": size, "buckets": len(sizes), "two_buckets": pair, "held_at_most": held}
    return facts | {"processes_grew": {"object_store": grown, **far_grown}} | found | shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="which of them, separated by commas")
    parser.add_argument("--publishes", type=int, default=5, help="timed publishes of each link")
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        print(json.dumps(measure(name, arguments.publishes, arguments.bucket_megabytes)), flush=True)


if __name__ == "__main__":
    main()
