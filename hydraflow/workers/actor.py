"""The policy being trained: log-probabilities of the samples, and updates.

In: trajectories (`prompts`, `responses`, `response_mask` and the loss's columns). Out: `old_log_probs`,
`ref_log_prob`, metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hydraflow.algorithms.actor_loss import ActorLoss
from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.config import POLICY_LOSSES, Loss, OldFrom
from hydraflow.algorithms.correction import Correction
from hydraflow.algorithms.diagnostics import probs_diff_name
from hydraflow.algorithms.distillation.terms import Distillation
from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.batch_plan.roles import replay_problems
from hydraflow.device import device_identity, resolve_dtype, return_memory
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.worker import ProcessContext
from hydraflow.engine.base import LossFn, ModelOutput
from hydraflow.engine.config import engine_config
from hydraflow.errors import ConfigError
from hydraflow.metrics import Metric, maximum, mean, spread
from hydraflow.models.adapters import Form
from hydraflow.models.ask import Ask
from hydraflow.models.config import ModelConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import from_parts, parts
from hydraflow.weights.buckets import BucketOptions, into_buckets
from hydraflow.weights.connection import Listener
from hydraflow.weights.slots import Slots
from hydraflow.workers.config import ActorConfig
from hydraflow.workers.correcting import Corrector
from hydraflow.workers.engine_worker import DATA_RANKS
from hydraflow.workers.skipping import SkipLimits
from hydraflow.workers.token_selection import TokenSelector
from hydraflow.workers.training import Change, TrainedWorker, UpdateLoss
from hydraflow.workers.weights_broadcast import WeightsSender
from hydraflow.workers.weights_shared import SlotOutlet
from hydraflow.workers.weights_transfer import WAIT_SHARE, Outgoing, send_all

OLD_FROM, ENTROPY_COEFF = "old_from", "entropy_coeff"
"""Keys of a batch's meta_info."""


@dataclass(frozen=True)
class SendOptions:
    """Options of a weight transfer to the generation engine."""

    version: int
    """Version of the weights: number of training steps."""
    max_bytes: int
    """Bucket size."""
    dtype: str
    """Dtype of the receiver, as in `rollout.dtype`."""
    checked: bool
    """Whether to send checksums."""
    form: Form
    """Whether adapters are merged into the weights, sent after them, or sent alone."""


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
    """Seeds the initialisation of new weights (adapters), and the loss's random draws."""
    skip_limits: SkipLimits = SkipLimits()
    """Limits on optimizer steps skipped for a non-finite gradient."""
    correction: Correction | None = None
    """Rollout correction of the policy loss."""
    distillation: Distillation | None = None
    """Distillation term of the loss; None: no term."""
    sum_pi_squared: bool = False
    """Whether the log-prob pass returns `sum_pi_squared` instead of the entropies."""
    loss: Loss | None = None
    """The policy loss; None: the one that `actor` names."""


