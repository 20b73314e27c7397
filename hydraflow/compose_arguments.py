"""Tells Hydra's own options from overrides on a command line.

In: the arguments after the program's name. Out: `Arguments`, or one problem for each option that there is not.
Left out on purpose: what overrides mean (`compose.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from hydraflow.errors import Problem

_SWITCHES = {"--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc"}
_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
_INFO = {"--info", "-i"}
_INFO_KINDS = {"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"}
_COMMANDS = {"--run", "-r", "--multirun", "-m", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
_OWN_FILES = {"--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}


@dataclass
class Arguments:
    """A command line taken apart."""

    options: list[str] = field(default_factory=list)
    """Hydra's options with their values, as given."""
    overrides: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Whether one of these options was given."""
        return any(option.partition("=")[0] in names for option in self.options)

    @property
    def multirun(self) -> bool:
        """Whether several configurations are to run."""
        return self.has("--multirun", "-m")

    @property
    def own_files(self) -> bool:
        """Whether the user brings configuration files."""
        return self.has(*_OWN_FILES)

    def value(self, *names: str) -> str | None:
        """The value of an option, None where it was not given."""
        for position, option in enumerate(self.options):
            name, equals, value = option.partition("=")
            if name in names:
                return value if equals else self.options[position + 1]
        return None


def split(argv: Sequence[str]) -> Arguments:
    """Takes a command line apart.

    >>> split(["--cfg", "job", "data.shuffle=false", "--config-dir=mine"])
    Arguments(options=['--cfg', 'job', '--config-dir=mine'], overrides=['data.shuffle=false'], problems=[])
    """
    arguments, rest = Arguments(), list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not word.startswith("-"):
            arguments.overrides.append(word)
        elif name in _SWITCHES or (equals and name in _WITH_VALUE | _INFO):
            arguments.options.append(word)
        elif name in _INFO:
            arguments.options += [word, rest.pop(0) if rest and rest[0] in _INFO_KINDS else "all"]
        elif name in _WITH_VALUE and rest:
            arguments.options += [word, rest.pop(0)]
        else:
            arguments.problems.append(_unknown_option(word, rest))
    commands = [option for option in arguments.options if option.partition("=")[0] in _COMMANDS]
    if len(commands) > 1:
        arguments.problems.append(Problem(" ".join(commands), None, "only one of these options at a time", commands[0]))
    if arguments.has("--resolve") and not arguments.has("--cfg", "-c"):
        arguments.problems.append(Problem("--resolve", None, "goes with --cfg", "--cfg job --resolve"))
    return arguments


def _unknown_option(word: str, rest: list[str]) -> Problem:
    name, equals, value = word.partition("=")
    if name in _WITH_VALUE:
        return Problem(word, None, "needs a value", f"{word} ...")
    if near := difflib.get_close_matches(name, _SWITCHES | _WITH_VALUE | _INFO, n=1, cutoff=0.8):
        return Problem(word, None, "unknown option", f"{near[0]}{equals}{value}")
    if not equals and rest and "=" not in rest[0] and not rest[0].startswith("-"):
        value = rest.pop(0)
    return Problem(word, None, "unknown option; settings are written key=value, without dashes", f"{name.lstrip('-')}={value or '...'}")
