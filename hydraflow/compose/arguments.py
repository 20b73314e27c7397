"""Separates the options on a command line, Hydra's and the entry point's, from the overrides.

In: the arguments after the program's name. Out: `Arguments`, or one problem for each unknown option. Left out
on purpose: what overrides mean (`overrides.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hydraflow.errors import Problem
from hydraflow.options import one_of

_RUNS = {"--run", "-r", "--multirun", "-m"}
_SWITCHES = {"--help", "-h", "--hydra-help", "--version", "--resolve", "--shell-completion", "-sc", *_RUNS}
CONFIG_PATH, CONFIG_DIR = ("--config-path", "-cp"), ("--config-dir", "-cd")
CONFIG_NAME = ("--config-name", "-cn")
_WITH_VALUE = {"--cfg", "-c", "--package", "-p", *CONFIG_PATH, *CONFIG_DIR, *CONFIG_NAME}
_INFO = {"--info", "-i"}
_INFO_KINDS = {"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"}
_CFG_KINDS = ("job", "hydra", "all")
_COMMANDS = {"--cfg", "-c", "--info", "-i", "--shell-completion", "-sc", *_RUNS}


@dataclass(frozen=True)
class CommandLineOption:
    """An option that an entry point declares."""

    name: str
    """The option with its dashes."""
    value: str = ""
    """Name of its value in the help; empty: it takes no value."""
    doc: str = ""
    choices: tuple[str, ...] = ()
    """Legal values; empty: any."""


@dataclass
class Arguments:
    """A parsed command line."""

    options: list[str] = field(default_factory=list)
    """Hydra's options with their values, as given."""
    overrides: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    switches: dict[str, str | bool] = field(default_factory=dict)
    """The entry point's own options that were given."""

    def has(self, *names: str) -> bool:
        """Whether one of these options was given."""
        return any(option.partition("=")[0] in names for option in self.options)

    @property
    def multirun(self) -> bool:
        """Whether several configurations are to run."""
        return self.has("--multirun", "-m")

    @property
    def runs(self) -> bool:
        """Whether the command runs something, rather than only printing it."""
        return not self.has(*(_COMMANDS - _RUNS), "--hydra-help", "--version")

    def value(self, *names: str) -> str | None:
        """The value of an option; "" for one without a value; None if it was not given."""
        return replace(self, options=list(self.options)).take(*names)

    def take(self, *names: str) -> str | None:
        """Removes an option from `options` and returns its `value`."""
        for position, option in enumerate(self.options):
            name, equals, value = option.partition("=")
            if name in names:
                del self.options[position]
                return value if equals or name in _SWITCHES else self.options.pop(position)
        return None


def split(argv: Sequence[str], switches: Sequence[CommandLineOption] = ()) -> Arguments:
    """Parses a command line.

    >>> found = split(["--cfg", "job", "data.shuffle=false", "--config-dir=mine"])
    >>> found.options, found.overrides
    (['--cfg', 'job', '--config-dir=mine'], ['data.shuffle=false'])
    >>> options = [CommandLineOption("--json"), CommandLineOption("--svg", value="FILE")]
    >>> split(["--svg", "step.svg", "--json"], options).switches
    {'--svg': 'step.svg', '--json': True}
    """
    arguments, rest = Arguments(), list(argv)
    own = {switch.name: switch for switch in switches}
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not word.startswith("-"):
            arguments.overrides.append(word)
        elif name in own:
            _take_own(arguments, own[name], word, rest)
        elif name in _SWITCHES or (equals and name in _WITH_VALUE | _INFO):
            arguments.options.append(word)
        elif name in _INFO:
            arguments.options += [word, rest.pop(0) if rest and rest[0] in _INFO_KINDS else "config"]
        elif name in _WITH_VALUE and rest:
            arguments.options += [word, rest.pop(0)]
        else:
            arguments.problems.append(_unknown_option(word, rest, set(own)))
    arguments.problems += _combination_problems(arguments)
    return arguments


def _take_own(arguments: Arguments, switch: CommandLineOption, word: str, rest: list[str]) -> None:
    """Moves an entry point's option, with its value if it takes one, from `rest` to `arguments.switches`."""
    _, equals, value = word.partition("=")
    if not switch.value:
        arguments.switches[switch.name] = True
        if equals:
            arguments.problems.append(Problem(word, None, "takes no value", switch.name))
        return
    if not equals:
        missing = not rest or rest[0].startswith("-")
        value = "" if missing else rest.pop(0)
    if not value:
        remedy = f"{switch.name} {switch.value}"
        arguments.problems.append(Problem(switch.name, None, "needs a value", remedy))
    elif switch.choices and value not in switch.choices:
        rule = one_of(*switch.choices).text
        remedy = " or ".join(f"{switch.name} {choice}" for choice in switch.choices)
        arguments.problems.append(Problem(f"{switch.name} {value}", None, rule, remedy))
    else:
        arguments.switches[switch.name] = value


def _combination_problems(arguments: Arguments) -> list[Problem]:
    problems: list[Problem] = []
    commands = [option for option in arguments.options if option.partition("=")[0] in _COMMANDS]
    if len(commands) > 1:
        problems.append(Problem(" ".join(commands), None, "only one of these options at a time", commands[0]))
    shown = arguments.value("--cfg", "-c")
    if shown is not None and shown not in _CFG_KINDS:
        rule = one_of(*_CFG_KINDS).text
        problems.append(Problem(f"--cfg {shown}", None, rule, "--cfg job"))
    if not arguments.has("--cfg", "-c") and arguments.take("--resolve") is not None:  # alone it crashes Hydra
        problems.append(Problem("--resolve", None, "goes with --cfg", "--cfg job --resolve"))
    return problems


def _unknown_option(word: str, rest: list[str], own: set[str]) -> Problem:
    name, equals, value = word.partition("=")
    if name in _WITH_VALUE:
        return Problem(word, None, "needs a value", f"{word} ...")
    if near := difflib.get_close_matches(name, _SWITCHES | _WITH_VALUE | _INFO | own, n=1, cutoff=0.8):
        return Problem(word, None, "unknown option", f"{near[0]}{equals}{value}")
    if not equals and rest and "=" not in rest[0] and not rest[0].startswith("-"):
        value = rest.pop(0)
    remedy = f"{name.lstrip('-')}={value}" if value else f"leave out {word}; --help lists the options"
    return Problem(word, None, "unknown option; settings are written key=value, without dashes", remedy)