class ActorWorker(TrainedWorker):
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
        if problems := replay_problems(spec.actor, has_routers=self.engine.has_routers):
            raise ConfigError(problems)
        self.log_prob_batcher = self.micro_batcher(spec.log_prob, "log-probabilities of the actor")
        self.ref_batcher = (
            None if spec.ref is None else self.micro_batcher(spec.ref, "log-probabilities of the reference")
        )
        self.learner = self.make_learner(
            spec.plan, spec.skip_limits, what="update of the actor", role="actor", prefix="actor"
        )
        self.correct: Corrector | None = None
        """The correction of whole mini-batches; None: not needed."""
        if spec.correction is not None and spec.correction.needs_mini_batch:
            self.correct = Corrector(spec.correction, self.engine, self._current_log_probs)
        self.policy_loss = spec.loss or POLICY_LOSSES[spec.actor.policy_loss.loss_mode]
        self._listener: Listener | None = None
        self._slots: Slots | None = None
        self._sender: WeightsSender | None = None

    @register(dispatch_mode=DATA_RANKS, read_only=True)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """`old_log_probs` and `entropys`, or `sum_pi_squared`, of the responses under the current weights;
        with routing replay R2 also `routed_experts`."""
        asked, routes = self.spec.sum_pi_squared, self.spec.actor.router_replay.by_actor
        ask = Ask(self.spec.temperature, entropy=not asked, sum_pi_squared=asked, routes=routes)
        output = self.infer(batch, self.log_prob_batcher, ask, name="actor")
        return output.rename("log_probs", "old_log_probs")

    @register(dispatch_mode=DATA_RANKS, read_only=True)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_prob`: the policy without its adapters."""
        assert self.ref_batcher is not None, "the plan has a reference pass where one is asked for"
        ask = Ask(self.spec.temperature)
        output = self.infer(batch, self.ref_batcher, ask, name="ref", adapter=False)
        return output.rename("log_probs", "ref_log_prob")

    def update_loss(self, facts: Mapping[str, Any], step: int) -> UpdateLoss:
        """See `TrainedWorker`. `facts[ENTROPY_COEFF]` is the step's coefficient of the entropy bonus, by
        default that of the configuration. `facts[OLD_FROM]` says where the old log-probabilities come from,
        by default a pass of the actor. Without that pass, the first optimizer step compares its own
        log-probabilities with the generation engine's.
        """
        coefficient = facts.get(ENTROPY_COEFF, self.spec.actor.entropy_coeff)
        make = partial(self._loss, facts.get(OLD_FROM, OldFrom.RECOMPUTE), coefficient)
        changes: list[Change] = [] if self.correct is None else [self.correct]
        if self.policy_loss.chooses:
            choice = self.policy_loss.chooses.bound(self.spec.actor.policy_loss)
            seed = self.spec.seed, step
            changes.append(TokenSelector(choice, self.engine, self._current_log_probs, seed))
        ask = Ask(self.spec.temperature, entropy=True, entropy_is_trained=coefficient != 0)
        return UpdateLoss(make, ask, changes)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def sending_device(self) -> str:
        """The identity of the device that sends the weights; empty for a CPU."""
        return device_identity(self.process.device())

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_weights_listener(self) -> str:
        """Opens rank 0's socket for the receivers of the first transfer, and returns its address;
        `share_weights` returns that of the next."""
        self._listener = Listener()
        return self._listener.name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True)
    def share_weights(
        self, receivers: Sequence[int], on_device: bool, options: SendOptions
    ) -> tuple[bool, str]:
        """Sends all buckets from rank 0 to these generation processes, through slots in host or device
        memory. Returns whether all have been read, and rank 0's address for the next transfer; meaningless on
        other ranks.
        """
        outgoing = self._buckets(options)
        if self._listener is None:
            return send_all(outgoing, None), ""
        self._slots = self._slots or Slots(self._bucket_device(on_device))
        seconds = WAIT_SHARE * self.process.timeout_s
        with closing(SlotOutlet(self._slots, self._listener, receivers, seconds)) as outlet:
            whole = send_all(outgoing, outlet)
        if on_device:  # other roles need the device memory
            del outlet
            self._slots = None
            return_memory(self.process.device_type)
        return whole, self.open_weights_listener()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_weights_group(self, on_device: bool) -> tuple[str, int]:
        """Opens the rendezvous of the broadcast group, on devices or hosts; returns an address and port that
        other machines can reach."""
        self._sender = WeightsSender(self.process, self._bucket_device(on_device))
        return self._sender.place

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def join_weights_group(self, world_size: int) -> bool:
        """Waits for the receivers to join; returns whether all have."""
        assert self._sender is not None, "open_weights_group comes first"
        return self._sender.join(world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True)
    def broadcast_weights(self, options: SendOptions) -> bool:
        """As `share_weights`, in the group that the receivers have joined."""
        outgoing = self._buckets(options)
        return send_all(outgoing, None) if self._sender is None else self._sender.send(outgoing)

    def _buckets(self, options: SendOptions) -> Outgoing:
        dtype = resolve_dtype(options.dtype, self.process.device_type)
        return into_buckets(
            self.engine.weights(to=0, form=options.form),
            BucketOptions(options.version, options.max_bytes, dtype, options.checked),
        )

    def _bucket_device(self, on_device: bool) -> torch.device:
        """Where buckets are filled: this process's device, or the host."""
        return self.process.device() if on_device else torch.device("cpu")

    def _current_log_probs(self, rows: DataProto) -> Tensor:
        """Log-probabilities of the responses under the current weights, ragged (B, R)."""
        names = ["prompts", "responses", "response_mask", "routed_experts", "group"]
        inputs = rows.select([name for name in names if name in rows.keys()])
        ask = Ask(self.spec.temperature)
        found, lengths = parts(self.engine.forward_rows(inputs, self.log_prob_batcher, ask).get("log_probs"))
        return from_parts(self.engine.on_all_stages(found), lengths)

    def _loss(self, old: OldFrom, entropy_coeff: float, denominators: Denominators, first: bool) -> LossFn:
        actor = self.spec.actor
        loss = ActorLoss(
            policy_loss=self.policy_loss.bound(actor, actor.policy_loss),
            loss_columns=self.policy_loss.columns,
            agg_mode=actor.loss_agg_mode,
            scale_factor=actor.loss_scale_factor or self.spec.response_tokens,
            entropy_coeff=entropy_coeff,
            kl_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
            kl_type=actor.kl_loss_type,
            old_is_this_pass=old == OldFrom.FIRST_PASS,
            denominators=denominators,
            correction=self.spec.correction,
            distillation=self.spec.distillation,
        )
        found: LossFn = loss
        if first and old != OldFrom.RECOMPUTE:
            column = "old_log_probs" if old == OldFrom.ROLLOUT else "rollout_log_probs"
            found = _compared_with_rollout(loss, column)
        distillation = self.spec.distillation
        over_vocabulary = distillation is not None and distillation.config.over_vocabulary
        return _own_token_first(found) if over_vocabulary else found


def _own_token_first(loss: LossFn) -> LossFn:
    """Wraps a loss for outputs with several target tokens per position: the first is the response's own and
    becomes `log_probs`; the others become `target_log_probs`."""

    def of_own(output: ModelOutput, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Metric]]:
        every = output.log_probs  # (B, R, 1 + K)
        assert every is not None, "a policy returns log-probabilities"
        return loss(replace(output, log_probs=every[..., 0], target_log_probs=every[..., 1:]), columns)

    return of_own


def _compared_with_rollout(loss: ActorLoss, column: str) -> LossFn:
    """Wraps a loss to also report how far the sampled tokens' probabilities are from the generation engine's,
    in `column`."""

    def compared(output: ModelOutput, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Metric]]:
        value, metrics = loss(output, columns)
        mask = columns["response_mask"].bool()
        assert output.log_probs is not None, "a policy returns log-probabilities"
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
