"""Rows of prompts and responses as a model reads them: packed into one line, or right padded.

In: ragged prompts and responses. Out: a `PackedBatch` with everything a forward pass needs, on the model's device.
There is no padding mask: padding stands on the right, where causal attention never looks.
Left out on purpose: splitting into micro-batches (`engine/micro_batches.py`) and the attention itself (`attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    row_len = prompt_len + response_len
    prompt_row, prompt_at = _coordinates(prompt_len)
    response_row, response_at = _coordinates(response_len)
    place = response_at + prompt_len[response_row]
    longest = int(row_len.max())
    starts = torch.arange(len(row_len)) * longest if padded else row_len.cumsum(0) - row_len
    size = len(row_len) * longest if padded else int(row_len.sum())

    ids = torch.zeros(size, dtype=torch.int64)
    ids[starts[prompt_row] + prompt_at] = prompt_ids
    ids[starts[response_row] + place] = response_ids
    predicts_at = starts[response_row] + place - 1
    width = int(response_len.max()) if len(response_len) else 0
    cells = response_row * width + response_at
    if wanted is not None:
        predicts_at, response_ids, cells = predicts_at[wanted], response_ids[wanted], cells[wanted]
    shaped = (len(row_len), longest) if padded else (1, size)
    positions = torch.arange(longest).expand(shaped) if padded else _coordinates(row_len)[1].view(shaped)
    return PackedBatch(
        input_ids=ids.view(shaped).to(device),
        position_ids=positions.to(device),
        plan=None if padded else plan_rows(row_len.numpy(), device),
        predicts_at=predicts_at.to(device),
        targets=response_ids.to(device),
        cells=cells.to(device),
        shape=(len(row_len), width),
    )


def _coordinates(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and place in the row of every token of rows of these lengths, (sum of lengths,) each."""
    row = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return row, torch.arange(len(row)) - starts[row]
