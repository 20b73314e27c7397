"""What ranks do in the test of ragged groups; apart, so that spawned processes can import it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from engine import rank_jobs
from workers.gradient_jobs import TEMPERATURE, AnyCase, make_worker, rows, tokens, whole_gradient
from workers.gradient_jobs import Training as TrainingStep

from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.engine.micro_batcher import MicroBatcher
from hydraflow.models.ask import Ask
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.trainer.mini_batches import cut_mini_batches, dispatched
from hydraflow.workers.training import Learner, UpdateLoss, _dead_rows_untrained

WHOLE = {
    "groups of three rows": MicroPlan(rows=3, max_tokens=None, whole_groups=True),
    "groups of 24 tokens": MicroPlan(rows=None, max_tokens=24, whole_groups=True),
    "groups of 200 tokens": MicroPlan(rows=None, max_tokens=200, whole_groups=True),
}
"""Of groups of five and nine rows: all are divided, those of about 100 tokens are, none is."""
MICRO = {"one row": rows(1), "three rows": rows(3), "24 tokens": tokens(24), **WHOLE}


def plan_of(data_ranks: int, prompts: int, micro: MicroPlan) -> RolePlan:
    """Mini-batches of that many prompts; that the plan counted on other rows must not matter."""
    return RolePlan(
        data_ranks=data_ranks,
        mini_batch_prompts=prompts,
        mini_batch_trajectories=4 * prompts,
        rows_per_rank=4,
        epochs=1,
        shuffle=False,
        micro=micro,
        optimizer_steps_per_step=2 // prompts,
    )


def gradients(
    path: str, head: str, batch: DataProto, groups: Sequence[int], prompts: int, cases: Sequence[AnyCase]
) -> dict[tuple[str, str], list[torch.Tensor]]:
    """By case and micro-batches: the whole gradient of each optimizer step, as the worker's learner gets it
    from what a controller would send to this rank."""
    worker = make_worker(path, TrainingStep(head, rows(1)))
    engine, found = worker.engine, {}
    batch = batch.union(DataProto.from_dict({"group": torch.tensor(groups)}))
    lengths = ragged.lengths(batch.get("prompts")) + ragged.lengths(batch.get("responses"))
    for name, micro in MICRO.items():
        plan = plan_of(dist.get_world_size(), prompts, micro)
        cut = cut_mini_batches(lengths.numpy(), np.array(groups), plan, balance=True, shuffle_key=None)
        share = rank_jobs.my_share(dispatched(batch, cut, plan))
        learner = Learner(engine, plan, MicroBatcher(micro, "test"), worker.learner.skip_guard, "actor")
        for case in cases:
            steps: list[torch.Tensor] = []

            def instead_of_a_step() -> dict[str, float]:
                steps.append(whole_gradient(engine))  # noqa: B023
                engine.module.zero_grad()  # type: ignore[attr-defined]
                return {"grad_norm": 1.0, "lr": 0.0, "skipped": 0.0}

            engine.optimizer_step = instead_of_a_step  # type: ignore[method-assign]
            ask = Ask(TEMPERATURE, entropy=head == "policy")
            loss = UpdateLoss(lambda denominators, first: case.loss(denominators), ask)  # noqa: B023
            learner.learn(share, loss, step=1)
            found[case.name, name] = steps
    return found


def rows_read(live: list[bool], micro: MicroPlan) -> int:
    """Rows that pass through the model, of a share with these rows."""
    tokens_of = [torch.tensor([3, 4]) for _ in live]
    names = ("prompts", "responses", "response_mask")
    batch = DataProto.from_dict(
        {name: ragged.from_rows(tokens_of) for name in names}
        | {"live": torch.tensor(live), "group": torch.zeros(len(live), dtype=torch.int64)}
    )
    cut = MicroBatcher(micro, "test").cut(_dead_rows_untrained(batch), lambda own, how: own)
    return sum(map(len, cut.parts))
