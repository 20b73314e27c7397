"""Expands a sweep to its command lines.

In: overrides, some of which list values (`key=a,b`, `key=range(1,4)`). Out: one list of words for each
combination, as `--multirun` would run them. Left out on purpose: sweepers other than Hydra's basic one, which
run their jobs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from hydraflow.compose.command_words import parsed
from hydraflow.errors import ConfigError

MOST = 1000
"""Largest number of combinations; more are probably a mistake."""


def combinations(words: Sequence[str]) -> list[list[str]]:
    """Every combination, the last word varying fastest. Options (`--config-name ...`) go to each. Raises
    ConfigError.

    >>> combinations(["trainer.seed=1,2", "data.shuffle=false"])
    [['trainer.seed=1', 'data.shuffle=false'], ['trainer.seed=2', 'data.shuffle=false']]
    """
    choices = [_values(word) for word in words]
    count = prod(map(len, choices))
    if count > MOST:
        raise ConfigError.one(
            "--multirun", None, f"{count} jobs, and at most {MOST} are submitted at once", "list fewer values"
        )
    return [list(words) for words in product(*choices)]


def _values(word: str) -> list[str]:
    if word.startswith("-") or "=" not in word:
        return [word]
    override = parsed(word)
    if override is None or not override.is_sweep_override():
        return [word]  # what cannot be parsed is reported by the job
    key = word.partition("=")[0]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]
