"""The Protocol of a training engine, and what it passes to a loss.

In: rows (`DataProto` with ragged `prompts`, `responses`, `response_mask` and whatever the loss reads). Out:
ragged columns, metrics, weights. Left out on purpose: which rows go where (`batch_plan`), losses
(`algorithms/`), Ray (`dispatch/`).

The law of gradients: a loss function returns a sum whose weights already include the global denominators; the
engine sums gradients over micro-batches and data ranks and never divides. So the gradient does not depend on
how rows are split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hydraflow.algorithms.token_terms import ModelOutput
from hydraflow.engine.config import OptimConfig
from hydraflow.metrics import Metric
from hydraflow.models.adapters import Form
from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.options import option_of
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates
from hydraflow.protocol.fields import FIELDS, RESPONSE, ROW

if TYPE_CHECKING:
    from hydraflow.engine.micro_batcher import MicroBatcher
    from hydraflow.models.packing import PackedBatch


LossFn = Callable[[ModelOutput, Mapping[str, torch.Tensor]], tuple[torch.Tensor, dict[str, Metric]]]
"""Maps (output, columns) to (scalar sum, metrics). The columns are those of `columns_of`."""


MODEL, OPTIMIZER, EXTRA, HF_MODEL = ("model", "optimizer", "extra", "hf_model")
"""Possible contents of a checkpoint: weights, optimizer, schedule position, and full weights as a Hugging
Face directory."""
CHECKPOINT_FACTS = "checkpoint.json"
"""File in a role's checkpoint: engine, world_size, head, contents and whatever else a reader needs to
interpret the tensors."""


class Snapshot(Protocol):
    """One rank's copy of an engine's state in host memory."""

    def write(self, directory: Path) -> list[Path]:
        """Writes this rank's part and returns the files. Every rank calls it, possibly in another thread
        while training continues. When one rank fails, every rank raises OSError or EnvironmentFault."""


@dataclass(frozen=True)
class StepOptions:
    """AdamW settings that override the configuration for one optimizer step; None: no override. Raises
    ValueError for a value that the configuration key of the same name cannot have."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    clip_grad: float | None = None
    """Gradient clipping norm."""

    def __post_init__(self) -> None:
        for field in fields(OptimConfig):
            value, rule = getattr(self, field.name, None), option_of(field).rule
            if value is not None and rule is not None and not rule.holds(value):
                raise ValueError(f"{field.name}={value} {rule.text}")

    @contextmanager
    def applied(self, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Overrides the optimizer's parameter-group settings inside the block."""
        names = ("lr", "betas", "eps", "weight_decay")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        before = [{name: group[name] for name in given} for group in groups]
        for group in groups:
            group.update(given)
        try:
            yield
        finally:
            for group, settings in zip(groups, before, strict=True):
                group.update(settings)


AS_CONFIGURED = StepOptions()


@dataclass(frozen=True)
class OomReport:
    """A micro-batch that made a rank run out of memory."""

    rank: int
    rows: int
    tokens: int
    """Tokens of prompts and responses together."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ran out of memory on {self.rows} {'row' if self.rows == 1 else 'rows'},"
            f" {self.tokens} tokens"
        )


class OutOfMemory(Exception):
    """Memory ran out in a pass on some ranks; raised on every rank. The model and its gradient are as they
    were before the call."""

    def __init__(self, reports: Sequence[OomReport]):
        super().__init__("; ".join(map(str, reports)))
        self.reports = list(reports)


def require_micro_batches(micro_batches: Sequence[DataProto]) -> None:
    """Raises ValueError if there are no micro-batches."""
    if not micro_batches:
        raise ValueError("a call needs at least one micro-batch: every pass is a collective of all ranks")


def columns_of(data: DataProto, width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A micro-batch's columns for the loss: one value per response token, right-padded to (B, width), or one
    per row. A column that `protocol/fields.py` does not list is per token if it is ragged."""
    columns = {}
    for name, column in data.items():
        if not isinstance(column, torch.Tensor):
            continue
        is_ragged = ragged.is_ragged(column)
        axis = FIELDS[name].axis if name in FIELDS else RESPONSE if is_ragged else ROW
        if axis in (ROW, RESPONSE):
            columns[name] = (ragged.to_padded(column, width) if is_ragged else column).to(device)
    return columns


def model_output(
    batch: PackedBatch, main: torch.Tensor, more: torch.Tensor | None, *, head: str
) -> ModelOutput:
    """The loss's view of a model's output for the K requested tokens: values, or log-probabilities with
    entropies unless these are None."""
    if head == "value":
        return ModelOutput(values=batch.dense(main))
    return ModelOutput(log_probs=batch.dense(main), entropy=None if more is None else batch.dense(more))


def answers_of(
    micro_batches: Sequence[DataProto],
    results: Iterable[tuple[torch.Tensor | None, ...]],
    head: str,
    ask: Ask,
) -> DataProto:
    """The result of `TrainEngine.forward`: ragged columns on the CPU.

    results: for each micro-batch, or for all together, one or two columns over the response tokens: values,
    or log-probabilities and whatever else was requested.
    """
    names = ["values"] if head == "value" else ["log_probs", *([ask.more] if ask.more else [])]
    lengths = torch.cat([ragged.lengths(data.get("responses")) for data in micro_batches])
    columns = {name: torch.cat(parts).cpu() for name, parts in zip(names, zip(*results, strict=True))}
    return DataProto.from_dict({name: ragged.from_parts(one, lengths) for name, one in columns.items()})


class TrainEngine(Protocol):
    """One rank of a model in training. Every rank calls every method in the same order, with the same
    number of micro-batches.

    `forward` and `forward_backward` take micro-batches, and raise OutOfMemory on every rank when any rank
    runs out of memory. `forward_rows` and `forward_backward_rows` take any number of rows and split them
    further on that error; an engine that cannot resynchronise its ranks afterwards lets it propagate.
    """

    def coordinates(self) -> Coordinates:
        """Which share of a batch this rank gets, and whether its answers and metrics are collected: exactly
        one rank's are for each share."""

    @property
    def has_routers(self) -> bool:
        """Whether this engine records and replays the model's experts (`routed_experts`)."""

    def forward(
        self, micro_batches: Sequence[DataProto], ask: Ask = LOG_PROBS, *, adapter: bool = True
    ) -> DataProto:
        """Ragged `log_probs` (and further columns as requested), or `values`, of all rows in order.
        `adapter=False`: without LoRA.

        Rows with `routed_experts` are computed with these experts, here and in `forward_backward`. Rows with
        `target_tokens` get the log-probabilities of these tokens, one or K per response token, instead of
        the response's own. To score a whole text, pass its first token as the prompt.
        """

    def forward_backward(
        self, micro_batches: Sequence[DataProto], loss_fn: LossFn, ask: Ask = LOG_PROBS
    ) -> dict[str, Metric]:
        """Accumulates the gradient of the loss, summed over ranks, with one reduction at the last
        micro-batch; adds to earlier calls since the last optimizer step. Returns this rank's metrics. After
        an exception the gradient is as it was before the call."""

    def forward_rows(
        self, rows: DataProto, micro_batcher: MicroBatcher, ask: Ask = LOG_PROBS, *, adapter: bool = True
    ) -> DataProto:
        """`forward` over micro-batches of these rows, and smaller ones if memory runs out; columns come back
        in the order of `rows`. Raises DoesNotFit, on every rank, when a single row does not fit."""

    def forward_backward_rows(
        self, rows: DataProto, micro_batcher: MicroBatcher, loss_fn: LossFn, ask: Ask = LOG_PROBS
    ) -> dict[str, Metric]:
        """`forward_backward` over micro-batches of these rows, and smaller ones if memory runs out. Raises
        DoesNotFit as `forward_rows` does."""

    def optimizer_step(self, options: StepOptions = AS_CONFIGURED) -> dict[str, float]:
        """Clips the gradient, updates the weights and clears the gradient. Returns `grad_norm` (before
        clipping), `lr`, and `skipped`: 1 when the norm was not finite, so that nothing was updated."""

    def lr_step(self) -> None:
        """Advances the schedule by one training step."""

    def weights(
        self, *, to: int | None = None, form: Form = Form.MERGED
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Full weights by Hugging Face name. The tensors are borrowed: copy what must outlive the next
        update. `rest` does not offload the weights until the iterator is exhausted; then they are offloaded.

        form: adapters merged or separate; B of a separate adapter includes the scale.
        to: the only rank that gets values; the others get tensors on the meta device, and must exhaust the
        iterator too.
        """

    def reduce(self, values: torch.Tensor, how: str = "sum") -> torch.Tensor:
        """Sum or max of `values` over data ranks, each share counted once, float64 on the CPU."""

    def on_all_stages(self, values: torch.Tensor) -> torch.Tensor:
        """What `forward` returned, a flat tensor, on every rank that shares the rows: the ranks of earlier
        pipeline stages have zeros."""

    def save_hf(self, directory: str | Path) -> None:
        """Writes a Hugging Face directory with weights, configuration and tokenizer; it appears complete or
        not at all."""

    def snapshot(self, contents: Collection[str]) -> Snapshot:
        """Copies the named `contents` (MODEL and so on) to host memory, to be written as one checkpoint."""

    def load(self, directory: str | Path, contents: Collection[str]) -> None:
        """Loads a snapshot written by any number of ranks. Raises ConfigError when it belongs to another
        model."""

    def stored_bytes(self, contents: Collection[str]) -> int:
        """Bytes of this rank's part of a checkpoint, without small files."""

    def rest(self) -> None:
        """Offloads weights and optimizer state to host memory as configured, until they are used again.
        Results are bit-identical."""
