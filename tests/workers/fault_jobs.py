"""What ranks do in the tests of faults during an update; in a file of its own so that spawned processes can
import it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engine import rank_jobs
from engine.oom_jobs import Trouble, tokens_of
from workers.gradient_jobs import Training, make_worker

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.errors import DoesNotFit, GuardStop
from hydraflow.metrics import values
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.skipping import SkipLimits

ROWS = 8


def make_batch() -> DataProto:
    """Rows with the columns of both losses."""
    batch = rank_jobs.make_batch(rows=ROWS)
    lengths = ragged.lengths(batch.get("responses"))
    draw = torch.Generator().manual_seed(5)
    names = ("old_log_probs", "ref_log_prob", "values", "returns")
    more = {
        name: ragged.from_parts(-torch.rand(int(lengths.sum()), generator=draw, dtype=torch.float64), lengths)
        for name in names
    }
    return batch.union(DataProto.from_dict(more))


def update_with_little_memory(path: str, training: Training, ranks: list[int], rows: int) -> dict[str, Any]:
    """Two updates on ranks that have memory for that many rows at a time; 0: for any number."""
    worker = make_worker(path, training)
    share = rank_jobs.my_share(make_batch())
    trouble = Trouble(worker.engine, "layer_backward", ranks, fit=lambda data: len(data) <= (rows or ROWS))  # type: ignore[arg-type]
    found = [values(worker.update(share, step)) for step in (1, 2)]
    weights = rank_jobs.full_weights(worker.engine)  # type: ignore[arg-type]
    return {
        "metrics": found,
        "weights": weights,
        "passes": trouble.passes + 1,
        "plan": worker.learner.micro_batcher.plan,
    }


def infer_with_little_memory(path: str, micro: MicroPlan, rows: int) -> dict[str, Any]:
    """Log-probabilities twice, with memory for that many rows at a time on rank 1, then an update."""
    worker = make_worker(path, Training("policy", micro))
    share = rank_jobs.my_share(make_batch())
    trouble = Trouble(worker.engine, "head", [1], fit=lambda data: len(data) <= (rows or ROWS))  # type: ignore[arg-type]
    said = [worker.compute_log_prob(share).get("old_log_probs").values() for _ in range(2)]  # type: ignore[union-attr]
    trouble.leave()
    return {"said": said, "metrics": values(worker.update(share, 1)), "plan": worker.log_prob_batcher.plan}  # type: ignore[union-attr]


def update_without_memory(path: str) -> str:
    """Not a single row fits on rank 1."""
    worker = make_worker(path, Training("policy", MicroPlan(rows=4, max_tokens=None)))
    Trouble(worker.engine, "layer", [1], fit=lambda data: tokens_of(data) <= 4)  # type: ignore[arg-type]
    try:
        worker.update(rank_jobs.my_share(make_batch()), 1)
    except DoesNotFit as error:
        return str(error)
    return ""


def update_with_bad_rows(path: str, head: str, folder: str) -> dict[str, Any]:
    """Two mini-batches, two epochs; the second mini-batch has a NaN on the last rank. And the same without
    that mini-batch."""
    training = Training(head, MicroPlan(rows=2, max_tokens=None))
    share = rank_jobs.my_share(make_batch())
    half = training.plan(dist.get_world_size()).rows_per_rank
    worker, other = make_worker(path, training, SkipLimits(3, folder)), make_worker(path, training)
    bad = DataProto.concat([share.slice(0, half), broken(share.slice(half, 2 * half))])
    reported = values(worker.update(bad, 7))
    other.update(share.slice(0, half), 7)
    return {
        "reported": reported,
        "found": state(worker),
        "wanted": state(other),
        "bad": columns(broken(share.slice(half, 2 * half))),
    }


def give_up(path: str, folder: str | None) -> tuple[str, bool, float]:
    """Every mini-batch has a NaN on the last rank: what stops the run, whether weights moved, and how many
    steps a good update skips."""
    training = Training("policy", MicroPlan(rows=4, max_tokens=None))
    worker, share = make_worker(path, training, SkipLimits(3, folder)), rank_jobs.my_share(make_batch())
    before = state(worker)["weights"]
    two = DataProto.concat([broken(share.slice(0, len(share) // 2)), share.slice(len(share) // 2)])
    skipped = values(worker.update(two, 1))["actor/skipped_steps"]  # 2, but not in a row
    before = state(worker)["weights"]
    try:
        worker.update(broken(share), 2)
    except GuardStop as error:
        after = state(worker)["weights"]
        return str(error), any(not torch.equal(after[name], value) for name, value in before.items()), skipped
    return "", False, skipped


def broken(rows: DataProto) -> DataProto:
    """On the last rank, with a NaN in the columns that a loss reads."""
    if dist.get_rank() < dist.get_world_size() - 1:
        return rows
    spoilt = {}
    for name in ("advantages", "returns"):
        tokens, lengths = ragged.parts(rows.get(name))
        spoilt[name] = ragged.from_parts(torch.full_like(tokens, float("nan")), lengths)
    return DataProto.from_dict({name: spoilt.get(name, column) for name, column in rows.items()})  # type: ignore[misc]


def state(worker: Any) -> dict[str, Any]:
    return {"weights": rank_jobs.full_weights(worker.engine), "moments": rank_jobs.moments(worker.engine)}


def columns(rows: DataProto) -> dict[str, tuple[list[float], list[int]]]:
    """Tokens and lengths of every ragged column."""
    return {name: tuple(part.tolist() for part in ragged.parts(column)) for name, column in rows.items()}  # type: ignore[misc,arg-type]
