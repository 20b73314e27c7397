"""The Megatron-Core training engine: one rank of a model that is divided by tensor-parallel ranks, pipeline
stages and data ranks; context-parallel ranks share the tokens of their lines.

In: micro-batches and a loss function. Out: log-probabilities or values, metrics, weights (see
`engine/base.py`). Losses exist on the last stage; Megatron-Core's schedule moves activations and gradients
between stages. Left out on purpose: recovery when memory runs out (a rank that fails fails the run), LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from hydraflow import metrics
from hydraflow.device import gpu_count
from hydraflow.engine import optim as schedule
from hydraflow.engine import process_group
from hydraflow.engine.base import LossFn, ModelOutput, answers_of, columns_of
from hydraflow.engine.config import MegatronConfig, OptimConfig
from hydraflow.engine.hf_files import save_whole
from hydraflow.engine.megatron import checkpoint, export, parallel
from hydraflow.engine.megatron.architecture import section_of
from hydraflow.engine.megatron.build import build_model
from hydraflow.engine.megatron.experts import busiest_share
from hydraflow.engine.megatron.head import VocabularyParallelHead, VocabularyShare
from hydraflow.engine.megatron.layers import PackedLine
from hydraflow.engine.megatron.names import vocabulary_share
from hydraflow.engine.megatron.optimizer import CoreOptimizer
from hydraflow.engine.megatron.repeated import require_repeatable
from hydraflow.engine.sharded_checkpoint import ShardedSnapshot
from hydraflow.engine.token_exchange import Alone, Output, Share, Ulysses
from hydraflow.errors import ConfigError
from hydraflow.metrics import Metric
from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.models.attention import pick
from hydraflow.models.chunks import head_chunk
from hydraflow.models.config import ModelConfig
from hydraflow.models.packing import PackedBatch, pack
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


class MegatronEngine:
    """A `TrainEngine`. Arguments as of `FSDPEngine`."""

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
        self.data_rank, self.data_size = place.data, place.data_size
        self.is_collect = place.tensor == 0 and place.context == 0 and place.is_last
        self._built = build_model(model, settings, place, head=head, device=device, field=field)
        self._trunk = self._built.trunk
        self._has_experts = self._built.names.shape.mixture is not None
        self._outline = export.outline(self._built, place)
        self._share = self._vocabulary_share()
        group = parallel_state.get_context_parallel_group()
        self._ulysses = Ulysses(group) if place.context_size > 1 else None
        core = self._trunk.config
        core.finalize_model_grads_func = _finish_gradients
        self._ddp: list[DistributedDataParallel] | None = None
        self._optimizer: CoreOptimizer | None = None
        if optim is not None:
            buffers = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=settings.use_distributed_optimizer
            )
            self._ddp = [DistributedDataParallel(core, buffers, chunk) for chunk in self._built.chunks]
            self._optimizer = CoreOptimizer(self._ddp, optim, settings)
            self._optimizer.set_lr(self._lr())
        if self._has_experts:
            require_repeatable(
                self.forward,
                self._built.names.shape.vocabulary,
                core.params_dtype,
                section=section_of(field),
                settings=settings,
            )

    # --- passes

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[DataProto], ask: Ask = LOG_PROBS, *, adapter: bool = True
    ) -> DataProto:
        """See `TrainEngine`. Ranks other than those of the last stage give zeros."""
        assert adapter, "there are no adapters"
        chunks = list(self._built.chunks)
        for chunk in chunks:
            chunk.eval()

        def step(
            batches: Iterator[tuple[DataProto, bool]], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Any]:
            data, _ = next(batches)
            share = self._share_of(self._pack(data, trained=False))
            hidden = self._run(share.part, model)

            def found(hidden: torch.Tensor, non_loss_data: bool = True) -> Output:
                return share.whole(self._read(hidden, share.part, ask))

            return hidden, found

        results = self._schedule(step, micro_batches, chunks, forward_only=True)[: len(micro_batches)]
        if not self._place.is_last:
            tokens = sum(len(ragged.parts(data.get("responses"))[0]) for data in micro_batches)
            results = [(torch.zeros(tokens), torch.zeros(tokens))]
        return answers_of(micro_batches, results, self._head, ask)

    def forward_backward(
        self, micro_batches: Sequence[DataProto], loss_fn: LossFn, ask: Ask = LOG_PROBS
    ) -> dict[str, Metric]:
        """See `TrainEngine`. Metrics on the last stage."""
        assert self._ddp is not None, "a frozen model is not trained"
        for chunk in self._ddp:
            chunk.train()

        def step(
            batches: Iterator[tuple[DataProto, bool]], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Any]:
            data, counts = next(batches)
            batch = self._pack(data, trained=True)
            share = self._share_of(batch)
            hidden = self._run(share.part, model)

            def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Metric]]:
                main, more = share.whole(self._read(hidden, share.part, ask))
                output = self._output(batch, main, more)
                value, reported = loss_fn(output, columns_of(data, batch.shape[1], self._device))
                one = torch.ones((), dtype=torch.int, device=self._device)
                return (value, one, reported) if counts else (value * 0.0, one, {})

            return hidden, loss

        told = metrics.merge(self._schedule(step, micro_batches, self._ddp, forward_only=False))
        if self._has_experts:
            role = section_of(self._field).rpartition(".")[2]
            told[f"{role}/busiest_expert_share"] = metrics.maximum(busiest_share(self._built.chunks))
        return told

    @torch.no_grad()
    def optimizer_step(self) -> dict[str, float]:
        """See `TrainEngine`. All ranks see the same norm, so either all skip or none."""
        assert self._optimizer is not None and self._ddp is not None, "a frozen model is not trained"
        norm = self._optimizer.step()
        self._optimizer.zero_grad()
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        return {"grad_norm": norm, "lr": self._lr(), "skipped": float(not math.isfinite(norm))}

    def lr_step(self) -> None:
        """See `TrainEngine`."""
        self._step += 1
        self._set_lr()

    def reduce(self, values: torch.Tensor, how: str = "sum") -> torch.Tensor:
        """See `TrainEngine`."""
        return process_group.all_reduce(values, how, parallel_state.get_data_parallel_group())

    # --- weights and checkpoints

    def weights(self, *, to: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainEngine`."""
        return export.stream(self._built, self._outline, self._place, self._settings, to=to)

    def save_hf(self, directory: str | Path) -> None:
        """See `TrainEngine`."""
        module = export.empty_model(self._built, self._model, self._head)
        save_whole(module, self._model, self._full_weights(), Path(directory), field=self._field)

    def snapshot(self, contents: Collection[str]) -> ShardedSnapshot:
        """See `TrainEngine`."""
        assert self._optimizer is not None, "a frozen model has no state of its own"
        return checkpoint.snapshot(
            self._built,
            self._model,
            self._optimizer,
            self._step,
            contents,
            full_weights=self._full_weights,
            head=self._head,
            field=self._field,
        )

    def load(self, directory: str | Path, contents: Collection[str]) -> None:
        """See `TrainEngine`."""
        assert self._optimizer is not None, "a frozen model has no state of its own"
        step = checkpoint.load(self._built, self._optimizer, Path(directory), contents, head=self._head)
        if step is not None:
            self._step = step
            self._set_lr()

    def stored_bytes(self, contents: Collection[str]) -> int:
        """See `TrainEngine`."""
        return checkpoint.stored_bytes(self._built, contents)

    def rest(self) -> None:
        """See `TrainEngine`."""

    # --- one micro-batch

    def _schedule(
        self, step: Any, micro_batches: Sequence[DataProto], chunks: Sequence[Any], *, forward_only: bool
    ) -> Any:
        """Megatron-Core's passes over the micro-batches, each told apart from those that fill up the last
        group; what the last stage found in each. An interleaved schedule takes groups of as many as there are
        stages."""
        work = get_forward_backward_func()
        each = [(data, True) for data in micro_batches]
        if len(chunks) > 1:
            each += [(micro_batches[0], False)] * (-len(each) % self._place.stages)
        iterators = [iter(each) for _ in chunks]
        return work(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(each),
            seq_length=1,  # lines tell their own
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _pack(self, data: DataProto, *, trained: bool) -> PackedBatch:
        tensor = self._place.tensor_size if self._trunk.config.sequence_parallel else 1
        return pack(
            data.get("prompts"),
            data.get("responses"),
            device=self._device,
            multiple_of=tensor * self._place.context_size,
            wanted=ragged.parts(data.get("response_mask"))[0].bool() if trained else None,
        )

    def _share_of(self, batch: PackedBatch) -> Share | Alone:
        """What this rank computes of a batch."""
        return Alone(batch) if self._ulysses is None else self._ulysses.share(batch)

    def _run(self, batch: PackedBatch, model: torch.nn.Module) -> torch.Tensor:
        """Hidden states after this stage."""
        line = PackedLine(plan=batch.plan, positions=batch.position_ids[0])
        found: torch.Tensor = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=line,
        )
        return found

    def _read(self, hidden: torch.Tensor, batch: PackedBatch, ask: Ask) -> Output:
        """What is asked of this rank's share, from the last stage's hidden states (N, 1, h), or (N / TP, 1,
        h) with sequence parallelism."""
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
        found: Output = VocabularyParallelHead.apply(
            asked, self._trunk.output_weight(), batch.targets, ask, self._share
        )
        return found

    def _output(self, batch: PackedBatch, main: torch.Tensor, more: torch.Tensor | None) -> ModelOutput:
        if self._head == "value":
            return ModelOutput(values=batch.dense(main))
        return ModelOutput(log_probs=batch.dense(main), entropy=None if more is None else batch.dense(more))

    def _vocabulary_share(self) -> VocabularyShare:
        shape, place = self._built.names.shape, self._place
        width = vocabulary_share(shape.vocabulary, place.tensor_size)
        first = place.tensor * width
        real = max(0, min(width, shape.vocabulary - first))
        number = self._trunk.config.params_dtype.itemsize
        chunk = head_chunk(self._settings.head_chunk_tokens, width, number)
        group = parallel_state.get_tensor_model_parallel_group()
        return VocabularyShare(group, first, real, chunk)

    def _full_weights(self) -> dict[str, torch.Tensor] | None:
        """All weights in rank 0's host memory; None on the others."""
        first = dist.get_rank() == 0
        found = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights(to=0) if first}
        return found if first else None

    def _lr(self) -> float:
        assert self._optim is not None
        return schedule.lr_at(self._optim, self._step, self._total_steps)

    def _set_lr(self) -> None:
        assert self._optimizer is not None
        self._optimizer.set_lr(self._lr())


def _finish_gradients(model: list[Any], num_tokens: Any = None, **others: Any) -> None:
    """Sums gradients over ranks, and does not divide them: denominators are in the loss."""
    finalize_model_grads(model, None, **others)
