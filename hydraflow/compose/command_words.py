"""A command line without its secrets, for run.json, trackers and messages.

In: its words. Out: the same words; an override that holds a secret is rewritten without it. Values are parsed
by Hydra's own parser, so that hiding does not depend on how the value was quoted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException

from hydraflow.errors import shown
from hydraflow.redact import ENVIRONMENTS, HIDDEN, public, public_word

_NAMES = re.compile(r"\w+")


def public_words(words: Sequence[str]) -> list[str]:
    """The words, those of Python and options among them.

    >>> public_words(["-m", "hydraflow.main_ppo", "judge={url: 'https://host/?sig=abc', pass: two words}"])
    ['-m', 'hydraflow.main_ppo', 'judge={url: https://host/?sig=(hidden), pass: (hidden)}']
    """
    return [_public(word) for word in words]


def unparsed(word: str) -> str:
    """A word that is not an override, or that Hydra cannot parse; without its value if that may be secret."""
    public, (key, equals, value) = public_word(word), word.partition("=")
    if not equals or word.startswith("-") or public_word(key) != key:
        return public
    holds_variables = not ENVIRONMENTS.isdisjoint(_NAMES.findall(value))
    return f"{key}={HIDDEN}" if public != word or holds_variables else public


def values(override: Override) -> list[Any]:
    """The values that an override sets: one, or those of a sweep; none of a deletion or a range."""
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
