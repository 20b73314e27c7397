"""The Protocol of a training engine, and what it passes to a loss.

In: micro-batches (`DataProto` with ragged `prompts`, `responses`, `response_mask` and whatever the loss
reads). Out: ragged columns, metrics, weights. Left out on purpose: which rows go where (`batch_plan`), losses
(`algorithms/`), Ray (`dispatch/`).

The law of gradients: a loss function returns a sum whose weights already hold the global denominators; the
engine adds gradients up over micro-batches and data ranks and never divides. So no split of the same rows
changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from hydraflow.metrics import Metric
from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


@dataclass(frozen=True)
class ModelOutput:
    """A model's output for B rows with up to R response tokens: (B, R), right padded, 0 where
    response_mask is 0."""

    log_probs: torch.Tensor | None = None
    """Log-probability of each response token (policy)."""
    entropy: torch.Tensor | None = None
    """Entropy in nats of each token's distribution (policy, on request)."""
    values: torch.Tensor | None = None
    """Value estimate for the state before each token (value model)."""


LossFn = Callable[[ModelOutput, Mapping[str, torch.Tensor]], tuple[torch.Tensor, dict[str, Metric]]]
"""(output, columns) to (scalar sum, metrics); ragged columns of the micro-batch arrive right padded to (B,
R)."""


MODEL, OPTIMIZER, EXTRA, HF_MODEL = ("model", "optimizer", "extra", "hf_model")
"""Possible contents of a checkpoint: weights, optimizer, schedule position, and full weights as a Hugging
Face directory."""
CHECKPOINT_FACTS = "checkpoint.json"
"""File in a role's checkpoint: engine, world_size, head, contents and whatever else a reader needs to
interpret the tensors."""


class Snapshot(Protocol):
    """One rank's copy of an engine's state in host memory."""

    def write(self, directory: Path) -> list[Path]:
        """Writes this rank's part; returns the files. Every rank calls it, possibly in another thread than
        the engine's while the engine keeps training. OSError or EnvironmentFault, on every rank, when a rank
        fails."""


@dataclass(frozen=True)
class OomReport:
    """A micro-batch that ran a rank out of memory."""

    rank: int
    rows: int
    tokens: int
    """Tokens of prompts and responses together."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} had no memory for {self.rows} {'row' if self.rows == 1 else 'rows'},"
            f" {self.tokens} tokens"
        )


class OutOfMemory(Exception):
    """Memory ran out in a pass on some ranks; raised on every rank. The model is unchanged, without
    gradients."""

    def __init__(self, reports: Sequence[OomReport]):
        super().__init__("; ".join(map(str, reports)))
        self.reports = list(reports)


def columns_of(data: DataProto, width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What a loss reads of a micro-batch: ragged columns right padded to (B, width), dense ones as they
    are."""
    columns = {}
    for name, column in data.items():
        if name == "prompts" or not isinstance(column, torch.Tensor):
            continue
        padded = ragged.to_padded(column, width) if ragged.is_ragged(column) else column
        columns[name] = padded.to(device)
    return columns


def answers_of(
    micro_batches: Sequence[DataProto],
    results: Iterable[tuple[torch.Tensor | None, ...]],
    head: str,
    ask: Ask,
) -> DataProto:
    """What `TrainEngine.forward` gives: ragged columns on the CPU.

    results: of each micro-batch, or of all together, one or two columns of its response tokens: values, or
    log-probabilities and what else was asked for.
    """
    more = ["entropys"] if ask.entropy else ["greedy_match"] if ask.greedy_match else []
    names = ["values"] if head == "value" else ["log_probs", *more]
    lengths = torch.cat([ragged.lengths(data.get("responses")) for data in micro_batches])
    columns = {name: torch.cat(parts).cpu() for name, parts in zip(names, zip(*results, strict=True))}
    return DataProto.from_dict({name: ragged.from_parts(one, lengths) for name, one in columns.items()})


class TrainEngine(Protocol):
    """One rank of a model in training. Every rank calls every method in the same order, with the same
    number of micro-batches.

    `forward` and `forward_backward` raise OutOfMemory, on every rank, when a micro-batch is too large for one
    of them.
    """

    data_rank: int
    """Which share of a batch this rank gets."""
    data_size: int
    """Number of shares."""
    is_collect: bool
    """Whether this rank's answers are used: true for one of the ranks with the same share."""

    def forward(
        self,
        micro_batches: Sequence[DataProto],
        ask: Ask = LOG_PROBS,
        *,
        adapter: bool = True,
    ) -> DataProto:
        """Ragged `log_probs` (and `entropys` or `greedy_match`), or `values`, of all rows in the given order.
        `adapter=False`: without LoRA."""

    def forward_backward(
        self, micro_batches: Sequence[DataProto], loss_fn: LossFn, ask: Ask = LOG_PROBS
    ) -> dict[str, Metric]:
        """Computes the gradient of the summed loss of all ranks; one reduction, at the last micro-batch.
        Metrics of this rank.

        Called once per optimizer step.
        """

    def optimizer_step(self) -> dict[str, float]:
        """Clips, updates and clears the gradient. `grad_norm` (before clipping), `lr`, and `skipped`, 1 when
        the norm was not finite."""

    def lr_step(self) -> None:
        """Advances the schedule by one training step."""

    def weights(self, *, to: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Full weights by Hugging Face name, adapters merged. Borrowed: copy what must outlive the next
        update. Until the iterator is exhausted the weights do not `rest`; then they do.

        to: the only rank that gets values; the others, which must exhaust the iterator too, get tensors on
        the meta device.
        """

    def reduce(self, values: torch.Tensor, how: str = "sum") -> torch.Tensor:
        """Sum or max of `values` over data ranks, each share counted once, float64 on the CPU."""

    def save_hf(self, directory: str | Path) -> None:
        """Writes a Hugging Face directory with weights, configuration and tokenizer; it appears complete or
        not at all."""

    def snapshot(self, contents: Collection[str]) -> Snapshot:
        """Copies the named `contents` (MODEL and the like) to host memory, to be written as one
        checkpoint."""

    def load(self, directory: str | Path, contents: Collection[str]) -> None:
        """Loads a written snapshot, also one of another number of ranks. ConfigError when it is of another
        model."""

    def stored_bytes(self, contents: Collection[str]) -> int:
        """Bytes of this rank's part of a checkpoint, without small files."""

    def rest(self) -> None:
        """Moves to host memory what the configuration says, until it is used again. Results stay the
        same, bit by bit."""
