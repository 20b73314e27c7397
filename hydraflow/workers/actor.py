"""The policy that learns: log-probabilities of what was sampled, and updates.

In: trajectories (`prompts`, `responses`, `response_mask` and the loss's columns). Out: `old_log_probs`,
`ref_log_prob`, metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hydraflow.algorithms.actor_loss import ActorLoss
from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.config import POLICY_LOSSES, OldFrom
from hydraflow.algorithms.correction import Correction
from hydraflow.algorithms.diagnostics import probs_diff_name
from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.device import resolve_dtype
from hydraflow.dispatch.modes import Dispatch, mesh_mode, register
from hydraflow.dispatch.transport import StoredValue
from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine.base import LossFn, ModelOutput
from hydraflow.engine.config import engine_config
from hydraflow.metrics import Metric, maximum, mean, spread
from hydraflow.models.ask import Ask
from hydraflow.models.config import ModelConfig
from hydraflow.options import Implementation
from hydraflow.protocol.batch import DataProto
from hydraflow.weights.buckets import Bucket, Cut, buckets, cut
from hydraflow.workers.config import ActorConfig
from hydraflow.workers.correcting import Corrector
from hydraflow.workers.engine_worker import EngineWorker
from hydraflow.workers.skipping import SkipLimits
from hydraflow.workers.training import forward_in_order
from hydraflow.workers.weights_group import WeightsSender

OLD_FROM = "old_from"
"""Key of a batch's meta_info."""


@dataclass(frozen=True)
class ActorSpec:
    """Constructor arguments of an ActorWorker."""

    model: ModelConfig
    actor: ActorConfig
    plan: RolePlan
    log_prob: MicroPlan
    """Micro-batches of the pass that recomputes log-probabilities."""
    ref: MicroPlan | None
    """Micro-batches of the reference pass with adapters disabled; None: no reference."""
    temperature: float
    """Divides the logits, as in sampling."""
    response_tokens: int
    """Longest response: the default divisor of seq-mean-token-sum-norm."""
    total_steps: int
    """Training steps of the run, for the schedule."""
    seed: int
    """Seeds the initialisation of new weights (adapters)."""
    skip_limits: SkipLimits = SkipLimits()
    """Limits on optimizer steps skipped for a non-finite gradient."""
    correction: Correction | None = None
    """Of the policy loss, for samples of another policy."""
    loss: Implementation | None = None
    """Policy loss in place of the one that `actor` names."""


