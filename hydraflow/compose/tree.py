"""Sorts the leaves of the composed tree: known keys, verl's keys under another name, mistakes.

In: a nested mapping of everything that files and overrides set, a schema. Out: `CheckedTree`: the known
leaves with values of the right type, and every problem. A leaf with a problem keeps its default and is
recorded in `UnknownValues`, so that values can still be checked. Left out on purpose: ranges and
choices (`rules.py`), Hydra, and where the tree comes from (`loading.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from hydraflow.batch_plan.settings import COMMAND_LINE
from hydraflow.compose import verl, yaml_values
from hydraflow.compose.keys import (
    Key,
    accepts,
    known_above,
    known_keys,
    nearest_keys,
    type_words,
    unknown_key,
    without_quotes,
    wrong_type,
)
from hydraflow.compose.verl import Translation, Translator
from hydraflow.compose.verl_table import aliases
from hydraflow.compose.verl_values import our_value
from hydraflow.errors import ConfigError, Problem, shown
from hydraflow.redact import public

_DECIDES_THE_PLAN = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "actor_rollout_ref.actor.strategy",
    "critic.strategy",
)
"""Keys that the plan's rules read but do not name in their messages."""

Resolve = Callable[[str], Any]
"""Returns the value of a key with its interpolations resolved; raises ConfigError."""


@dataclass
class UnknownValues:
    """Keys whose intended values are not known, because those that the user wrote were rejected."""

    keys: set[str] = field(default_factory=set)
    everything: bool = False
    """No value can be trusted."""

    @property
    def hide_the_plan(self) -> bool:
        """Whether results of the plan's rules, which combine many keys, would be misleading."""
        return self.everything or any(key in self.keys for key in _DECIDES_THE_PLAN)

    def unrelated(self, problems: Iterable[Problem]) -> list[Problem]:
        """The problems that cannot be due to a rejected value."""
        if self.everything:
            return []
        return [
            problem
            for problem in problems
            if not any(key in f"{problem.field} {problem.rule}" for key in self.keys)
        ]


@dataclass
class CheckedTree:
    """The leaves and problems of a tree."""

    leaves: dict[str, Any] = field(default_factory=dict)
    """Known key -> value; unset keys may be missing."""
    written: dict[str, Any] = field(default_factory=dict)
    """Values with interpolations, unresolved."""
    origins: dict[str, str] = field(default_factory=dict)
    """Known key -> the file or command line that set it."""
    problems: list[Problem] = field(default_factory=list)
    unknown: UnknownValues = field(default_factory=UnknownValues)
    translation: Translation = field(default_factory=Translation)
    """How verl's keys were handled."""
    usual: dict[str, Any] = field(default_factory=dict)
    """Known key -> a file's value of the right type, which remedies suggest rather than the default."""


def check(
    schema: type,
    tree: Mapping[str, Any],
    origins: Mapping[str, str],
    resolve: Resolve,
    in_files: Mapping[str, Any] = MappingProxyType({}),
) -> CheckedTree:
    """Sorts every leaf of `tree`.

    `origins` has the keys that files or the command line set, by the names they were set under; `in_files`
    the values that files set, with interpolations unresolved.
    """
    keys, foreign = known_keys(schema), dict[str, Any]()
    checked = CheckedTree(origins={key: origin for key, origin in origins.items() if key in keys})
    for key, value in in_files.items():
        known = keys.get(key)
        if known is None or known.is_section or _has_interpolation(value):
            continue
        if accepts(known.hint, value) and public(value, key) == value:  # a hidden value is no remedy
            checked.usual[key] = value
    for key, value in flatten(schema, tree):
        try:
            if _has_interpolation(value):
                checked.written[key] = value
                value, known = resolve(key), keys.get(key)
                fits = known is None or known.is_section or accepts(known.hint, value)
                if isinstance(value, str) and not fits:
                    # an environment variable is text, but may mean a number
                    value = yaml_values.load(value)
            _sort(schema, key, value, checked, foreign)
        except ConfigError as error:
            checked.problems += error.problems
            checked.unknown.keys.add(key)
    translator = Translator(
        schema, checked.leaves, checked.origins, origins, checked.written, checked.translation
    )
    translator.translate(foreign)
    checked.problems += checked.translation.problems
    for key, value in checked.translation.unknown.items():
        checked.problems.append(verl.suggested(schema, unknown_key(schema, key, value), value))
        checked.unknown.keys.update(nearest_keys(schema, key, 1))
    return checked


