"""The Megatron-Core training engine: one rank of a model that is divided among tensor-parallel ranks and
pipeline stages; data ranks have different rows, and context-parallel ranks share the tokens of their lines.

In: micro-batches and a loss function. Out: log-probabilities or values, metrics, weights (see
`engine/base.py`). Losses exist on the last stage; Megatron-Core's schedule moves activations and gradients
between stages. Left out on purpose: LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from hydraflow import metrics
from hydraflow.device import gpu_count
from hydraflow.engine import optim as schedule
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
from hydraflow.engine.config import MegatronConfig, OptimConfig
from hydraflow.engine.hf_files import save_whole
from hydraflow.engine.megatron import checkpoint, export, parallel
from hydraflow.engine.megatron.architecture import section_of
from hydraflow.engine.megatron.balance import BalancedRows, trained
from hydraflow.engine.megatron.build import build_model
from hydraflow.engine.megatron.ddp_config import ddp_config
from hydraflow.engine.megatron.experts import counting, reset_counts, take_load, update_biases
from hydraflow.engine.megatron.head import VocabularyParallelHead, VocabularyShare
from hydraflow.engine.megatron.names import vocabulary_share
from hydraflow.engine.megatron.oom_recovery import OomRecovery
from hydraflow.engine.megatron.optimizer import CoreOptimizer
from hydraflow.engine.megatron.packed_line import PackedLine
from hydraflow.engine.megatron.repeatable import require_repeatable
from hydraflow.engine.megatron.storages import GradientBuffers, Storages
from hydraflow.engine.micro_batcher import InMicroBatches
from hydraflow.engine.offload import Offload
from hydraflow.engine.routes import PackedRoutes, Routes
from hydraflow.engine.sharded_checkpoint import ShardedSnapshot
from hydraflow.engine.token_exchange import Alone, Output, Share, Ulysses
from hydraflow.errors import ConfigError
from hydraflow.metrics import Metric
from hydraflow.models.adapters import Form
from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.models.attention import pick
from hydraflow.models.chunks import head_chunk
from hydraflow.models.config import ModelConfig
from hydraflow.models.packing import PackedBatch, pack_rows, read_tokens
from hydraflow.models.routing import ROUTES, Tally
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates


class MegatronEngine(InMicroBatches):
    """A `TrainEngine`. Its arguments are those of `FSDPEngine`."""

    def __init__(
        self,
        model: ModelConfig,
        settings: MegatronConfig,
        optim: OptimConfig | None,
        *,
        head: str,
        device: torch.device,
        total_steps: int = 1,
        field: str = "actor_rollout_ref.model",
        seed: int = 0,
    ):
        if device.type == "cpu" and gpu_count():
            rule = "Megatron-Core uses the GPUs that it sees"
            remedy = "CUDA_VISIBLE_DEVICES= before the command, or strategy=fsdp2"
            raise ConfigError.one("trainer.device", "cpu", rule, remedy)
        self._model, self._settings, self._optim = model, settings, optim
        self._head, self._device, self._field = head, device, field
        self._total_steps, self._step = total_steps, 0
        self._place = place = parallel.start(settings)
        self._built = build_model(model, settings, place, head=head, device=device, field=field)
        self._trunk = self._built.trunk
        self.has_routers = self._built.names.shape.mixture is not None
        self._outline = export.outline(self._built, place)
        self._share = self._vocabulary_share()
        group = parallel_state.get_context_parallel_group()
        self._ulysses = Ulysses(group) if place.context_size > 1 else None
        core = self._trunk.config
        self._recovery = OomRecovery(place)
        core.finalize_model_grads_func = partial(_finish, self._recovery)
        self._routes = self._make_routes()
        self._ddp: list[DistributedDataParallel] | None = None
        self._optimizer: CoreOptimizer | None = None
        if optim is not None:
            buffers = ddp_config(settings, section=section_of(field))
            self._ddp = [DistributedDataParallel(core, buffers, chunk) for chunk in self._built.chunks]
            self._optimizer = CoreOptimizer(self._ddp, optim, settings)
            self._set_lr()
        self._make_offloads()
        if self.has_routers:
            require_repeatable(
                self.forward,
                self._built.names.shape.vocabulary,
                core.params_dtype,
                section=section_of(field),
                settings=settings,
            )

    def coordinates(self) -> Coordinates:
        """See `TrainEngine`. Answers are those of the last stage."""
        place = self._place
        return Coordinates(
            place.data, place.data_size, place.tensor == 0 and place.context == 0 and place.is_last
        )

    # --- passes

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[DataProto], ask: Ask = LOG_PROBS, *, adapter: bool = True
    ) -> DataProto:
        """See `TrainEngine`. Ranks other than the last stage's return zeros."""
        require_micro_batches(micro_batches)
        ask.require_vocabulary(self._built.names.shape.vocabulary)
        assert adapter, "there are no adapters"
        self._weights.wake()
        chunks = list(self._built.chunks)
        for chunk in chunks:
            chunk.eval()
        # keyed by micro-batch: a stage's chunks record different layers of the same lines
        recorded: dict[int, PackedRoutes] = {}

        def step(
            batches: Iterator[tuple[DataProto, bool]], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Any]:
            data, _ = next(batches)
            batch = self._pack(data, trained=False)
            routes = self._routes_of(data, batch)
            if ask.routes and routes is None:
                assert self._routes is not None, "a dense model has no routers"
                line = self._routes.begin(batch, None)
                routes = recorded.setdefault(id(data), line)
            share = self._share_of(batch)
            hidden = self._run(share.part, model, routes)

            def outputs(hidden: torch.Tensor, non_loss_data: bool = True) -> Output:
                return share.whole(self._read(hidden, share.part, ask))

            return hidden, outputs

        # the schedule may have filled its last group with more micro-batches
        results = self._schedule(step, micro_batches, chunks, forward_only=True)[: len(micro_batches)]
        if not self._place.is_last:
            name = "target_tokens" if "target_tokens" in micro_batches[0].keys() else "responses"
            tokens = torch.cat([ragged.parts(data.get(name))[0] for data in micro_batches])
            results = [_zeros(tokens, ask)]
        answers = answers_of(micro_batches, results, self._head, ask)
        if self._routes is None or not recorded:
            return answers
        routed = self._routes.column(micro_batches, [recorded[id(data)] for data in micro_batches])
        return answers.union(DataProto.from_dict({ROUTES: routed}))

    def forward_backward(
        self, micro_batches: Sequence[DataProto], loss_fn: LossFn, ask: Ask = LOG_PROBS
    ) -> dict[str, Metric]:
        """See `TrainEngine`. Only ranks of the last stage have the loss's metrics."""
        require_micro_batches(micro_batches)
        ask.require_vocabulary(self._built.names.shape.vocabulary)
        assert self._ddp is not None, "a frozen model is not trained"
        self._weights.wake()
        self._gradients.wake()
        balance = self._balance_of_rows(micro_batches)
        earlier = self._take_gradient()
        self._holds_gradient = True
        for chunk in self._ddp:
            chunk.train()
        tally = Tally()

        def step(
            batches: Iterator[tuple[DataProto, bool]], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Any]:
            data, counts = next(batches)
            batch = self._pack(data, trained=True)
            share = self._share_of(batch)
            routes = self._routes_of(data, batch, tally if counts else None)
            more = self._router_inputs(data, batch, balance) if counts else {}
            with counting(model) if counts else nullcontext():
                hidden = self._run(share.part, model, routes, **more)

            def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Metric]]:
                main, more = share.whole(self._read(hidden, share.part, ask))
                output = model_output(batch, main, more, head=self._head)
                value, reported = loss_fn(output, columns_of(data, batch.shape[1], self._device))
                one = torch.ones((), dtype=torch.int, device=self._device)
                # a filler micro-batch needs a backward pass too, but with a gradient of 0
                return (value, one, reported) if counts else (value * 0.0, one, {})

            return hidden, loss

        try:
            found = metrics.merge(self._schedule(step, micro_batches, self._ddp, forward_only=False))
        except BaseException:
            self._drop_gradient()
            self._add_gradient(earlier)
            reset_counts(self._built.chunks)
            raise
        self._add_gradient(earlier)
        if self.has_routers:
            found |= self._router_metrics(balance, tally if ROUTES in micro_batches[0].keys() else None)
        return found

    @torch.no_grad()
    def optimizer_step(self, options: StepOptions = AS_CONFIGURED) -> dict[str, float]:
        """See `TrainEngine`. All ranks see the same norm, so either all skip or none."""
        assert self._optimizer is not None and self._ddp is not None, "a frozen model is not trained"
        self._weights.wake()
        self._optimizer_state.wake()
        norm = self._optimizer.step(options)
        rate = self._settings.moe_router_bias_update_rate if math.isfinite(norm) else 0.0
        update_biases(self._built.chunks, rate)
        self._drop_gradient()
        self._optimizer_state.rest()
        lr = self._lr() if options.lr is None else options.lr
        return {"grad_norm": norm, "lr": lr, "skipped": float(not math.isfinite(norm))}

    def lr_step(self) -> None:
        self._step += 1
        self._set_lr()

    def reduce(self, values: torch.Tensor, how: str = "sum") -> torch.Tensor:
        return process_group.all_reduce(values, how, parallel_state.get_data_parallel_group())

    def on_all_stages(self, values: torch.Tensor) -> torch.Tensor:
        stages = parallel_state.get_pipeline_model_parallel_group()
        return process_group.all_reduce(values, "sum", stages).to(values)

    # --- weights and checkpoints

    def weights(
        self, *, to: int | None = None, form: Form = Form.MERGED
    ) -> Iterator[tuple[str, torch.Tensor]]:
        assert form == Form.MERGED, "there are no adapters"
        with self._weights.borrowed():
            yield from export.stream(self._built, self._outline, self._place, self._settings, to=to)
        self._weights.rest()

    def save_hf(self, directory: str | Path) -> None:
        shape = partial(export.empty_model, self._built, self._model, self._head)
        save_whole(shape, self._model, self.weights(to=0), Path(directory), field=self._field)

    def snapshot(self, contents: Collection[str]) -> ShardedSnapshot:
        assert self._optimizer is not None, "a frozen model has no state to save"
        with self._weights.borrowed():
            self._optimizer_state.wake()
            found = checkpoint.snapshot(
                self._built,
                self._model,
                self._optimizer,
                self._step,
                contents,
                weights=self.weights(to=0),
                head=self._head,
                field=self._field,
            )
        self._optimizer_state.rest()
        return found

    def load(self, directory: str | Path, contents: Collection[str]) -> None:
        assert self._optimizer is not None, "a frozen model has no state to save"
        self._weights.wake()
        self._optimizer_state.wake()
        step = checkpoint.load(self._built, self._optimizer, Path(directory), contents, head=self._head)
        self._optimizer_state.rest()
        if step is not None:
            self._step = step
            self._set_lr()

    def stored_bytes(self, contents: Collection[str]) -> int:
        return checkpoint.stored_bytes(self._built, contents)

    def rest(self) -> None:
        """See `TrainEngine`. A gradient that has not been applied yet stays on the device."""
        self._weights.rest()
        if not self._holds_gradient:
            self._gradients.rest()

    def _make_offloads(self) -> None:
        settings, optimizer = self._settings, self._optimizer

        def offload(memory: Storages | GradientBuffers, *, wanted: bool) -> Offload:
            rests = wanted and self._device.type != "cpu"
            return Offload(memory.to_host, memory.to_device, self._device, rests=rests)

        weights = Storages(lambda: (one for chunk in self._built.chunks for one in chunk.parameters()))
        self._weights = offload(weights, wanted=settings.param_offload)
        self._gradients = offload(GradientBuffers(self._ddp or ()), wanted=settings.grad_offload)
        self._holds_gradient = False
        state = Storages(tuple if optimizer is None else optimizer.own_tensors)
        self._optimizer_state = offload(state, wanted=settings.optimizer_offload)
        self._optimizer_state.rest()

    # --- one micro-batch

    def _schedule(
        self, step: Any, micro_batches: Sequence[DataProto], chunks: Sequence[Any], *, forward_only: bool
    ) -> Any:
        """Runs Megatron-Core's schedule over the micro-batches; returns the last stage's results. `step` gets
        (micro-batch, whether it counts): the interleaved schedule needs a multiple of the number of stages,
        so the last group is filled up with micro-batches that do not count."""
        run_schedule = get_forward_backward_func()
        each = [(data, True) for data in micro_batches]
        if len(chunks) > 1:
            each += [(micro_batches[0], False)] * (-len(each) % self._place.stages)
        iterators = [iter(each) for _ in chunks]

        def passes() -> Any:
            found = run_schedule(
                forward_step_func=step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=list(chunks),
                num_microbatches=len(each),
                seq_length=1,  # stages exchange the real lengths
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
            if forward_only:  # training passes agree before gradients are summed
                self._recovery.agree()
            return found

        return self._recovery.run(passes)

    def _take_gradient(self) -> list[torch.Tensor]:
        """Moves the gradient of earlier calls out of the buffers: it is already reduced over ranks, and must
        not be reduced twice."""
        if not self._holds_gradient:
            return []
        earlier = [buffer.grad_data.clone() for buffer in self._gradient_buffers()]
        self._drop_gradient()
        return earlier

    def _add_gradient(self, earlier: list[torch.Tensor]) -> None:
        if not earlier:
            return
        for buffer, gradient in zip(self._gradient_buffers(), earlier, strict=True):
            buffer.grad_data.add_(gradient)
        self._holds_gradient = True

    def _gradient_buffers(self) -> list[Any]:
        assert self._ddp is not None, "a frozen model has no gradient"
        return [buffer for one in self._ddp for buffer in (*one.buffers, *one.expert_parallel_buffers)]

    def _drop_gradient(self) -> None:
        assert self._optimizer is not None and self._ddp is not None, "a frozen model is not trained"
        self._optimizer.zero_grad()
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        self._holds_gradient = False

    def _pack(self, data: DataProto, *, trained: bool) -> PackedBatch:
        self._recovery.current = data
        tensor = self._place.tensor_size if self._trunk.config.sequence_parallel else 1
        multiple_of = tensor * self._place.context_size
        padded = not self._model.use_remove_padding
        found = pack_rows(
            data,
            device=self._device,
            trained=trained,
            vocabulary=self._built.names.shape.vocabulary,
            padded=padded,
            multiple_of=multiple_of,
        )
        return found.in_a_line(multiple_of) if padded else found

    def _make_routes(self) -> Routes | None:
        """None: there are no experts."""
        mixture, place = self._built.names.shape.mixture, self._place
        if mixture is None:
            return None
        slices = place.tensor_size if self._trunk.config.sequence_parallel else 1
        stages_and_tensors = parallel_state.get_model_parallel_group()
        return Routes(
            [number for number, has_experts in enumerate(mixture.layers, 1) if has_experts],
            mixture.count,
            mixture.chosen,
            self._device,
            part=place.context * slices + place.tensor % slices,
            parts=place.context_size * slices,
            groups=(stages_and_tensors, parallel_state.get_context_parallel_group()),
        )

    def _routes_of(
        self, data: DataProto, batch: PackedBatch, tally: Tally | None = None
    ) -> PackedRoutes | None:
        """The experts that these rows must take; None: they are not given."""
        if ROUTES not in data.keys():
            return None
        assert self._routes is not None, "a dense model has no routers"
        return self._routes.begin(batch, data.get(ROUTES), tally)

    def _balance_of_rows(self, micro_batches: Sequence[DataProto]) -> float:
        """Weight of a row's balancing loss per layer: the coefficient divided by the trained rows of all data
        ranks. 0: no such loss. Collective if there is one."""
        settings = self._settings
        if settings.moe_router_load_balancing_type == "none" or not settings.moe_aux_loss_coeff:
            return 0.0
        rows = torch.stack([trained(data).sum() for data in micro_batches]).sum()
        return settings.moe_aux_loss_coeff / max(float(self.reduce(rows)), 1.0)

    def _router_inputs(self, data: DataProto, batch: PackedBatch, balance: float) -> dict[str, Any]:
        """Fields of `PackedLine` for the routers: how many trained rows contain each of this rank's tokens,
        and the rows of the balancing loss if `balance` is above 0."""
        if self._routes is None:
            return {}
        own = self._routes.share_of(batch.input_ids.numel())
        counts = trained(data).repeat_interleave(read_tokens(data))
        rows_with = torch.bincount(batch.places[counts], minlength=own.stop)[own]
        fields: dict[str, Any] = {"rows_with": rows_with.to(self._device)}
        if balance:
            groups = (
                parallel_state.get_tensor_model_parallel_group(),
                parallel_state.get_context_parallel_group(),
            )
            fields["balanced"] = BalancedRows.of(data, batch, own, balance, groups)
        return fields

    def _router_metrics(self, balance: float, tally: Tally | None) -> dict[str, Metric]:
        """Metrics of the experts' load since the last update. tally: of replayed experts. Collective."""
        assert self._routes is not None
        role = section_of(self._field).rpartition(".")[2]
        load = take_load(self._built.chunks)
        found = {
            f"{role}/busiest_expert_share": metrics.maximum(load.busiest),
            f"{role}/idle_expert_share": metrics.mean(load.idle),
        }
        if balance:
            layers = len(self._routes.layers)
            evenness = load.balance / self._settings.moe_aux_loss_coeff / layers
            found[f"{role}/moe_aux_loss"] = metrics.mean(evenness)
        if tally is not None:
            found[f"{role}/router_replay_changed"] = self._routes.changed_share(tally)
        return found

    def _share_of(self, batch: PackedBatch) -> Share | Alone:
        return Alone(batch) if self._ulysses is None else self._ulysses.share(batch)

    def _run(
        self, batch: PackedBatch, model: torch.nn.Module, routes: PackedRoutes | None, **fields: Any
    ) -> torch.Tensor:
        """Hidden states after this stage. fields: further fields of `PackedLine`, for routers."""
        line = PackedLine(plan=batch.plan, positions=batch.position_ids[0], routes=routes, **fields)
        return model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=line,
        )

    def _read(self, hidden: torch.Tensor, batch: PackedBatch, ask: Ask) -> Output:
        """The requested outputs for this rank's share, from the last stage's hidden states: (N, 1, h), or
        (N / TP, 1, h) with sequence parallelism."""
        policy = self._head == "policy"
        if self._trunk.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=policy)
        elif policy:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        distinct = batch.plan is None or batch.plan.shared is None
        asked = pick(hidden[:, 0], batch.predicts_at, distinct=distinct)
        if not policy:
            values = torch.mv(asked, self._trunk.score.weight[0])
            return values.to(torch.promote_types(values.dtype, torch.float32)), None
        return VocabularyParallelHead.apply(
            asked, self._trunk.output_weight(), batch.targets, ask, self._share
        )

    def _vocabulary_share(self) -> VocabularyShare:
        shape, place = self._built.names.shape, self._place
        width = vocabulary_share(shape.vocabulary, place.tensor_size)
        first = place.tensor * width
        real = max(0, min(width, shape.vocabulary - first))
        number = self._trunk.config.params_dtype.itemsize
        chunk = head_chunk(self._settings.head_chunk_tokens, width, number)
        group = parallel_state.get_tensor_model_parallel_group()
        return VocabularyShare(group, first, real, chunk)

    def _lr(self) -> float:
        assert self._optim is not None
        return schedule.lr_at(self._optim, self._step, self._total_steps)

    def _set_lr(self) -> None:
        assert self._optimizer is not None
        self._optimizer.set_lr(self._lr())


def _zeros(tokens: torch.Tensor, ask: Ask) -> Output:
    """Placeholders with the shapes of the last stage's outputs."""
    if ask.likeliest:
        shape = len(tokens), ask.likeliest
        return torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    return torch.zeros(tokens.shape), torch.zeros(len(tokens))


def _finish(recovery: OomRecovery, model: list[Any], num_tokens: Any = None, **others: Any) -> None:
    """Called by Megatron-Core after the last pass: sums gradients over ranks. They are not averaged, because
    the loss already includes its denominators."""
    recovery.agree()
    finalize_model_grads(model, None, **others)
