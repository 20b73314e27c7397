"""What a command line came to, besides the configuration itself: where each value is from, what must be said
aloud, own options.

In: nothing. Out: `Command`, which `launch` hands to every `run`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydraflow.errors import Problem

DEFAULT = "default"
"""Origin of a value that nobody set."""
COMMAND_LINE = "command line"
"""Origin of a value that an override set."""


@dataclass(frozen=True)
class Counts:
    """How many keys the user set, and what became of them.

    >>> print(Counts(honoured=12, without_effect=2, unsupported=1))
    12 keys honoured, 2 accepted without effect, 1 unsupported
    """

    honoured: int = 0
    without_effect: int = 0
    unsupported: int = 0

    def __str__(self) -> str:
        noun = "key" if self.honoured == 1 else "keys"
        return (
            f"{self.honoured} {noun} honoured, {self.without_effect} accepted without effect,"
            f" {self.unsupported} unsupported"
        )


@dataclass(frozen=True)
class Command:
    """One composed command."""

    config_name: str
    """The entry point's configuration: ppo, sft, generate or eval."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Every leaf of the schema -> default, a YAML file, command line, or the key that it follows."""
    notes: tuple[str, ...] = ()
    """What the user should know: renamed keys, keys without effect, keys that were not checked."""
    counts: Counts = Counts()
    unsupported: tuple[Problem, ...] = ()
    """Keys of verl's that cannot be honoured; only a tolerant entry point sees any, others refuse them."""
    switches: Mapping[str, str | bool] = field(default_factory=dict)
    """The entry point's own options that were given: a flag -> True, others -> their value."""
    words: tuple[str, ...] = ()
    """The command line of the process, without its secrets; empty where the overrides came from elsewhere."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Those leaves whose values are from the environment, with `${oc.env:NAME}` in place of what it holds."""

    @property
    def given(self) -> frozenset[str]:
        """The leaves that the command line sets."""
        return frozenset(key for key, origin in self.origins.items() if origin == COMMAND_LINE)
