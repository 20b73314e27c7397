"""What ranks do in the test of the law of gradients; in a file of its own so that spawned processes can
import it.

In: a batch, losses, and ways to cut the batch. Out: the whole gradient of every loss under every cut, as the
workers get it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from algorithms.losses_by_name import policy_loss
from engine import rank_jobs
from role_plans import simple_plan
from workers.by_hand import process

from hydraflow.algorithms.actor_loss import ActorLoss
from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.config import Loss
from hydraflow.algorithms.correction import Correction
from hydraflow.algorithms.critic_loss import ValueLoss
from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.engine.base import LossFn, ModelOutput
from hydraflow.engine.config import FSDPConfig, OptimConfig
from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.engine.micro_batcher import MicroBatcher, split_tokens
from hydraflow.metrics import Metric
from hydraflow.models.ask import Ask
from hydraflow.models.config import ModelConfig
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.trainer.mini_batches import cut_mini_batches, dispatched
from hydraflow.workers.actor import ActorSpec, ActorWorker
from hydraflow.workers.config import ActorConfig, CriticConfig
from hydraflow.workers.critic import CriticSpec, CriticWorker
from hydraflow.workers.skipping import SkipLimits
from hydraflow.workers.training import global_denominators

TEMPERATURE = 0.8
SCALE = 16.0
"""Divisor of seq-mean-token-sum-norm."""
EVERYTHING = 10**6


@dataclass(frozen=True)
class Case:
    """A loss with its options."""

    name: str
    head: str = "policy"
    options: dict[str, Any] = field(default_factory=dict)

    def loss(self, denominators: Denominators) -> LossFn:
        if self.head == "value":
            return ValueLoss(denominators=denominators, scale_factor=SCALE, **self.options)
        options = dict(self.options)
        chosen = policy_loss(options.pop("loss_mode", "vanilla"))
        return ActorLoss(policy_loss=chosen, denominators=denominators, scale_factor=SCALE, **options)


@dataclass(frozen=True)
class Together:
    """The weighted sum of several cases. A gradient is linear in the loss, so one pass says of all of them
    what a pass for each would."""

    head: str
    cases: tuple[Case, ...]
    weights: tuple[float, ...]
    name: str = "all together"

    def loss(self, denominators: Denominators) -> LossFn:
        losses = [case.loss(denominators) for case in self.cases]

        def loss(
            output: ModelOutput, columns: Mapping[str, torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, Metric]]:
            each = [one(output, columns)[0] for one in losses]
            return torch.stack([w * one for w, one in zip(self.weights, each, strict=True)]).sum(), {}

        return loss


AnyCase = Case | Together


class OwnCounts(Case):
    """A loss that breaks the law: each micro-batch divides by its own counts."""

    def loss(self, denominators: Denominators) -> LossFn:
        def loss(
            output: ModelOutput, columns: Mapping[str, torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, Metric]]:
            return super(OwnCounts, self).loss(Denominators.count(columns["response_mask"]))(output, columns)

        return loss


@dataclass(frozen=True)
class Cut:
    """The order of the rows, which decides on the rank that has them, and the micro-batches of each rank."""

    order: tuple[int, ...]
    micro: MicroPlan


def rows(n: int) -> MicroPlan:
    return MicroPlan(rows=n, max_tokens=None)


def tokens(n: int) -> MicroPlan:
    return MicroPlan(rows=None, max_tokens=n)


IN_ORDER = tuple(range(8))
SHUFFLED = (2, 4, 0, 7, 1, 3, 6, 5)
"""Rank 0 of two has the long rows; the row without a trained token comes last."""
CUTS = {
    "one row": Cut(IN_ORDER, rows(1)),
    "two rows": Cut(IN_ORDER, rows(2)),
    "all rows": Cut(IN_ORDER, rows(EVERYTHING)),
    "24 tokens": Cut(IN_ORDER, tokens(24)),
    "shuffled, three rows": Cut(SHUFFLED, rows(3)),
    "shuffled, 13 tokens": Cut(SHUFFLED, tokens(13)),
}


def measure(
    path: str,
    head: str,
    options: Mapping[str, Any],
    batch: DataProto,
    cases: Sequence[AnyCase],
) -> dict[str, torch.Tensor]:
    """By case: the gradients (cuts, parameters) under each of the cuts, from one engine."""
    engine = rank_jobs.make_engine(path, {**options, "head": head})
    found: dict[str, list[torch.Tensor]] = {case.name: [] for case in cases}
    for case in gradients_of(engine, head, batch, cases):
        found[case.name].append(whole_gradient(engine))
        engine.module.zero_grad()
    return {name: torch.stack(gradients) for name, gradients in found.items()}


def measure_on_megatron(
    path: str,
    head: str,
    settings: Mapping[str, Any],
    batch: DataProto,
    cases: Sequence[AnyCase],
) -> dict[str, list[Any]]:
    """Likewise this rank's parts of the gradients of the Megatron engine."""
    from engine import megatron_jobs  # Megatron-Core may not be there

    engine = megatron_jobs.make_engine(path, {"megatron": settings, "head": head})
    found: dict[str, list[Any]] = {case.name: [] for case in cases}
    for case in gradients_of(engine, head, batch, cases):
        found[case.name].append(megatron_jobs.gradients(engine))
        engine._drop_gradient()
    return found


