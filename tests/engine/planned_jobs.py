"""What ranks do in the test of the plan's numbers; in a file of its own so that spawned processes can import
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from engine import rank_jobs
from engine.megatron_jobs import restart
from workers.by_hand import process

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.models.packing import row_tokens
from hydraflow.protocol.batch import DataProto
from hydraflow.schema import PPOConfig
from hydraflow.trainer.mini_batches import cut_mini_batches, dispatched
from hydraflow.workers.actor import ActorSpec, ActorWorker


def train(config: PPOConfig, plan: BatchPlan) -> dict[str, Any]:
    """A step of the actor on the plan's rows; how it was computed: the rows of each micro-batch of the pass
    that computes log-probabilities and of each optimizer step, the tokens of the latter, and how often this
    rank's model ran in each update."""
    policy = config.actor_rollout_ref
    restart(policy.actor.megatron)
    spec = ActorSpec(
        policy.model, policy.actor, plan.actor, plan.old_log_prob, None, 1.0, 9, total_steps=1, seed=0
    )
    actor = ActorWorker(process(dist.get_rank(), dist.get_world_size()), spec)
    engine: Any = actor.engine
    place = engine.coordinates()
    found: dict[str, Any] = {
        "ranks": place.data_size,
        "forward": [],
        "updates": [],
        "tokens": [],
        "runs": [],
    }
    chunks = engine._built.chunks if policy.actor.strategy == "megatron" else [engine.module]
    for chunk in chunks:
        chunk.register_forward_pre_hook(lambda *_: found["runs"].append(len(found["updates"])))
    forward, forward_backward = engine.forward, engine.forward_backward

    def note_forward(parts: Sequence[DataProto], *args: Any, **more: Any) -> Any:
        found["forward"] += map(len, parts)
        return forward(parts, *args, **more)

    def note_update(parts: Sequence[DataProto], *args: Any, **more: Any) -> Any:
        found["updates"].append([len(part) for part in parts])
        found["tokens"].append([int(row_tokens(part).sum()) for part in parts])
        return forward_backward(parts, *args, **more)

    engine.forward, engine.forward_backward = note_forward, note_update
    rows = rank_jobs.make_batch(rows=plan.trajectories_per_step)
    groups = np.arange(plan.trajectories_per_step) // plan.samples_per_prompt
    cut = cut_mini_batches(row_tokens(rows).numpy(), groups, plan.actor, balance=True, shuffle_key=None)
    share = dispatched(rows, cut, plan.actor).chunk(place.data_size)[place.data_rank]
    old = actor.compute_log_prob(share.select(["prompts", "responses", "response_mask"]))
    actor.update(share.union(old.select(["old_log_probs"])), step=1)
    updates = range(1, len(found["updates"]) + 1)
    return {**found, "runs": [found["runs"].count(number) / len(chunks) for number in updates]}
