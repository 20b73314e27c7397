"""The facts of a configuration key, declared beside its field: legal values, conditions, resume identity.

In: the arguments of `option(...)`, in the dataclasses of the `config.py` files. Out: an `Option` in the
field's metadata, from which the value checks, `--help`, the notes on keys without effect, what can be planned
but not run, and the identity of a resumed run are derived. A named choice (an estimator, a loss, an engine)
is an `Implementation`: the one place that says where its code is and which keys it reads. Standard library
only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from hydraflow.errors import shown
from hydraflow.system.durations import seconds_of
from hydraflow.system.importing import importing
from hydraflow.system.own_code import OwnFunction, parameters_of

_KEY = "option"
Choice = TypeVar("Choice", bound="Implementation")


@dataclass(frozen=True)
class Rule:
    """The legal values of a key, in words and as a predicate."""

    text: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    """The legal names; the error suggests the nearest."""
    example: str = ""
    """A legal value to suggest if no choice is similar; empty: the field's default."""


@dataclass(frozen=True)
class Beside:
    """A condition on a key's value and the other keys of its section, checked only if the key has an effect.
    In the texts `{s}` is the dotted path of the section, `{own}` the key's name, and `{name}` the value of
    the section's key of that name."""

    holds: Callable[[Any, Any], bool]
    """Takes the value and the section."""
    text: str
    remedy: str
    """Overrides that satisfy it."""


NoEffectCondition = Callable[[Any, str], tuple[str, str] | None]
"""Takes the section that holds a key, and the key's name. Returns None if the key has an effect; else why it
has none, and overrides that would give it one (empty: there are none). `{s}` in both is the dotted path of
the section."""


@dataclass(frozen=True)
class Switch:
    """A key that switches the rest of its section off."""

    off: Any
    """The value that switches it off."""
    remedy: str
    """An override that switches it on; `{s}` is the section."""
    why: str = ""
    """The reason in messages; empty: the switch and its value."""


@dataclass(frozen=True)
class Planned:
    """Values that the planner accepts but that are not implemented yet."""

    values: Callable[[Any], bool]
    what: str
    """Effect of the value, for messages; `{value}` and the section's other keys are filled in."""
    beside: Callable[[Any], bool] = lambda section: True
    """Whether it applies, given the section's other keys."""


@dataclass(frozen=True)
class Library:
    """An optional library that some choices need."""

    package: str
    """Name to import."""
    name: str
    """Its name in messages."""
    install: str
    """The command that installs it."""
    distributions: tuple[str, ...]
    """Distributions that contain it, by pip's names."""
    probe: str
    """Python that imports what we use of it; the doctor runs it in a process of its own. It may print lines
    version=VERSION, which counts before that of the distribution, and device=TYPE, the device type that the
    library was built for."""
    minimum: str = ""
    """The oldest version that is accepted; empty: any."""

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported; does not import it."""
        return importlib.util.find_spec(self.package) is not None

    def installed(self) -> Mapping[str, str]:
        """Versions of its distributions that are installed, by name."""
        found = {}
        for name in self.distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found

    @property
    def version(self) -> str:
        """The version of its distribution; empty: none is installed."""
        return next(iter(self.installed().values()), "")


@dataclass(frozen=True)
class ArgumentSource:
    """Where a library declares the arguments that an open mapping passes to it."""

    library: Library
    files: tuple[str, ...]
    """Source files, relative to its package."""
    classes: tuple[str, ...]
    """Classes in them whose annotated fields are the arguments."""


@dataclass(frozen=True)
class Implementation:
    """A named choice: where its code is, which keys it reads, what it needs, whether it is implemented."""

    where: str = ""
    """module:attribute; empty: not implemented yet."""
    reads: tuple[str, ...] = ()
    """Names of keys, besides the one that chooses, that have an effect with this choice."""
    planned: str = ""
    """Its effect, for messages, if it is not implemented yet."""
    needs: Library | None = None
    """An optional library that it needs."""

    @property
    def all_reads(self) -> tuple[str, ...]:
        """The keys that it and its parts read."""
        return self.reads

    def load(self) -> Any:
        """Imports and returns the class or function."""
        assert self.where, f"not implemented yet: {self.planned}"
        if own := OwnFunction.named(self.where):
            return own.load()
        module, _, attribute = self.where.partition(":")
        with importing():
            found = importlib.import_module(module)
        return operator.attrgetter(attribute)(found)

    def keys(self, *sections: Any) -> dict[str, Any]:
        """The keys of these sections that it reads, with their effective values. Of a section within them, a
        user's function cannot read the whole."""
        whole = OwnFunction.named(self.where) is None
        found = {
            field.name: section
            for section in sections
            for field in fields(section)
            if whole or not is_dataclass(getattr(section, field.name))
        }
        return {name: effective_value(found[name], name) for name in self.reads if name in found}

    def bound(self, *sections: Any) -> Any:
        """The function with the keys that it reads bound as keyword arguments, taken from these sections."""
        return functools.partial(self.load(), **self.keys(*sections))