def _sort(schema: type, key: str, value: Any, checked: CheckedTree, foreign: dict[str, Any]) -> None:
    """Accepts a leaf, rejects it, or adds it to the foreign keys."""
    known = known_keys(schema).get(key)
    if known is None:
        foreign[key] = value
        return
    value, note = our_value(key, value)
    checked.translation.notes += [note] if note else []
    # ??? is OmegaConf's missing value; files for other versions of verl leave some keys unset with null or 0
    in_file = verl.in_file(checked.origins.get(key, COMMAND_LINE))
    says_nothing = (value is None and not accepts(known.hint, None)) or (type(value) is int and value == 0)
    is_unset = says_nothing and verl.is_other_default(schema, key, value)
    if value == "???" or (in_file and is_unset):
        return
    if known.is_section or not accepts(known.hint, value):
        usual = replace(known, default=checked.usual.get(key, known.default))
        checked.problems.append(_as_meant(known, value) or wrong_type(schema, usual, value))
        checked.unknown.keys.add(f"{key}." if known.is_section else key)
        return
    checked.leaves[key] = value


def _as_meant(known: Key, value: Any) -> Problem | None:
    """The problem of a value that would be legal without its quotes, or without a nested list."""
    if known.is_section:
        return None
    if isinstance(value, str):
        meant = without_quotes(value)
        if meant is None or not accepts(known.hint, meant):
            return None
        rule = f"must be {type_words(known.hint)}, and the quotes make it text"
        return Problem(known.path, shown(f"'{value}'", known.path), rule, f"{known.path}={shown(meant)}")
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        flat = [one for item in value for one in (item if isinstance(item, list) else [item])]
        if accepts(known.hint, flat):
            rule = f"must be {type_words(known.hint)}, without a list inside"
            return Problem(known.path, shown(value), rule, f"{known.path}={shown(flat)}")
    return None


def value_problems(schema: type, key: str, value: Any) -> list[Problem]:
    """Problems of one setting by itself; `value` may be a mapping that sets several keys below `key`.

    >>> from hydraflow.schema import SFTConfig
    >>> print(*value_problems(SFTConfig, "trainer", {"sed": 2}))
    trainer.sed=2: unknown key
          -> trainer.seed=2
    """
    checked = check(schema, nested({key: value}), {}, lambda key: None)
    # these depend on other keys, so they are reported once everything is composed
    later = [
        *checked.translation.unsupported,
        *(one for one in checked.problems if verl.counts_all_ranks(verl.classify(schema, one.field))),
    ]
    return [problem for problem in checked.problems if problem not in later]


def flatten(schema: type, tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of every leaf. An open mapping, even an empty one, is one leaf, except for entries
    that are other names of known keys: those are separate leaves."""
    keys = known_keys(schema)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        known = keys.get(key)
        whole = known is not None and not known.is_section
        if whole and isinstance(value, Mapping):
            named = {inner: f"{key}.{inner}" for inner in value if f"{key}.{inner}" in aliases(schema)}
            yield from ((named[inner], value[inner]) for inner in named)
            value = {inner: value[inner] for inner in value if inner not in named} if named else value
        if isinstance(value, Mapping) and not whole and (value or known):
            yield from flatten(schema, value, f"{key}.")
        else:
            yield key, value


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of dotted keys.

    >>> nested({"a.b": 1, "a.c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def over(base: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree merged over another.

    >>> over({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 5}})
    {'a': {'b': 5, 'c': 2}, 'd': 3}
    """
    merged = dict(base)
    for name, value in tree.items():
        below = merged.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[name] = over(below, value)
        else:
            merged[name] = value
    return merged


def leaf_of(schema: type, key: str) -> str:
    """The schema's leaf that a key sets: itself, or the open mapping that it is in."""
    known = known_keys(schema)
    above = known_above(known, key)
    return above.path if key not in known and above and above.is_open else key


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(_has_interpolation(item) for item in value.values())
    return isinstance(value, list) and any(_has_interpolation(item) for item in value)