def gradients_of(engine: Any, head: str, batch: DataProto, cases: Sequence[AnyCase]) -> Iterator[AnyCase]:
    """Each case under each of CUTS, while its gradient is in the engine."""
    for cut in CUTS.values():
        share = rank_jobs.my_share(batch.select_idxs(cut.order), engine)
        (denominators,) = global_denominators(engine, [share])
        micro_batches = MicroBatcher(cut.micro, "test").cut(share, engine.reduce).parts
        for case in cases:
            ask = Ask(TEMPERATURE, entropy=head == "policy")
            engine.forward_backward(micro_batches, case.loss(denominators), ask)
            yield case


def whole_gradient(engine: FSDPEngine) -> torch.Tensor:
    """The gradients of all ranks' shards as one vector, parameters in the order of their Hugging Face
    names."""
    named = {name.removeprefix(engine.module.prefix): p for name, p in engine.module.named_parameters()}
    gradients = rank_jobs.whole({name: named[name].grad for name in sorted(named)})
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def count_micro_batches(path: str, batch: DataProto) -> dict[str, tuple[int, int]]:
    """By cut: how many micro-batches this rank has, and how many it would have alone."""
    engine = rank_jobs.make_engine(path, {"optim": None})
    counts = {}
    for name, cut in CUTS.items():
        share = rank_jobs.my_share(batch.select_idxs(cut.order))
        counts[name] = (
            len(MicroBatcher(cut.micro, "test").cut(share, engine.reduce).parts),
            len(alone(share, cut.micro)),
        )
    return counts


def alone(share: DataProto, micro: MicroPlan) -> list[DataProto]:
    return [] if micro.max_tokens is None else split_tokens(share, micro.max_tokens, lambda own: own).parts


@dataclass(frozen=True)
class Training:
    """One training step of a worker: two mini-batches of four rows, two epochs."""

    head: str
    micro: MicroPlan
    lr: float = 1e-3
    weight_decay: float = 0.1
    clip_grad: float = 1e9
    correction: Correction | None = None
    loss: Loss | None = None

    def plan(self, data_ranks: int) -> RolePlan:
        return simple_plan(data_ranks=data_ranks, mini_batch_trajectories=4, epochs=2, micro=self.micro)


def train(
    path: str, training: Training, batch: DataProto
) -> tuple[dict[str, Metric], dict[str, torch.Tensor]]:
    """This rank's metrics but for speeds and the whole weights after `update` on what a controller would send
    to this rank."""
    worker = make_worker(path, training)
    plan = training.plan(dist.get_world_size())
    lengths = ragged.lengths(batch.get("prompts")) + ragged.lengths(batch.get("responses"))
    alone = np.arange(len(batch))
    cut = cut_mini_batches(lengths.numpy(), alone, plan, balance=True, shuffle_key=None)
    metrics = worker.update(rank_jobs.my_share(dispatched(batch, cut, plan)), 1)
    compared = {name: metric for name, metric in metrics.items() if not name.startswith("perf/")}
    return compared, rank_jobs.full_weights(worker.engine)  # type: ignore[arg-type]


def make_worker(
    path: str, training: Training, skip_limits: SkipLimits | None = None
) -> ActorWorker | CriticWorker:
    rank, size = dist.get_rank(), dist.get_world_size()
    here = process(rank, size)
    shared: dict[str, Any] = dict(
        fsdp_config=FSDPConfig(model_dtype="fp64", dtype="fp64", wrap_policy=rank_jobs.EACH_LAYER),
        optim=OptimConfig(lr=training.lr, weight_decay=training.weight_decay, clip_grad=training.clip_grad),
        loss_agg_mode="seq-mean-token-mean",
    )
    model, plan = ModelConfig(path=path), training.plan(size)
    if training.head == "value":
        critic = CriticConfig(model=model, **shared)
        others: dict[str, Any] = dict(
            response_tokens=int(SCALE), total_steps=1, seed=0, skip_limits=skip_limits or SkipLimits()
        )
        return CriticWorker(here, CriticSpec(critic, plan, training.micro, **others))
    actor = ActorConfig(entropy_coeff=0.02, use_kl_loss=True, kl_loss_coef=0.3, **shared)
    spec = ActorSpec(
        model,
        actor,
        plan,
        log_prob=training.micro,
        ref=None,
        temperature=TEMPERATURE,
        response_tokens=int(SCALE),
        total_steps=1,
        seed=0,
        skip_limits=skip_limits or SkipLimits(),
        correction=training.correction,
        loss=training.loss,
    )
    return ActorWorker(here, spec)