class OwnChoices(dict[str, Choice]):
    """A table of named choices that also accepts user functions as `path.py:name`."""

    def __init__(self, named: Mapping[str, Choice], own: Callable[[str, tuple[str, ...]], Choice]):
        """`own` builds the choice from `path.py:name` and the function's parameters, which are empty if the
        file cannot be read."""
        super().__init__(named)
        self._own = own

    def __missing__(self, name: str) -> Choice:
        if OwnFunction.named(name) is None:
            raise KeyError(name)
        return self._own(name, parameters_of(name).names)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or OwnFunction.named(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """As `dict.get`, which would not call `__missing__`."""
        try:
            return self[name]
        except KeyError:
            return default


@dataclass(frozen=True)
class Option:
    """The facts of a key besides its type, default and description."""

    rule: Rule | None = None
    no_effect: tuple[NoEffectCondition, ...] = ()
    switch: Switch | None = None
    planned: tuple[Planned, ...] = ()
    shapes_training: bool | None = None
    """Whether a run resumes only with the same value; None: as its section, and true at the top level."""
    in_plan: bool = False
    """On resume, its effect is compared through the batch plan, because several keys can set the same
    number."""
    size: bool = False
    """A count in the batch plan: at least 1."""
    follows: str = ""
    """The key of the same section whose value is used for null."""
    beside: Beside | None = None
    verl: tuple[str, ...] = ()
    """verl's other names for the key, relative to the same section."""
    needs: Mapping[str, Library] = dataclasses.field(default_factory=dict)
    """Value -> an optional library that it needs."""
    passes_to: ArgumentSource | None = None
    """The names that an open mapping may have; None: not an open mapping, or one that user code reads."""


def option(
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    rule: Rule | None = None,
    choices: Collection[str] | Mapping[str, Implementation] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    no_effect: NoEffectCondition | tuple[NoEffectCondition, ...] = (),
    switch: Switch | None = None,
    planned: Planned | None = None,
    shapes_training: bool | None = None,
    in_plan: bool = False,
    size: bool = False,
    follows: str = "",
    beside: Beside | None = None,
    verl: tuple[str, ...] = (),
    passes_to: ArgumentSource | None = None,
) -> Any:
    """A dataclass field with the facts of its key.

    choices: names, or a table of them; table entries without code can only be planned. ge, gt, le, lt:
    limits of a number. The other arguments are those of `Option`.
    """
    is_limited = (ge, gt, le, lt) != (None, None, None, None)
    assert bool(choices) + size + (rule is not None) + is_limited <= 1, "a key has one rule"
    if choices:
        rule = _one_of_or_own(choices) if isinstance(choices, OwnChoices) else one_of(*choices)
    elif size:
        rule = AT_LEAST_ONE
    elif is_limited:
        rule = limits(ge=ge, gt=gt, le=le, lt=lt)
    table = choices if isinstance(choices, Mapping) else {}
    plans = [
        Planned(functools.partial(operator.eq, name), named.planned)
        for name, named in table.items()
        if named.planned
    ]
    facts = Option(
        rule=rule,
        no_effect=no_effect if isinstance(no_effect, tuple) else (no_effect,),
        switch=switch,
        planned=(*((planned,) if planned else ()), *plans),
        shapes_training=shapes_training,
        in_plan=in_plan,
        size=size,
        follows=follows,
        beside=beside,
        verl=verl,
        needs={name: named.needs for name, named in table.items() if named.needs},
        passes_to=passes_to,
    )
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata={_KEY: facts})
    return dataclasses.field(default=default, metadata={_KEY: facts})


free = functools.partial(option, shapes_training=False)
"""`option` of a key that does not shape training: a run can resume with another value."""


def option_of(field: dataclasses.Field[Any]) -> Option:
    """The facts of a field; an empty `Option` for a plain field."""
    return field.metadata.get(_KEY, Option())


