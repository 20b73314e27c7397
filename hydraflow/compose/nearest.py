"""Finds the known keys that are nearest to a misspelt one.

In: a key as the user wrote it, the known keys. Out: the nearest, best first. Keys are compared name by name:
the last names must be similar in their letters, or the same with words left out; the sections before them may
be missing, misspelt or wrong, each at a cost. Differences in case, dashes and underscores cost nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

_FAR = 0.3
"""Largest share of a last name's letters that may differ."""
_FAR_SECTION = 0.4
"""The same for a section."""
_SHORT = 6
"""Last names of at most this many letters may differ by one edit: top_k is not tp_size."""
_FAR_WHOLE = 0.2
"""The same for a whole key without separators, which tolerates misplaced dots."""
_MISSING_SECTION, _EXTRA_SECTION, _WRONG_SECTION = 0.1, 0.4, 0.6
_SHORTENED, _MISSING_WORD = 0.3, 0.05
"""Costs; an entirely different name would cost 1."""
_NAMING = ("path", "name")
"""Last names of keys that users set through their section: model=... for model.path."""


def nearest(path: str, keys: Iterable[str], count: int = 3) -> list[str]:
    """The `count` keys most similar to `path`. If the best has the same last name, so must the others.

    >>> nearest("data.train_bach_size", ["data.train_batch_size", "data.train_max_samples", "trainer.seed"])
    ['data.train_batch_size']
    >>> nearest("trainer.epochs", ["actor.ppo_epochs", "trainer.total_epochs", "trainer.seed"])
    ['trainer.total_epochs', 'actor.ppo_epochs']
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
    *sections, last = given = _names(path)
    *known_sections, known = _names(key)
    if known in _NAMING and tuple(known_sections[-len(given) :]) == given:  # a section given a value
        return _MISSING_WORD + _MISSING_SECTION * (len(known_sections) - len(given))
    around, prices = _section_price(sections, known_sections), []
    most, here, there = _most(last, known), "".join(given), "".join((*known_sections, known))
    name, whole = _share(last, known, most), _share(here, there, _most(here, there, _FAR_WHOLE))
    if name is not None:
        prices.append(2 * name + around)
    missing = missing_words(path, key)
    if missing is not None and (missing == 1 or around < _EXTRA_SECTION):
        prices.append(_SHORTENED + _MISSING_WORD * missing + 2 * around)
    if whole is not None and name is not None:
        prices.append(2 * whole)
    elif whole is not None and whole * max(len(here), len(there)) <= max(2, most):
        prices.append(1.0 + whole)  # a long section must not make other last names similar
    return min(prices, default=None)


def _most(a: str, b: str, share: float = _FAR) -> int:
    """The largest number of edits between two similar names."""
    length = max(len(a), len(b))
    return 1 if length <= _SHORT else int(share * length)


def missing_words(path: str, key: str) -> int | None:
    """The number of words of the last name of `key` that `path` leaves out; None: it is not a shorter form.

    >>> missing_words("trainer.n_gpus", "trainer.n_gpus_per_node"), missing_words("file", "data.train_files")
    (2, 1)
    >>> missing_words("trainer.gpus_n", "trainer.n_gpus_per_node")
    """
    given, known = _words(path), _words(key)
    if sum(map(len, given)) < 3 or len(given) >= len(known):
        return None
    rest = iter(known)
    in_order = all(word in rest for word in given)  # `in` advances the iterator
    return len(known) - len(given) if in_order else None


@cache
def _words(path: str) -> list[str]:
    """The words of a key's last name, each in the singular."""
    words = re.split(r"[^a-z0-9]+", path.lower().rpartition(".")[2])
    return [word.removesuffix("s") for word in words if word]


@cache
def _names(path: str) -> tuple[str, ...]:
    return tuple(re.sub(r"[^a-z0-9]", "", name) for name in path.lower().split("."))


def _section_price(given: Sequence[str], known: Sequence[str]) -> float:
    """The lowest cost of aligning the given sections with the known ones, in order."""
    row = [_MISSING_SECTION * column for column in range(len(known) + 1)]
    for name in given:
        above, row = row, [row[0] + _EXTRA_SECTION]
        for column, other in enumerate(known):
            share = _share(name, other, int(_FAR_SECTION * max(len(name), len(other))))
            change = _WRONG_SECTION if share is None else share
            row.append(
                min(
                    above[column] + change, above[column + 1] + _EXTRA_SECTION, row[column] + _MISSING_SECTION
                )
            )
    return row[-1]


@cache
def _share(a: str, b: str, most: int) -> float | None:
    """Edits between two names as a share of the longer; None: more than `most`."""
    if a == b:
        return 0.0
    left, right = Counter(a), Counter(b)
    if max((left - right).total(), (right - left).total()) > most:  # a cheap lower bound on the edits
        return None
    edits = _edits(a, b)
    return edits / max(len(a), len(b)) if edits <= most else None


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
