"""Lays out rows of prompts and responses as model input: packed into one line, or right-padded.

In: ragged prompts and responses. Out: a `PackedBatch` with everything a forward pass needs, on the model's
device. A packed line contains a prompt that adjacent rows share only once, and drops the last token of each
response, which predicts nothing; for many samples of a long prompt that saves most of the work. There is no
padding mask, because padding is on the right, where causal attention never looks. Left out on purpose:
splitting into micro-batches (`engine/micro_batcher.py`) and the attention itself (`attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from hydraflow.models.attention import RowPlan, SharedPrompts, plan_rows
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


@dataclass(frozen=True)
class PackedBatch:
    """Input of one forward pass over B rows with N tokens; the results for K response tokens are
    requested."""

    input_ids: torch.Tensor
    """(1, N) packed, or (B, T) right padded."""
    position_ids: torch.Tensor
    """The same shape; position inside the row."""
    plan: RowPlan | None
    """Rows of the packed line; None when padded."""
    predicts_at: torch.Tensor
    """(K,) position, in the flattened input, of the token before each asked token."""
    targets: torch.Tensor
    """(K,) the asked tokens, or (K, M): M at each position."""
    cells: torch.Tensor
    """(K,) index of each asked token in a flattened (B, R) matrix."""
    shape: tuple[int, int]
    """(B, R), R the longest response."""
    places: torch.Tensor
    """On the CPU: position in the flattened input of each token that the model reads, row by row: all of a
    prompt, and its response without the last token."""

    def dense(self, values: torch.Tensor) -> torch.Tensor:
        """Lays (K, ...) values out as (B, R, ...), 0 elsewhere. Differentiable."""
        flat = values.new_zeros(self.shape[0] * self.shape[1], *values.shape[1:])
        return flat.index_copy(0, self.cells, values).view(*self.shape, *values.shape[1:])

    def in_a_line(self, multiple_of: int = 1) -> PackedBatch:
        """Concatenates padded rows into one line, for models that only read lines: each row keeps the length
        of the longest, and no prompt is shared. `multiple_of` as in `pack`."""
        rows, width = self.input_ids.shape
        filling = -(rows * width) % multiple_of
        lengths = np.array([width] * rows + [filling] * bool(filling))
        more = torch.arange(filling, device=self.position_ids.device)
        ids = self.input_ids.reshape(-1)
        return replace(
            self,
            input_ids=torch.cat((ids, ids.new_zeros(filling)))[None],
            position_ids=torch.cat((self.position_ids.reshape(-1), more))[None],
            plan=plan_rows(lengths, self.input_ids.device),
        )


def row_tokens(data: DataProto) -> torch.Tensor:
    """Tokens of each row, prompt and response together: int64 (B,)."""
    return ragged.lengths(data.get("prompts")) + ragged.lengths(data.get("responses"))


def read_tokens(data: DataProto) -> torch.Tensor:
    """Tokens of each row that a model reads, all but the last of a response: int64 (B,)."""
    return ragged.lengths(data.get("prompts")) + (ragged.lengths(data.get("responses")) - 1).clamp(min=0)


class _Rows(NamedTuple):
    """The rows' tokens, each with its row and its position in the row."""

    prompt_ids: torch.Tensor
    prompt_len: torch.Tensor  # (B,)
    prompt_row: torch.Tensor
    prompt_at: torch.Tensor
    response_ids: torch.Tensor
    response_len: torch.Tensor  # (B,)
    response_row: torch.Tensor
    response_at: torch.Tensor


class _Layout(NamedTuple):
    """Positions of tokens in the model's flattened input."""

    input_ids: torch.Tensor
    """(1, N) or (B, T)."""
    position_ids: torch.Tensor
    """The same shape."""
    prompt_starts: torch.Tensor
    """(B,) position of each row's first prompt token; rows may share it."""
    response_starts: torch.Tensor
    """(B,) position of each row's first response token."""
    plan: RowPlan | None
    places: torch.Tensor
    """As of `PackedBatch`."""