@dataclass(frozen=True)
class Leaf:
    """A key of a configuration with its facts and its value."""

    key: str
    """Dotted path from the top."""
    option: Option
    value: Any
    section: Any
    """The dataclass that holds it."""
    above: tuple[Leaf, ...] = ()
    """The sections around it, outermost first."""


def walk(section: Any, prefix: str = "", above: tuple[Leaf, ...] = ()) -> Iterator[Leaf]:
    """Every leaf of a configuration, in source order."""
    for field in fields(section):
        value = getattr(section, field.name)
        leaf = Leaf(prefix + field.name, option_of(field), value, section, above)
        if is_dataclass(value):
            yield from walk(value, f"{leaf.key}.", (*above, leaf))
        else:
            yield leaf


# --- rules -----------------------------------------------------------------------------------------------


def listed(choices: Collection[str], word: str = "or") -> str:
    """Joins names for a sentence.

    >>> listed(["a", "b", "c"])
    'a, b or c'
    """
    names = list(choices)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


def one_of(*choices: str) -> Rule:
    """A rule that allows only these names."""
    return Rule(f"must be {listed(choices)}", lambda value: value in choices, choices)


def _one_of_or_own(choices: OwnChoices[Any]) -> Rule:
    text = f"must be {', '.join(choices)}, or your own function as path.py:name"
    return Rule(text, lambda value: value in choices, tuple(choices))


COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}
"""Words of a limit -> the comparison that they mean."""


def limits(
    *, ge: float | None = None, gt: float | None = None, le: float | None = None, lt: float | None = None
) -> Rule:
    """A finite number within limits.

    >>> limits(ge=0, le=1).text, limits(gt=0).text, limits(gt=0, lt=1).text
    ('must be from 0 to 1', 'must be above 0', 'must be above 0 and below 1')
    """
    bounds = {"at least": ge, "above": gt, "at most": le, "below": lt}
    given = {words: bound for words, bound in bounds.items() if bound is not None}
    text = " and ".join(f"{words} {bound}" for words, bound in given.items())
    if ge is not None and le is not None:
        text = f"from {ge} to {le}"

    def holds(value: Any) -> bool:
        return (isinstance(value, int) or math.isfinite(value)) and all(
            COMPARISONS[words](value, bound) for words, bound in given.items()
        )

    return Rule(f"must be {text}", holds)


def required(why: str, remedy: str) -> Beside:
    """Null is not allowed while the key has an effect."""
    return Beside(lambda value, _: value is not None, f"must be given: {why}", remedy)


def ordered(comparison: str, key: str, why: str) -> Beside:
    """The value must be below, or at most, that of another key of the section. comparison: a key of
    COMPARISONS."""
    text = f"must be {comparison} {key}={{{key}:g}}: {why}"
    remedy = f"a smaller {{s}}.{{own}} or a larger {{s}}.{key}"

    def holds(value: Any, section: Any) -> bool:
        return _is_refused(section, key) or COMPARISONS[comparison](value, getattr(section, key))

    return Beside(holds, text, remedy)


def named_only(chooser: str, beside: Beside) -> Beside:
    """Checks the condition only if `chooser` has a named choice: a user's own function may accept other
    values of the key."""

    def holds(value: Any, section: Any) -> bool:
        is_named = OwnFunction.named(getattr(section, chooser)) is None and not _is_refused(section, chooser)
        return not is_named or beside.holds(value, section)

    return dataclasses.replace(beside, holds=holds)


def _is_refused(section: Any, name: str) -> bool:
    """Whether the value of a key breaks its own rule, which is reported separately."""
    rule = next(option_of(field).rule for field in fields(section) if field.name == name)
    value = getattr(section, name)
    return value is not None and rule is not None and not rule.holds(value)


