"""Finds the known keys that are nearest to a misspelt one.

In: a key as the user wrote it, the known keys. Out: the nearest, best first. Keys are compared name by name:
the last names must be similar; the sections before them may be missing, misspelt or wrong, each at a cost.
Differences in case, dashes and underscores cost nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

_FAR = 0.4
"""Largest share of a name's letters that may differ."""
_FAR_WHOLE = 0.2
"""The same for a whole key without separators, which tolerates misplaced dots."""
_MISSING_SECTION, _EXTRA_SECTION, _WRONG_SECTION = 0.1, 0.4, 0.6
"""Costs; 1 is that of an entirely different name."""


def nearest(path: str, keys: Iterable[str], count: int = 3) -> list[str]:
    """The `count` keys most similar to `path`; only those of its last name if the most similar one has that.

    >>> nearest("data.train_bach_size", ["data.train_batch_size", "data.val_batch_size", "trainer.seed"])
    ['data.train_batch_size', 'data.val_batch_size']
    >>> nearest("actor.top_k", ["rollout.top_p", "rollout.top_k"])
    ['rollout.top_k']
    """
    prices = {key: price for key in keys if (price := _price(path, key)) is not None}
    found = sorted(prices, key=lambda key: prices[key])
    if found and _names(found[0])[-1] == _names(path)[-1]:  # only its sections are wrong
        found = [key for key in found if _names(key)[-1] == _names(path)[-1]]
    return found[:count]


def _price(path: str, key: str) -> float | None:
    """The cost of changing `path` to `key`; None: they are not similar."""
    *sections, last = _names(path)
    *known_sections, known = _names(key)
    whole = _share("".join(_names(path)), "".join(_names(key)), _FAR_WHOLE)
    name = _share(last, known, _FAR)
    if name is None:
        return None if whole is None else 1.0 + whole
    by_name = 2 * name + _section_price(sections, known_sections)
    return by_name if whole is None else min(by_name, 2 * whole)


@cache
def _names(path: str) -> tuple[str, ...]:
    return tuple(re.sub(r"[^a-z0-9]", "", name) for name in path.lower().split("."))


def _section_price(given: Sequence[str], known: Sequence[str]) -> float:
    """The lowest cost of aligning the given sections with the known ones, in order."""
    row = [_MISSING_SECTION * column for column in range(len(known) + 1)]
    for name in given:
        above, row = row, [row[0] + _EXTRA_SECTION]
        for column, other in enumerate(known):
            share = _share(name, other, _FAR)
            change = _WRONG_SECTION if share is None else share
            row.append(
                min(
                    above[column] + change, above[column + 1] + _EXTRA_SECTION, row[column] + _MISSING_SECTION
                )
            )
    return row[-1]


@cache
def _share(a: str, b: str, limit: float) -> float | None:
    """Edits between two names as a share of the longer; None above `limit`."""
    if a == b:
        return 0.0
    length = max(len(a), len(b))
    most = int(limit * length)
    left, right = Counter(a), Counter(b)
    if max((left - right).total(), (right - left).total()) > most:  # a cheap lower bound of the edits
        return None
    edits = _edits(a, b)
    return edits / length if edits <= most else None


def _edits(a: str, b: str) -> int:
    """Edit distance with swaps of neighbours (Damerau 1964; optimal string alignment).

    >>> _edits("seed", "sede"), _edits("gamma", "gama")
    (1, 1)
    """
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                best = min(best, older[j - 2] + 1)
            row.append(best)
    return row[-1]
