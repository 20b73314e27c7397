"""The words of a command line: without secrets, or expanded into the jobs of a sweep.

In: its words. Out: the same words without secrets; or one list of words for each combination, as `--multirun`
would run them. Hydra's own parser reads the values, so that it does not matter how they were quoted. Left out
on purpose: sweepers other than Hydra's basic one, which run their jobs themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException

from hydraflow.errors import ConfigError, shown
from hydraflow.redact import ENVIRONMENTS, HIDDEN, public, public_word

_NAMES = re.compile(r"\w+")
MOST = 1000
"""Largest number of jobs of a sweep; more are probably a mistake."""


def public_words(words: Sequence[str]) -> list[str]:
    """The words, Python's and options included, without secrets.

    >>> public_words(["-m", "hydraflow.main_ppo", "judge={url: 'https://host/?sig=abc', pass: two words}"])
    ['-m', 'hydraflow.main_ppo', 'judge={url: https://host/?sig=(hidden), pass: (hidden)}']
    """
    return [_public(word) for word in words]


def unparsed(word: str) -> str:
    """A word that Hydra cannot parse as an override, without its value if that may be secret."""
    public, (key, equals, value) = public_word(word), word.partition("=")
    if not equals or word.startswith("-") or public_word(key) != key:
        return public
    holds_variables = not ENVIRONMENTS.isdisjoint(_NAMES.findall(value))
    return f"{key}={HIDDEN}" if public != word or holds_variables else public


def values(override: Override) -> list[Any]:
    """The values that an override sets: one, or those of a sweep; none for a deletion or a range."""
    if override.is_delete():
        return []
    if not override.is_sweep_override():
        return [plain(override.value())]
    sweep = override.value()
    return [plain(value) for value in sweep.list] if isinstance(sweep, ChoiceSweep) else []


def plain(value: Any) -> Any:
    """A parsed value with the parser's classes replaced by plain Python ones."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(plain(name)): plain(item) for name, item in value.items()}
    return value


def parsed(word: str) -> Override | None:
    """The override; None if Hydra cannot parse it."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _public(word: str) -> str:
    override = None if word.startswith("-") or "=" not in word else parsed(word)
    if override is None:
        return unparsed(word)
    key, found = override.key_or_group, values(override)
    if not found:  # a range, or a deletion, which may name a value
        return unparsed(word)
    if all(public(value, key) == value for value in found):
        return word
    return f"{word.partition('=')[0]}={','.join(shown(value, key) for value in found)}"


def combinations(words: Sequence[str]) -> list[list[str]]:
    """The words of each job of a sweep, the last word varying fastest; each job gets all options
    (`--config-name ...`). Raises ConfigError if there are more than MOST.

    >>> combinations(["trainer.seed=1,2", "data.shuffle=false"])
    [['trainer.seed=1', 'data.shuffle=false'], ['trainer.seed=2', 'data.shuffle=false']]
    """
    choices = [_swept(word) for word in words]
    count = prod(map(len, choices))
    if count > MOST:
        rule = f"{count} jobs, and at most {MOST} are submitted at once"
        raise ConfigError.one("--multirun", None, rule, "list fewer values")
    return [list(words) for words in product(*choices)]


def _swept(word: str) -> list[str]:
    if word.startswith("-") or "=" not in word:
        return [word]
    override = parsed(word)
    if override is None or not override.is_sweep_override():
        return [word]  # the job reports a word that cannot be parsed
    key = word.partition("=")[0]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]