def pack(
    prompts: torch.Tensor,
    responses: torch.Tensor,
    *,
    device: torch.device,
    padded: bool = False,
    multiple_of: int = 1,
    wanted: torch.Tensor | None = None,
    routes: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
) -> PackedBatch:
    """Packs ragged prompts and responses, (B, *) int64 each, into one batch. `wanted`, (all response tokens,)
    bool, selects the response tokens to score; default all. `multiple_of`: a packed line is padded with a row
    of zeros to a multiple of this length. `routes`: the rows' `routed_experts`, if given; only prompts whose
    tokens go to the same experts are shared. `targets`: the rows' `target_tokens`, if given. Raises
    ValueError when a row has an empty prompt (nothing would predict its first response token), or another
    number of targets than response tokens."""
    prompt_ids, prompt_len = ragged.parts(prompts)
    response_ids, response_len = ragged.parts(responses)
    if bool((prompt_len == 0).any()):
        raise ValueError("a row has an empty prompt: nothing would predict its first response token")
    scored = response_ids if targets is None else _matching(targets, response_len)
    own, answered = _coordinates(prompt_len), _coordinates(response_len)
    rows = _Rows(prompt_ids, prompt_len, *own, response_ids, response_len, *answered)
    layout = (
        _side_by_side(rows) if padded else _in_a_line(rows, _begins_group(rows, routes), device, multiple_of)
    )
    before = torch.where(
        rows.response_at == 0,
        (layout.prompt_starts + prompt_len - 1)[rows.response_row],
        layout.response_starts[rows.response_row] + rows.response_at - 1,
    )
    width = int(response_len.max()) if len(response_len) else 0
    asked = (before, scored, rows.response_row * width + rows.response_at)
    predicts_at, targets, cells = (column if wanted is None else column[wanted] for column in asked)
    return PackedBatch(
        input_ids=layout.input_ids.to(device),
        position_ids=layout.position_ids.to(device),
        plan=layout.plan,
        predicts_at=predicts_at.to(device),
        targets=targets.to(device),
        cells=cells.to(device),
        shape=(len(response_len), width),
        places=layout.places,
    )


def pack_rows(
    data: DataProto,
    *,
    device: torch.device,
    trained: bool,
    vocabulary: int,
    padded: bool = False,
    multiple_of: int = 1,
) -> PackedBatch:
    """`pack` of rows with their `routed_experts` and `target_tokens`, if they have any. trained: score only
    the tokens whose response_mask is set. Raises ValueError for target tokens that are not below
    `vocabulary`."""
    given: dict[str, Any] = dict(data.items())
    if "target_tokens" in given:
        _require_ids(ragged.parts(given["target_tokens"])[0], vocabulary)
    return pack(
        given["prompts"],
        given["responses"],
        device=device,
        padded=padded,
        multiple_of=multiple_of,
        wanted=ragged.parts(given["response_mask"])[0].bool() if trained else None,
        routes=given.get("routed_experts"),
        targets=given.get("target_tokens"),
    )


def _matching(targets: torch.Tensor, response_len: torch.Tensor) -> torch.Tensor:
    """The targets of all rows, one after the other."""
    found, lengths = ragged.parts(targets)
    if not torch.equal(lengths, response_len):
        row = int((lengths != response_len).nonzero()[0])
        raise ValueError(
            f"row {row}: target_tokens has length {int(lengths[row])}, responses has length"
            f" {int(response_len[row])}; each response token needs one target, or M in a further dimension"
        )
    return found


def _require_ids(tokens: torch.Tensor, vocabulary: int) -> None:
    if tokens.numel() == 0:
        return
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"target_tokens has numbers of type {tokens.dtype}: ids are integers")
    low, high = (int(bound) for bound in tokens.aminmax())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(f"target_tokens has id {wrong}: ids must be from 0 to {vocabulary - 1}")