class ActorWorker(EngineWorker):
    """One process of the policy's training engine."""

    def __init__(self, process: ProcessContext, spec: ActorSpec):
        super().__init__(
            process,
            spec.actor.strategy,
            spec.model,
            engine_config(spec.actor.strategy, spec.actor),
            spec.actor.optim,
            head="policy",
            total_steps=spec.total_steps,
            field="actor_rollout_ref.model",
            seed=spec.seed,
        )
        self.spec = spec
        self.log_prob_batcher = self.micro_batcher(spec.log_prob, "log-probabilities of the actor")
        self.ref_batcher = (
            None if spec.ref is None else self.micro_batcher(spec.ref, "log-probabilities of the reference")
        )
        self.learner = self.make_learner(
            spec.plan, spec.skip_limits, what="update of the actor", role="actor", prefix="actor"
        )
        self.correct = self._corrector(spec.correction)
        self._outgoing: Iterator[Bucket | None] = iter(())
        self._sender: WeightsSender | None = None

    @register(dispatch_mode=mesh_mode("actor"), read_only=True)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """`old_log_probs` and `entropys` of the responses under the current weights."""
        return self._log_probs(batch, entropy=True).rename("log_probs", "old_log_probs")

    @register(dispatch_mode=mesh_mode("actor"), read_only=True)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_prob`: the policy without its adapters."""
        assert self.ref_batcher is not None, "the plan has a reference pass where one is asked for"
        ask = Ask(self.spec.temperature)
        output = forward_in_order(self.engine, batch, self.ref_batcher, ask, adapter=False)
        return output.rename("log_probs", "ref_log_prob")

    @register(dispatch_mode=mesh_mode("actor"), blocking=False, read_only=True, padding=False)
    def update(self, batch: DataProto, step: int) -> dict[str, Metric]:
        """Every optimizer step of training step `step`; rows come ordered by mini-batch.

        `meta_info[OLD_FROM]` says where the old log-probabilities come from, by default a pass of the actor.
        Where there was none, the first optimizer step compares its own with the generation engine's.
        """
        loss = partial(self._loss, batch.meta_info.get(OLD_FROM, OldFrom.RECOMPUTE))
        ask = Ask(self.spec.temperature, entropy=True)
        return self.learner.learn(batch, loss, step, ask=ask, correct=self.correct)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True)
    def send_bucket(
        self, number: int, version: int, max_bytes: int, dtype: str, checked: bool
    ) -> tuple[StoredValue, bool] | None:
        """Bucket `number` of the weights, and whether it is the last; on rank 0, None on the others.

        Buckets are sent in order, with calls of nothing else between them that changes weights: the tensors
        are gathered bucket by bucket. dtype: of the receiver, as in `rollout.dtype`.
        checked: with checksums.
        """
        if number == 0:
            how = Cut(version, max_bytes, resolve_dtype(dtype, self.process.device_type), checked)
            self._outgoing = buckets(self.engine.weights(to=0), how)
        bucket = next(self._outgoing)
        if bucket is not None and bucket.header.last:
            self._outgoing = iter(())  # it would keep the last bucket's tensors on the device
        return None if bucket is None else (StoredValue.of(bucket), bucket.header.last)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_weights_group(self) -> tuple[str, int]:
        """Where the receivers of weights find their group: an address and a port that other machines
        reach."""
        self._sender = WeightsSender(self.process)
        return self._sender.place

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def join_weights_group(self, world_size: int) -> bool:
        """Waits until all receivers have joined; whether they have."""
        assert self._sender is not None, "the group is opened first"
        return self._sender.join(world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True)
    def broadcast_weights(self, version: int, max_bytes: int, dtype: str, checked: bool) -> bool:
        """Sends all buckets, as in `send_bucket`, from rank 0; whether all of them have been sent."""
        how = Cut(version, max_bytes, resolve_dtype(dtype, self.process.device_type), checked)
        outgoing = cut(self.engine.weights(to=0), how)
        if self._sender is not None:
            return self._sender.send(outgoing)
        for _ in outgoing:
            pass
        return True

    def _log_probs(self, batch: DataProto, *, entropy: bool = False) -> DataProto:
        ask = Ask(self.spec.temperature, entropy=entropy)
        return forward_in_order(self.engine, batch, self.log_prob_batcher, ask)

    def _corrector(self, correction: Correction | None) -> Corrector | None:
        """None: nothing depends on a whole mini-batch."""
        if correction is None or not correction.needs_mini_batch:
            return None

        def log_probs(rows: DataProto) -> Tensor:
            inputs = rows.select(["prompts", "responses", "response_mask"])
            found: Tensor = self._log_probs(inputs).get("log_probs")
            return found

        return Corrector(correction, self.engine, log_probs)

    def _loss(self, old: OldFrom, denominators: Denominators, first: bool) -> LossFn:
        actor = self.spec.actor
        loss = ActorLoss(
            policy_loss=(self.spec.loss or POLICY_LOSSES[actor.policy_loss.loss_mode]).bound(actor),
            agg_mode=actor.loss_agg_mode,
            scale_factor=actor.loss_scale_factor or self.spec.response_tokens,
            entropy_coeff=actor.entropy_coeff,
            kl_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
            kl_type=actor.kl_loss_type,
            old_is_this_pass=old == OldFrom.FIRST_PASS,
            denominators=denominators,
            correction=self.spec.correction,
        )
        if not first or old == OldFrom.RECOMPUTE:
            return loss
        return _compared_with_rollout(
            loss, "old_log_probs" if old == OldFrom.ROLLOUT else "rollout_log_probs"
        )


def _compared_with_rollout(loss: ActorLoss, column: str) -> LossFn:
    """Adds how far sampled tokens' probabilities are from those of the generation engine, in `column`."""

    def compared(output: ModelOutput, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Metric]]:
        value, metrics = loss(output, columns)
        mask = columns["response_mask"].bool()
        assert output.log_probs is not None, "a policy gives log-probabilities"
        gap = (output.log_probs.detach().exp() - columns[column].exp()).abs()  # (B, R)
        found = probs_diff_metrics(gap[mask])
        if "replica" in columns:
            for number in columns["replica"].unique().tolist():
                of_replica = columns["replica"] == number
                found |= probs_diff_metrics(gap[of_replica][mask[of_replica]], number)
        return value, metrics | found

    return compared


def probs_diff_metrics(gap: Tensor, replica: int | None = None) -> dict[str, Metric]:
    """gap (N,): differences of sampled tokens' probabilities. replica: the process that sampled them."""
    count, center = len(gap), float(gap.mean()) if len(gap) else 0.0
    metrics = {
        probs_diff_name("mean", replica): mean(center, weight=count),
        probs_diff_name("max", replica): maximum(float(gap.max()) if count else 0.0),
    }
    if replica is None:
        std = float(gap.std()) if count > 1 else 0.0
        metrics[probs_diff_name("std")] = spread(std, count, center)
    return metrics
