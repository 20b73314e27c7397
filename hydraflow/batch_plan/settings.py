"""A configuration with the origins of its values, and copies of it with overrides.

In: a configuration, origins of keys. Out: values, origins and their strength. Left out on purpose: what the
values mean.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Config = TypeVar("Config")
DEFAULT, FILE, COMMAND_LINE = "default", "file", "command line"
"""Origins of values: unset, set in a file of unknown name, set by an override."""


@dataclass(frozen=True)
class Settings(Generic[Config]):
    """A configuration, the schema's defaults, and the origins of those keys whose origin is known."""

    config: Config
    defaults: Config
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, key: str) -> str:
        """default, a file or command line; an unknown origin is the default if the value is."""
        if key in self.origins:
            return self.origins[key]
        return DEFAULT if value_at(self.config, key) == value_at(self.defaults, key) else FILE

    def strength(self, key: str) -> int:
        """Strength of a key's origin."""
        return strength(self.origin(key))

    def follows(self, key: str, leader: str) -> bool:
        """Whether a key is unset: it then has its default, or has been given the value of its leader."""
        return self.origin(key) in (DEFAULT, f"follows {leader}")

    def changed(self, values: Mapping[str, object]) -> Settings[Config]:
        """The settings as if these overrides were on the command line.

        >>> from hydraflow.schema import PPOConfig
        >>> settings = Settings(PPOConfig(), PPOConfig()).changed({"data.train_batch_size": 96})
        >>> settings.config.data.train_batch_size, settings.origin("data.train_batch_size")
        (96, 'command line')
        """
        if not values:
            return self
        config = self.config
        for key, value in values.items():
            config = with_value(config, key, value)
        return Settings(config, self.defaults, {**self.origins, **dict.fromkeys(values, COMMAND_LINE)})


def strength(origin: str) -> int:
    """0 for a default, 1 for a file, 2 for the command line; the weaker value yields to the stronger."""
    return {DEFAULT: 0, COMMAND_LINE: 2}.get(origin, 1)


def value_at(config: object, key: str) -> object:
    """The value of a dotted key in nested dataclasses."""
    return operator.attrgetter(key)(config)


def with_value(section: Config, key: str, value: object) -> Config:
    """A copy in which only the sections on the way to `key` are new."""
    name, _, rest = key.partition(".")
    changed = copy.copy(section)
    setattr(changed, name, with_value(getattr(section, name), rest, value) if rest else value)
    return changed