def _side_by_side(rows: _Rows) -> _Layout:
    """One row per sequence, right padded to the longest."""
    count, longest = len(rows.prompt_len), int((rows.prompt_len + rows.response_len).max())
    starts = torch.arange(count) * longest
    ids = torch.zeros(count * longest, dtype=torch.int64)
    ids[starts[rows.prompt_row] + rows.prompt_at] = rows.prompt_ids
    responses = starts + rows.prompt_len
    ids[responses[rows.response_row] + rows.response_at] = rows.response_ids
    positions = torch.arange(longest).expand(count, longest)
    row, at = _coordinates(rows.prompt_len + (rows.response_len - 1).clamp(min=0))
    return _Layout(ids.view(count, longest), positions, starts, responses, None, starts[row] + at)


def _in_a_line(rows: _Rows, begins: torch.Tensor, device: torch.device, multiple_of: int) -> _Layout:
    """Each group's shared prompt once, then the responses of the group without their last tokens; a row of
    zeros at the end if the length must be a multiple. begins: (B,) whether a row is the first of its
    group."""
    kept = (rows.response_len - 1).clamp(min=0)  # (B,) response tokens that predict something
    own = rows.prompt_len * begins + kept
    starts = own.cumsum(0) - own
    prompt_starts = starts[begins][begins.cumsum(0) - 1]
    response_starts = starts + rows.prompt_len * begins

    is_read = rows.response_at < kept[rows.response_row]
    prompt_places = prompt_starts[rows.prompt_row] + rows.prompt_at
    response_places = (response_starts[rows.response_row] + rows.response_at)[is_read]
    real = int(own.sum())
    filling = torch.arange(-real % multiple_of)
    ids, positions = torch.zeros(2, real + len(filling), dtype=torch.int64)
    positions[real:] = filling
    ids[prompt_places], positions[prompt_places] = rows.prompt_ids, rows.prompt_at
    ids[response_places] = rows.response_ids[is_read]
    positions[response_places] = (rows.prompt_len[rows.response_row] + rows.response_at)[is_read]

    more = filling.new_tensor([len(filling)] if len(filling) else [])
    row_len = torch.cat((rows.prompt_len + kept, more))
    shared, places = None, torch.arange(real)
    if not bool(begins.all()):
        row_starts = (row_len.cumsum(0) - row_len)[: len(own)]
        to_rows = torch.empty(int(row_len.sum()), dtype=torch.int64)
        to_rows[len(to_rows) - len(filling) :] = real + filling
        to_rows[row_starts[rows.prompt_row] + rows.prompt_at] = prompt_places
        answers = (row_starts + rows.prompt_len)[rows.response_row] + rows.response_at
        to_rows[answers[is_read]] = response_places
        shared = SharedPrompts.of(to_rows.numpy(), len(ids), device)
        places = to_rows[: len(to_rows) - len(filling)]
    plan = plan_rows(row_len.numpy(), device, shared)
    return _Layout(ids[None], positions[None], prompt_starts, response_starts, plan, places)


def _begins_group(rows: _Rows, routes: torch.Tensor | None) -> torch.Tensor:
    """(B,) whether a row's prompt, or the experts of its tokens, differ from those of the row before it."""
    begins = torch.ones(len(rows.prompt_len), dtype=torch.bool)
    begins[1:] = rows.prompt_len[1:] != rows.prompt_len[:-1]
    before = (torch.arange(len(rows.prompt_ids)) - rows.prompt_len[rows.prompt_row]).clamp(min=0)
    differs = rows.prompt_ids != rows.prompt_ids[before]
    if routes is not None:
        experts, lengths = ragged.parts(routes)
        starts = lengths.cumsum(0) - lengths
        here = starts[rows.prompt_row] + rows.prompt_at
        above = starts[(rows.prompt_row - 1).clamp(min=0)] + rows.prompt_at
        differs |= (experts[here] != experts[above.clamp(max=len(experts) - 1)]).flatten(1).any(1)
    begins[rows.prompt_row[differs]] = True
    return begins


def _coordinates(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and place in the row of every token of rows of these lengths, (sum of lengths,) each."""
    row = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return row, torch.arange(len(row)) - starts[row]
