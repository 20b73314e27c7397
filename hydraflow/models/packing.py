"""Rows of prompts and responses as a model reads them: packed into one line, or right padded.

In: ragged prompts and responses. Out: a `PackedBatch` with everything a forward pass needs, on the model's device.
There is no padding mask: padding stands on the right, where causal attention never looks.
Left out on purpose: splitting into micro-batches (`engine/micro_batches.py`) and the attention itself (`attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hydraflow.models.attention import RowPlan, plan_rows
from hydraflow.protocol import ragged


@dataclass(frozen=True)
class PackedBatch:
    """Input of one forward pass over B rows with N tokens, of which K response tokens are asked for."""

    input_ids: torch.Tensor
    """(1, N) packed, or (B, T) right padded."""
    position_ids: torch.Tensor
    """The same shape; position inside the row."""
    plan: RowPlan | None
    """Rows of the packed line; None when padded."""
    predicts_at: torch.Tensor
    """(K,) position, in the flattened input, of the token before each asked token."""
    targets: torch.Tensor
    """(K,) the asked tokens."""
    cells: torch.Tensor
    """(K,) place of each asked token in a flattened (B, R) matrix."""
    shape: tuple[int, int]
    """(B, R), R the longest response."""

    def dense(self, values: torch.Tensor) -> torch.Tensor:
        """Lays (K,) values out as (B, R), 0 elsewhere. Differentiable."""
        return values.new_zeros(self.shape[0] * self.shape[1]).index_copy(0, self.cells, values).view(self.shape)


def pack(
    prompts: torch.Tensor,
    responses: torch.Tensor,
    *,
    device: torch.device,
    padded: bool = False,
    wanted: torch.Tensor | None = None,
) -> PackedBatch:
    """Joins ragged prompts and responses, (B, *) int64 each, to one batch.

    `wanted`, (all response tokens,) bool, restricts what is asked for; without it every response token is.
    Raises ValueError when a row with a response has no prompt token (nothing would predict its first token).
    """
    prompt_ids, prompt_len = ragged.parts(prompts)
    response_ids, response_len = ragged.parts(responses)
    if bool((prompt_len == 0).any()):
        raise ValueError("a row has an empty prompt: its first response token has no token before it")
    layout = _layout(prompt_len + response_len, padded)
    prompt_row, prompt_at = _coordinates(prompt_len)
    response_row, response_at = _coordinates(response_len)
    places = layout.starts[response_row] + prompt_len[response_row] + response_at
    ids = torch.zeros(layout.positions.numel(), dtype=torch.int64)
    ids[layout.starts[prompt_row] + prompt_at] = prompt_ids
    ids[places] = response_ids
    width = int(response_len.max()) if len(response_len) else 0
    asked = (places - 1, response_ids, response_row * width + response_at)
    predicts_at, targets, cells = (column if wanted is None else column[wanted] for column in asked)
    return PackedBatch(
        input_ids=ids.view_as(layout.positions).to(device),
        position_ids=layout.positions.to(device),
        plan=None if padded else plan_rows((prompt_len + response_len).numpy(), device),
        predicts_at=predicts_at.to(device),
        targets=targets.to(device),
        cells=cells.to(device),
        shape=(len(response_len), width),
    )


class _Layout(NamedTuple):
    """Where rows lie in the model's input."""

    starts: torch.Tensor
    """(B,) place of each row's first token in the flattened input."""
    positions: torch.Tensor
    """(1, N) or (B, T) place of each cell in its row."""


def _layout(row_len: torch.Tensor, padded: bool) -> _Layout:
    """Rows of these lengths, (B,), under each other in T = longest columns, or one after the other in a line."""
    if padded:
        rows, longest = len(row_len), int(row_len.max())
        return _Layout(torch.arange(rows) * longest, torch.arange(longest).expand(rows, longest))
    return _Layout(row_len.cumsum(0) - row_len, _coordinates(row_len)[1].unsqueeze(0))


def _coordinates(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and place in the row of every token of rows of these lengths, (sum of lengths,) each."""
    row = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return row, torch.arange(len(row)) - starts[row]
