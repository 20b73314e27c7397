"""The FSDP2 training engine: one rank of a sharded model, its optimizer and its schedule, on CPUs or GPUs.

In: micro-batches and a loss function. Out: log-probabilities or values, metrics, weights (see
`engine/base.py`). Left out on purpose: splitting batches (`engine/micro_batcher.py`), losses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hydraflow import metrics
from hydraflow.engine import optim as optimizers
from hydraflow.engine import process_group
from hydraflow.engine.base import (
    AS_CONFIGURED,
    LossFn,
    StepOptions,
    answers_of,
    columns_of,
    model_output,
    require_micro_batches,
)
from hydraflow.engine.config import FSDPConfig, OptimConfig
from hydraflow.engine.fsdp import checkpoint, export, lora
from hydraflow.engine.fsdp.build import build_model
from hydraflow.engine.fsdp.groups import RankGroups
from hydraflow.engine.fsdp.oom_recovery import CollectiveCounter, PassRunner
from hydraflow.engine.fsdp.passes import forget_gradients, forget_passes, train_without_noise
from hydraflow.engine.hf_files import save_whole
from hydraflow.engine.micro_batcher import InMicroBatches
from hydraflow.engine.offload import HOST, Offload
from hydraflow.engine.routes import PackedRoutes, Routes
from hydraflow.engine.sharded_checkpoint import ShardedSnapshot
from hydraflow.engine.token_exchange import Output, Ulysses
from hydraflow.metrics import Metric
from hydraflow.models.adapters import Form
from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.models.config import ModelConfig
from hydraflow.models.heads import shared_vocabulary
from hydraflow.models.packing import PackedBatch, pack_rows
from hydraflow.models.routers import HFRouters
from hydraflow.models.routing import ROUTES, Tally
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates


class FSDPEngine(InMicroBatches):
    """A `TrainEngine`. torch.distributed must be ready (`process_group.start`).

    `head` is policy or value. Without `optim` the model is frozen and only `forward` and `weights` may be
    called. `field` is the configuration key of `model`, for error messages; `total_steps` is the length of
    the learning-rate schedule.
    """

    def __init__(
        self,
        model: ModelConfig,
        fsdp: FSDPConfig,
        optim: OptimConfig | None,
        *,
        head: str,
        device: torch.device,
        total_steps: int = 1,
        field: str = "actor_rollout_ref.model",
        seed: int = 0,
    ):
        self._model, self._fsdp, self._optim = model, fsdp, optim
        self._head, self._device, self._field = head, device, field
        self._total_steps, self._step = total_steps, 0
        self._groups = RankGroups.make(fsdp, device.type)
        self.module, self._padded = build_model(
            model,
            fsdp,
            head=head,
            groups=self._groups,
            device=device,
            trained=optim is not None,
            field=field,
            seed=seed,
        )
        rests = fsdp.param_offload and not fsdp.offload_policy and device.type != "cpu"
        # parameters stay the same objects, so the optimizer keeps its state for them
        to_host, to_device = partial(self.module.to, HOST), partial(self.module.to, device)
        self._param_offload = Offload(to_host, to_device, device, rests=rests)
        self._collectives = CollectiveCounter(self.module, device, self._groups.replicas)
        sequence = self._groups.sequence
        self._ulysses = None if sequence is None else Ulysses(sequence, self._collectives.is_due)
        self._norm: float | None = None
        """Norm of the gradient that `optimizer_step` will apply."""
        self._optimizer = None
        if optim is not None:
            self._optimizer = optimizers.make_optimizer(self.module.parameters(), optim)
            self._set_lr()

    def coordinates(self) -> Coordinates:
        share, place = divmod(dist.get_rank(), self._groups.sharers)
        return Coordinates(share, dist.get_world_size() // self._groups.sharers, place == 0)

    @property
    def has_routers(self) -> bool:
        return bool(self._routers.replays)

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[DataProto], ask: Ask = LOG_PROBS, *, adapter: bool = True
    ) -> DataProto:
        """See `TrainEngine`. Float32 columns on the CPU (float64 when the model computes in it)."""
        require_micro_batches(micro_batches)
        self._param_offload.wake()
        self.module.eval()
        runner: PassRunner[Output] = PassRunner(self._collectives)
        recorded: list[PackedRoutes] = []

        def work(part: DataProto) -> Output:
            batch = self._pack(part, self._device, trained=False)
            line = self._route(part, batch, record=ask.routes)
            output = self._run(part, batch, ask, trained=False)
            if line is not None and ask.routes:
                recorded.append(line)
            return output

        try:
            with nullcontext() if adapter else lora.adapters_off(self.module):
                for data in micro_batches:
                    runner.run(data, work)
        finally:
            self._forget_passes(replayed=ask.routes or ROUTES in micro_batches[0].keys())
        (oom_ranks,) = process_group.all_reduce(torch.tensor([runner.ran_out()])).tolist()
        answers = answers_of(micro_batches, runner.results(oom_ranks), self._head, ask)
        if not recorded:
            return answers
        return answers.union(DataProto.from_dict({ROUTES: self._routes.column(micro_batches, recorded)}))

    def forward_backward(
        self, micro_batches: Sequence[DataProto], loss_fn: LossFn, ask: Ask = LOG_PROBS
    ) -> dict[str, Metric]:
        """See `TrainEngine`. Only tokens whose response_mask is set pass through the head."""
        require_micro_batches(micro_batches)
        assert self._optim is not None, "a frozen model is not trained"
        self._param_offload.wake()
        train_without_noise(self.module)
        runner: PassRunner[dict[str, Metric]] = PassRunner(self._collectives)
        tally = Tally()
        learn = partial(self._learn, loss_fn=loss_fn, ask=ask, tally=tally)
        # an earlier call's gradient is already reduced, and must survive an error
        earlier = {p: p.grad for p in self.module.parameters() if p.grad is not None}
        replays = ROUTES in micro_batches[0].keys()
        try:
            self.module.zero_grad(set_to_none=True)
            for data in micro_batches:
                self._set_gradient_sync(last=data is micro_batches[-1])
                runner.run(data, learn)
            for parameter, gradient in earlier.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            square, oom_ranks = process_group.all_reduce(
                torch.tensor([self._local_square(), runner.ran_out()], dtype=torch.float64)
            ).tolist()
            found = metrics.merge(runner.results(oom_ranks))
            if replays:
                self._routers.begin(None)
                found["actor/router_replay_changed"] = self._routes.changed_share(tally)
        except BaseException:
            self._forget_passes(replayed=replays)
            forget_gradients(self.module)
            for parameter, gradient in earlier.items():
                parameter.grad = gradient
            raise
        self._norm = math.sqrt(square / self._groups.copies)  # every copy has the whole gradient
        return found

    @torch.no_grad()
    def optimizer_step(self, options: StepOptions = AS_CONFIGURED) -> dict[str, float]:
        """See `TrainEngine`. All ranks see the same norm, so either all skip or none."""
        assert self._optimizer is not None and self._optim is not None, "a frozen model is not trained"
        assert self._norm is not None, "optimizer_step needs a gradient"
        self._param_offload.wake()
        norm, self._norm = self._norm, None
        finite = norm < float("inf")  # false for NaN, too
        max_norm = self._optim.clip_grad if options.clip_grad is None else options.clip_grad
        if finite:
            if norm > max_norm:
                # epsilon as in torch's clip_grad_norm_
                torch._foreach_mul_(self._gradients(), max_norm / (norm + 1e-6))
            self._move_optimizer_state(self._device)
            with options.applied(self._optimizer.param_groups):
                self._optimizer.step()
            if self._fsdp.optimizer_offload:
                self._move_optimizer_state(HOST)
        self._optimizer.zero_grad(set_to_none=True)
        lr = self._lr() if options.lr is None else options.lr
        return {"grad_norm": norm, "lr": lr, "skipped": float(not finite)}

    def lr_step(self) -> None:
        self._step += 1
        self._set_lr()

    def weights(
        self, *, to: int | None = None, form: Form = Form.MERGED
    ) -> Iterator[tuple[str, torch.Tensor]]:
        with self._param_offload.borrowed():
            yield from export.stream(self.module, to=to, form=form)
        self._param_offload.rest()

    def reduce(self, values: torch.Tensor, how: str = "sum") -> torch.Tensor:
        return process_group.all_reduce(values, how, self._groups.data)

    def on_all_stages(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def save_hf(self, directory: str | Path) -> None:
        weights = self.weights(to=0)
        save_whole(lambda: self.module, self._model, weights, Path(directory), field=self._field)

    def snapshot(self, contents: Collection[str]) -> ShardedSnapshot:
        assert self._optimizer is not None, "a frozen model has no state to save"
        self._param_offload.wake()
        forget_passes(self.module)
        return checkpoint.snapshot(
            self.module,
            self._model,
            self._optimizer,
            self._step,
            contents,
            head=self._head,
            field=self._field,
        )

    def load(self, directory: str | Path, contents: Collection[str]) -> None:
        assert self._optimizer is not None, "a frozen model has no state to save"
        self._param_offload.wake()
        forget_passes(self.module)
        step = checkpoint.load(self.module, self._optimizer, Path(directory), contents)
        if self._fsdp.optimizer_offload:
            self._move_optimizer_state(HOST)
        if step is not None:
            self._step = step
            self._set_lr()

    def stored_bytes(self, contents: Collection[str]) -> int:
        assert self._optimizer is not None, "a frozen model has no state to save"
        return checkpoint.stored_bytes(self.module, self._optimizer, contents, copies=self._groups.copies)

    def rest(self) -> None:
        self._param_offload.rest()

    def _learn(self, data: DataProto, loss_fn: LossFn, ask: Ask, tally: Tally) -> dict[str, Metric]:
        """Adds one micro-batch's share of the gradient."""
        batch = self._pack(data, self._device, trained=True)
        self._route(data, batch, tally)
        main, entropies = self._run(data, batch, ask, trained=True)
        output = model_output(batch, main, entropies, head=self._head)
        loss, reported = loss_fn(output, columns_of(data, batch.shape[1], self._device))
        # if the loss ignores entropies, their graph would keep a head's logits alive: two copies per token
        del main, entropies, output
        loss.backward()
        return reported

    @cached_property
    def _routers(self) -> HFRouters:
        return HFRouters(self.module.hf)

    @cached_property
    def _routes(self) -> Routes:
        routers, sequence = self._routers, self._groups.sequence
        return Routes(
            range(len(routers.replays)),
            routers.experts,
            routers.chosen,
            self._device,
            part=0 if sequence is None else sequence.rank(),
            parts=self._groups.sharers,
            groups=() if sequence is None else (sequence,),
        )

    def _route(
        self, data: DataProto, batch: PackedBatch, tally: Tally | None = None, *, record: bool = False
    ) -> PackedRoutes | None:
        """Prepares the routers for the next line: to replay the rows' experts if they are given, or else to
        record their choices if `record`. Returns None if neither."""
        given = data.get(ROUTES) if ROUTES in data.keys() else None
        if given is None and not record:
            return None
        line = self._routes.begin(batch, given, tally)
        self._routers.begin(line)
        return line

    def _forget_passes(self, *, replayed: bool) -> None:
        forget_passes(self.module)
        if replayed:
            self._routers.begin(None)

    def _run(self, data: DataProto, batch: PackedBatch, ask: Ask, *, trained: bool) -> Output:
        """The model's outputs for all response tokens, or for the trained ones."""
        if self._ulysses is None:
            return self.module(batch, ask)
        instead_of = self._collectives.stands_in_for
        real = None if instead_of is None else self._pack(instead_of, torch.device("cpu"), trained=trained)
        return self._ulysses.compute(batch, partial(self.module, ask=ask), real)

    def _pack(self, data: DataProto, device: torch.device, *, trained: bool) -> PackedBatch:
        vocabulary = shared_vocabulary(self.module)
        return pack_rows(data, device=device, trained=trained, vocabulary=vocabulary, padded=self._padded)

    def _set_gradient_sync(self, *, last: bool) -> None:
        """Reduces gradients in the last micro-batch only. Until then weights stay gathered, too, unless
        reshard_after_forward is set."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last)
        self.module.set_reshard_after_backward(last or self._fsdp.reshard_after_forward)

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the gradient."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return [optimizers.shard_of(gradient) for gradient in gradients]

    @torch.no_grad()
    def _local_square(self) -> float:
        """Squared 2-norm of this rank's shards of the gradient."""
        gradients = self._gradients()
        if not gradients:
            return 0.0
        accumulate = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
        return torch.stack(torch._foreach_norm(gradients, 2, dtype=accumulate)).double().square().sum().item()

    def _lr(self) -> float:
        assert self._optim is not None
        return optimizers.lr_at(self._optim, self._step, self._total_steps)

    def _set_lr(self) -> None:
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr()

    def _move_optimizer_state(self, device: torch.device) -> None:
        """Moves the moments only, not AdamW's step count. With offload_policy they stay on the host."""
        assert self._optimizer is not None
        if self._fsdp.offload_policy:
            return
        for state in self._optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(device)
