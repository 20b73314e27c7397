"""Times the batch plan, which must not depend on the size of the cluster or the data set.

    python scripts/bench/plan_scale.py [repetitions]

In: nothing. Out: one JSON object for 16 devices and one for 100,000: median milliseconds of a plan that is
accepted, one that is rejected with three problems, and one with a list of devices. No Ray, no torch.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import suppress

from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.errors import ConfigError
from hydraflow.schema import PPOConfig

PROMPTS = 10_000_000


def configuration(nodes: int) -> PPOConfig:
    """A mixture-of-experts run with Megatron on `nodes` machines with 8 devices: tp 4, pp 2, ep 8, so 8
    devices per data rank."""
    config = PPOConfig()
    policy = config.actor_rollout_ref
    config.trainer.nnodes, config.trainer.n_gpus_per_node = nodes, 8
    config.algorithm.adv_estimator = "grpo"
    policy.actor.strategy = "megatron"
    megatron = policy.actor.megatron
    megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size = 4, 2
    megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size = 8, 1
    policy.rollout.name, policy.rollout.n, policy.rollout.tensor_model_parallel_size = "vllm", 16, 8
    config.data.train_batch_size, policy.actor.ppo_mini_batch_size = 2 * nodes, nodes
    policy.actor.ppo_micro_batch_size_per_gpu = 4
    return config


def broken(nodes: int) -> PPOConfig:
    """`configuration` with a mini-batch, a micro-batch and a parallel size that do not divide."""
    config = configuration(nodes)
    actor = config.actor_rollout_ref.actor
    actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu = nodes - 1, 3
    actor.megatron.tensor_model_parallel_size = 7
    return config


def mapped(nodes: int) -> PPOConfig:
    """`configuration` with a list of sampling devices, those of every second machine."""
    config = configuration(nodes)
    listed = [device for device in range(8 * nodes) if device // 8 % 2 == 0]
    config.actor_rollout_ref.rollout.device_mapping = listed
    return config


def milliseconds(config: PPOConfig, repetitions: int) -> float:
    """The median of `repetitions` plans, accepted or rejected."""
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        with suppress(ConfigError):
            resolve_plan(config, prompts=PROMPTS)
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken)


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for nodes in (2, 12_500):
        times = {
            kind.__name__: round(milliseconds(kind(nodes), repetitions), 2)
            for kind in (configuration, broken, mapped)
        }
        print(json.dumps({"devices": 8 * nodes, "prompts": PROMPTS, "milliseconds": times}))


if __name__ == "__main__":
    main()
