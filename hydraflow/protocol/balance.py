"""Balanced partitions of rows: equal shares for ranks, and micro-batches under a token budget.

In: a length (tokens, or any cost) per row. Out: row numbers, by which both batches and references can be
split. Both functions are deterministic and take about a tenth of a second for 100,000 rows. Left out on
purpose: reading the lengths and moving the rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from torch import Tensor

Lengths = Sequence[int] | np.ndarray | Tensor


def equal_size_partitions(lengths: Lengths, k: int) -> list[list[int]]:
    """`k` parts with the same number of rows and nearly the same total length; row numbers ascend within a
    part.

    Rows are dealt out longest first, back and forth over the parts; then the heaviest and the lightest part
    swap rows as long as that brings them closer. ValueError when `k` does not divide the number of rows.

    >>> equal_size_partitions([9, 1, 5, 5], 2)
    [[0, 1], [2, 3]]
    """
    cost = np.asarray(lengths, dtype=np.float64)
    if k < 1 or len(cost) % k:
        raise ValueError(f"{len(cost)} rows do not divide into {k} parts of equal size")
    if len(cost) == 0:
        return [[] for _ in range(k)]
    dealt = np.argsort(-cost, kind="stable").reshape(-1, k)
    # every other round backwards, or part 0 would get the longest each time
    dealt[1::2] = dealt[1::2, ::-1].copy()
    parts = dealt.T.copy()  # (k, B / k) row numbers
    _swap_until_level(parts, cost)
    return sorted(np.sort(part).tolist() for part in parts)


def token_bins(lengths: Lengths, max_tokens: int, min_bins: int = 1) -> list[list[int]]:
    """Rows in bins of at most `max_tokens` tokens each, loads nearly equal; row numbers ascend within a bin.

    There are at least `min_bins` bins, and more if the rows need them, but never more than rows. For the same
    number of bins on every rank, call again with the maximum of the ranks' counts as `min_bins`. ValueError
    when one row alone has more than `max_tokens`.

    >>> token_bins([6, 5, 4, 3], max_tokens=10), token_bins([6, 5, 4, 3], max_tokens=10, min_bins=3)
    ([[0, 3], [1, 2]], [[0], [1], [2, 3]])
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if len(tokens) == 0:
        return []
    longest = int(tokens.argmax())
    if tokens[longest] > max_tokens:
        raise ValueError(
            f"row {longest} has {int(tokens[longest])} tokens, more than the {max_tokens} that a micro-batch"
            " may hold"
        )
    order = np.argsort(-tokens, kind="stable").tolist()
    sizes = tokens.tolist()
    bins = _fewest_bins(order, sizes, max_tokens)
    wanted = min(min_bins, len(sizes))
    if wanted > len(bins):
        spread = _fill(order, sizes, max_tokens, wanted)
        bins = spread if len(spread) == wanted else _split_to(bins, sizes, wanted)
    return sorted(sorted(rows) for rows in bins)


def _swap_until_level(parts: np.ndarray, cost: np.ndarray) -> None:
    """Swaps rows of the heaviest and the lightest part, in place, until no swap helps; 4 k swaps at most."""
    totals = cost[parts].sum(axis=1)
    for _ in range(4 * len(parts)):
        heavy, light = int(totals.argmax()), int(totals.argmin())
        gap = totals[heavy] - totals[light]
        ranked = parts[light][np.argsort(cost[parts[light]], kind="stable")]
        # a swap changes the gap by twice the difference of the two rows, so half the gap is the ideal
        at = np.searchsorted(cost[ranked], cost[parts[heavy]] - gap / 2)
        candidates = np.stack([np.clip(at, 0, len(ranked) - 1), np.clip(at - 1, 0, len(ranked) - 1)])
        # (2, rows of a part): the gap after swapping with either neighbour of the ideal
        left = np.abs(gap - 2 * (cost[parts[heavy]] - cost[ranked[candidates]]))
        which, give = np.unravel_index(int(left.argmin()), left.shape)
        if left[which, give] >= gap:
            return
        take = int(np.flatnonzero(parts[light] == ranked[candidates[which, give]])[0])
        moved = cost[parts[heavy, give]] - cost[parts[light, take]]
        parts[heavy, give], parts[light, take] = parts[light, take], parts[heavy, give]
        totals[heavy] -= moved
        totals[light] += moved


def _fewest_bins(order: list[int], sizes: list[int], max_tokens: int) -> list[list[int]]:
    """As few bins as filling the emptiest first needs, with balanced loads."""
    least = max(1, -(-sum(sizes) // max_tokens))
    bins = _fill(order, sizes, max_tokens, least)
    if len(bins) > least:  # bins opened late are nearly empty; starting with all of them levels the loads
        level = _fill(order, sizes, max_tokens, len(bins))
        return level if len(level) == len(bins) else bins
    return bins


def _fill(order: list[int], sizes: list[int], max_tokens: int, count: int) -> list[list[int]]:
    """Longest row first, each into the emptiest of at least `count` bins, or a new one where none fits."""
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, 0, number) for number in range(count)]  # a heap of (tokens, rows, bin)
    for row in order:
        tokens, rows, number = emptiest[0]
        if tokens + sizes[row] > max_tokens:
            bins.append([row])
            heapq.heappush(emptiest, (sizes[row], 1, len(bins) - 1))
            continue
        bins[number].append(row)
        heapq.heapreplace(emptiest, (tokens + sizes[row], rows + 1, number))
    return [rows for rows in bins if rows]


def _split_to(bins: list[list[int]], sizes: list[int], count: int) -> list[list[int]]:
    """Halves the heaviest bin with more than one row until there are `count`, because `_fill` with `count`
    bins may end with a different number."""
    bins = list(bins)
    while len(bins) < count:
        several = [number for number, rows in enumerate(bins) if len(rows) > 1]
        heaviest = max(several, key=lambda number: sum(sizes[row] for row in bins[number]))
        rows = bins[heaviest]
        bins[heaviest] = rows[0::2]
        bins.append(rows[1::2])
    return bins
