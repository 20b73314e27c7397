"""What `launch` passes to every `run` besides the configuration: origins of values, notes to print, the entry
point's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydraflow.batch_plan.settings import COMMAND_LINE
from hydraflow.errors import Problem
from hydraflow.system.printing import count


@dataclass(frozen=True)
class KeyCounts:
    """How many keys the user set, and how they were handled.

    >>> print(KeyCounts(honoured=12, without_effect=2, unsupported=1))
    12 keys honoured, 2 accepted without effect, 1 unsupported
    """

    honoured: int = 0
    without_effect: int = 0
    unsupported: int = 0

    def __str__(self) -> str:
        honoured = f"{count(self.honoured, 'key')} honoured"
        return f"{honoured}, {self.without_effect} accepted without effect, {self.unsupported} unsupported"


@dataclass(frozen=True)
class Command:
    """Facts about one command line."""

    config_name: str
    """The entry point's configuration: ppo, sft, generate or eval."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Leaf of the schema -> default, a YAML file, command line, or the key that it follows."""
    notes: tuple[str, ...] = ()
    """Lines for the user: renamed keys, keys without effect, keys that were not checked."""
    counts: KeyCounts = KeyCounts()
    unsupported: tuple[Problem, ...] = ()
    """verl's keys that are not supported; only a tolerant entry point gets any, others reject them."""
    switches: Mapping[str, str | bool] = field(default_factory=dict)
    """The entry point's options that were given: a flag -> True, others -> their value."""
    words: tuple[str, ...] = ()
    """The command line of the process, without its secrets; empty where the overrides came from elsewhere."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Leaves whose values come from the environment, with `${oc.env:NAME}` in place of the value."""

    @property
    def given(self) -> frozenset[str]:
        """The leaves that the command line sets."""
        return frozenset(key for key, origin in self.origins.items() if origin == COMMAND_LINE)
