"""Which trajectories share an optimizer step, and which data rank gets them. The controller decides, from
lengths and groups alone.

In: lengths and group of each row, and the role's plan. Out: one order of the step's rows. Mini-batches are
cut in the order of the groups (shuffled by seed if asked) before rows are split over ranks; balancing moves
rows only inside one mini-batch. So what is in a mini-batch does not depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from hydraflow.batch_plan.parts import RolePlan
from hydraflow.protocol.balance import equal_size_partitions, token_bins
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.workers.training import ROWS_PER_RANK


@dataclass(frozen=True)
class MiniBatches:
    """The rows of a training step, cut into optimizer steps and data ranks."""

    order: np.ndarray
    """int64: row numbers rank by rank, and within a rank mini-batch by mini-batch."""
    rows_per_rank: list[int]
    """For each mini-batch, the rows that every data rank gets."""
    live: np.ndarray
    """bool, one per entry of `order`: False for a dead row, which repeats another one because the rows do
    not divide by the ranks, and is not trained on."""


Batch = TypeVar("Batch", DataProto, RemoteBatch)


def dispatched(batch: Batch, cut: MiniBatches, plan: RolePlan) -> Batch:
    """A batch for the role's update: rows in the order of dispatch; a column `live` if some rows are dead; in
    meta_info the sizes of the mini-batches, if they are not as planned."""
    ordered = batch.select_idxs(cut.order)
    if any(rows != plan.rows_per_rank for rows in cut.rows_per_rank):
        ordered.meta_info[ROWS_PER_RANK] = cut.rows_per_rank
    if cut.live.all():
        return ordered
    return ordered.union(DataProto.from_dict({"live": torch.from_numpy(cut.live)}))


def cut_mini_batches(
    lengths: np.ndarray,
    groups: np.ndarray,
    plan: RolePlan,
    *,
    balance: bool,
    shuffle_key: tuple[int, ...] | None,
    prompt_lengths: np.ndarray | None = None,
) -> MiniBatches:
    """Mini-batches of `plan.mini_batch_prompts` whole groups; the last may have fewer. With
    `plan.micro.whole_groups` no group is divided among ranks, whatever that adds in dead rows.

    `lengths` (S,) tokens of each row, `groups` (S,) its group, any integers in any order. `shuffle_key` seeds
    the shuffle of the groups; None keeps the order in which they first appear. `prompt_lengths` (S,) how many
    of a row's tokens are its prompt; None keeps groups of equal size whole wherever that is possible.

    >>> from hydraflow.batch_plan.parts import MicroPlan
    >>> plan = RolePlan(2, 1, 2, 1, 1, False, MicroPlan(1, None), optimizer_steps_per_step=2)
    >>> cut = cut_mini_batches(np.array([5, 1, 9]), np.array([7, 4, 7]), plan, balance=True, shuffle_key=None)
    >>> cut.order.tolist(), cut.rows_per_rank, cut.live.tolist()
    ([0, 1, 2, 1], [1, 1], [True, True, True, False])
    """
    ranks = plan.data_ranks
    per_rank: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for rows in _whole_groups(groups, plan.mini_batch_prompts, shuffle_key):
        if plan.micro.whole_groups:
            split = _undivided(rows, lengths if balance else None, groups, ranks)
        else:
            filled = np.concatenate([rows, np.full(-len(rows) % ranks, -1)])
            split = np.split(filled, ranks)
            if balance:
                split = _balanced(filled, lengths, groups, prompt_lengths, ranks)
        for rank, part in enumerate(split):
            per_rank[rank].append(part)
    order = np.concatenate([part for parts in per_rank for part in parts])
    live = order >= 0
    order = np.where(live, order, lengths.argmin())  # the shortest row costs least
    return MiniBatches(order, [len(part) for part in per_rank[0]], live)


def _whole_groups(groups: np.ndarray, each: int, shuffle_key: tuple[int, ...] | None) -> list[np.ndarray]:
    """The rows of each mini-batch of `each` groups."""
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    place = np.empty_like(first)  # of each group, in the order in which they appear
    place[np.argsort(first)] = np.arange(len(first))
    if shuffle_key is not None:
        drawn = np.random.default_rng(shuffle_key).permutation(len(first))
        place = np.argsort(drawn)[place]
    rows = np.argsort(place[group], kind="stable")
    ends = np.cumsum(np.bincount(place[group]))[each - 1 : -1 : each]  # of all mini-batches but the last
    return np.split(rows, ends)


def _balanced(
    filled: np.ndarray, lengths: np.ndarray, groups: np.ndarray, prompt_lengths: np.ndarray | None, ranks: int
) -> list[np.ndarray]:
    """Equally many rows for each rank; -1 is no row. Groups stay whole if they have equal sizes and their
    number is divisible by `ranks`, unless dividing them lowers the largest number of tokens of a rank."""
    sizes = np.unique(groups[filled[filled >= 0]], return_counts=True)[1]
    if len(set(sizes.tolist())) > 1 or len(sizes) % ranks:
        return _level(filled, 1, lengths, ranks)
    whole = _level(filled, sizes[0], lengths, ranks)
    if prompt_lengths is None:
        return whole
    divided = _level(filled, 1, lengths, ranks)
    tokens = partial(_computed_tokens, lengths=lengths, groups=groups, prompt_lengths=prompt_lengths)
    return min(whole, divided, key=lambda parts: max(map(tokens, parts)))


def _undivided(
    rows: np.ndarray, lengths: np.ndarray | None, groups: np.ndarray, ranks: int
) -> list[np.ndarray]:
    """Whole groups for each rank, in order, filled up with -1, which is no row. With `lengths` the ranks'
    total lengths are made nearly equal; they get equally many groups if all have the same size and `ranks`
    divides their number."""
    whole = np.split(rows, np.flatnonzero(np.diff(groups[rows])) + 1)
    if lengths is None:
        parts = [part.tolist() for part in np.array_split(np.arange(len(whole)), ranks)]
    elif len(set(map(len, whole))) == 1 and len(whole) % ranks == 0:
        return _level(rows, len(whole[0]), lengths, ranks)
    else:
        tokens = [int(lengths[group].sum()) for group in whole]
        parts = token_bins(tokens, sum(tokens), min_bins=ranks)
        parts += [[]] * (ranks - len(parts))
    shares = [np.concatenate([rows[:0], *(whole[number] for number in part)]) for part in parts]
    most = max(map(len, shares))
    return [np.concatenate([share, np.full(most - len(share), -1)]) for share in shares]


def _level(filled: np.ndarray, each: int, lengths: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Rows in units of `each` neighbours, dealt out to ranks with nearly equal total lengths."""
    units = filled.reshape(-1, each)
    weights = np.where(units < 0, 0, lengths[units]).sum(1)
    return [units[sorted(part)].reshape(-1) for part in equal_size_partitions(weights, ranks)]


def _computed_tokens(
    rows: np.ndarray, lengths: np.ndarray, groups: np.ndarray, prompt_lengths: np.ndarray
) -> int:
    """Tokens that a rank computes for these rows, if it computes a prompt once for all of its samples there;
    -1 is no row."""
    rows = rows[rows >= 0]
    prompts = prompt_lengths[rows]
    first = np.unique(groups[rows], return_index=True)[1]
    return int(lengths[rows].sum() - prompts.sum() + prompts[first].sum())