def _is_text_or_list(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        return False
    # a list in quotes is text
    return all(isinstance(name, str) and name.strip() and not name.startswith("[") for name in names)


AT_LEAST_ONE = limits(ge=1)
FINITE = Rule("must be finite", math.isfinite)
NO_LIMIT_OR_COUNT = Rule("must be -1 (no limit) or at least 1", lambda value: value == -1 or value >= 1)
NEVER_OR_COUNT = Rule("must be -1 or at least 1", lambda value: value == -1 or value >= 1)
GIBIBYTES = Rule("must be above 0 and at most a million", lambda value: 0 < value <= 10**6)
NOT_NEGATIVE_SECONDS = Rule("must be a number of seconds, at least 0", lambda value: 0 <= value < math.inf)
SECONDS = Rule("must be a number of seconds above 0", lambda value: 0 < value < math.inf)
TIME = Rule(
    "must be a positive time: seconds, or 90s, 8m, 1h30m",
    lambda value: seconds_of(value) is not None,
    example="8m",
)
FILES = Rule("must be a file or a list of files", _is_text_or_list, example="/path/to/file.parquet")
MODULE_NAMES = Rule("must be a Python module or a list of them", _is_text_or_list, example="my_package")
MODULES = Rule("must be all-linear or a list of module names", _is_text_or_list)


# --- when a key has an effect ----------------------------------------------------------------------------


def no_effect_when(condition: Callable[[Any], bool], why: str, remedy: str = "") -> NoEffectCondition:
    """No effect if a condition on the section holds."""
    return lambda section, _: (why, remedy) if condition(section) else None


def unless(key: str, value: Any = True, *, why: str = "") -> NoEffectCondition:
    """No effect unless another key of the section has this value; why: overrides the default reason."""
    other = f"={shown(not value)}" if isinstance(value, bool) else f" is not {value}"
    reason = why or f"{{s}}.{key}{other}"
    return no_effect_when(
        lambda section: getattr(section, key) != value, reason, f"{{s}}.{key}={shown(value)}"
    )


def replaced_by(key: str) -> NoEffectCondition:
    """No effect when another key of the section is given."""
    return no_effect_when(
        lambda section: getattr(section, key) is not None, f"{{s}}.{key} is given", f"{{s}}.{key}=null"
    )


def unread(
    table: Mapping[str, Implementation], chooser: str, *, is_algorithm: bool = False
) -> NoEffectCondition:
    """No effect unless the implementation that `chooser` selects reads the key, or reads a key that is null
    and follows it.

    chooser: name of a key of the same section, or section.key below it. is_algorithm: no other choice is
    suggested, since it would train with another algorithm.
    """

    def no_effect(section: Any, name: str) -> tuple[str, str] | None:
        chosen = operator.attrgetter(chooser)(section)
        if chosen not in table or name in table[chosen].all_reads:
            return None
        if followers := _followers(table[chosen], section, name):
            if any(getattr(section, follower) is None for follower in followers):
                return None
            given = listed([f"{{s}}.{follower}" for follower in followers], "and")
            return (
                f"{given} {'is' if len(followers) == 1 else 'are both'} given",
                f"{{s}}.{followers[0]}=null",
            )
        readers = [
            choice
            for choice, named in table.items()
            if name in named.all_reads or _followers(named, section, name)
        ]
        assert readers, f"no choice of {chooser} reads {name}"
        sentence = f"only {{s}}.{chooser}={listed(readers, 'and')} read{'s' if len(readers) == 1 else ''} it"
        runs = [choice for choice in readers if table[choice].where and not is_algorithm]
        return sentence, f"{{s}}.{chooser}={runs[0]}" if runs else ""

    return no_effect


def _followers(choice: Implementation, section: Any, name: str) -> list[str]:
    """The keys that the choice reads and that take the value of this one if they are null."""
    return [
        field.name
        for field in fields(section)
        if option_of(field).follows == name and field.name in choice.all_reads
    ]


def effective_value(section: Any, name: str) -> Any:
    """The value of a key; if that is null, the value of the key it follows."""
    value = getattr(section, name)
    follows = next(option_of(field).follows for field in fields(section) if field.name == name)
    return effective_value(section, follows) if value is None and follows else value


def why_idle(section: Any, key: str) -> tuple[str, str] | None:
    """Why a key has no effect, and the remedy, from its own options and those of the sections around it."""
    path, rest = "", key
    while is_dataclass(section):
        name, _, rest = rest.partition(".")
        options = {field.name: option_of(field) for field in fields(section)}
        if name not in options:
            return None
        for found in (
            *_switched_off(section, options, name),
            *(no_effect(section, name) for no_effect in options[name].no_effect),
        ):
            if found is not None:
                return found[0].replace("{s}", path), found[1].replace("{s}", path)
        section, path = getattr(section, name), f"{path}.{name}".lstrip(".")
    return None


def _switched_off(section: Any, options: dict[str, Option], name: str) -> Iterator[tuple[str, str]]:
    for switch, option in options.items():
        if option.switch and switch != name and getattr(section, switch) == option.switch.off:
            why = option.switch.why or f"{{s}}.{switch}={shown(option.switch.off)}"
            yield why, option.switch.remedy
