"""The composed tree, leaf by leaf: which keys are known, which are verl's under another name, which are
mistakes.

In: a nested mapping of everything that files and overrides set, a schema. Out: `Judged`: the known leaves
with values that fit, and every problem; a leaf with a problem is left at its default and remembered in
`Doubts`, so that the rules for values can still be asked. Left out on purpose: ranges and choices
(`rules.py`), Hydra, and where the tree comes from (`loading.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from hydraflow.compose import verl
from hydraflow.compose.command import COMMAND_LINE
from hydraflow.compose.keys import (
    Key,
    accepts,
    is_below_open,
    known_keys,
    nearest_keys,
    type_words,
    unknown_key,
    wrong_type,
)
from hydraflow.compose.verl import Translation
from hydraflow.compose.verl_table import OTHER_ALIASES
from hydraflow.compose.verl_values import value_of
from hydraflow.errors import ConfigError, Problem, shown
from hydraflow.schema import PPOConfig

_DECIDES_THE_PLAN = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "actor_rollout_ref.actor.strategy",
    "critic.strategy",
)
"""Keys whose values stand in the rules of the plan without being named there."""

Resolve = Callable[[str], Any]
"""The value of a key with its interpolations replaced; raises ConfigError."""


@dataclass
class Doubts:
    """Keys whose values are not known, because what the user wrote could not be taken."""

    keys: set[str] = field(default_factory=set)
    everything: bool = False
    """Nothing about the values can be said."""

    def add(self, *keys: str) -> None:
        """Remembers keys."""
        self.keys.update(keys)

    @property
    def hide_the_plan(self) -> bool:
        """Whether rules that compute with many keys would mislead."""
        return self.everything or any(key in self.keys for key in _DECIDES_THE_PLAN)

    def touch(self, problem: Problem) -> bool:
        """Whether a problem may only be there because of a value that was left out."""
        text = f"{problem.field} {problem.rule}"
        return self.everything or any(key in text for key in self.keys)


@dataclass
class Judged:
    """What a tree holds."""

    leaves: dict[str, Any] = field(default_factory=dict)
    """Known key -> value; keys that nobody set may be missing."""
    written: dict[str, Any] = field(default_factory=dict)
    """Those values that had interpolations, as they were written."""
    origins: dict[str, str] = field(default_factory=dict)
    """Known key -> file or command line, where it was set."""
    problems: list[Problem] = field(default_factory=list)
    doubts: Doubts = field(default_factory=Doubts)
    translation: Translation = field(default_factory=Translation)
    """What was done with verl's keys."""


def judge(schema: type, tree: Mapping[str, Any], origins: Mapping[str, str], resolve: Resolve) -> Judged:
    """Sorts every leaf of `tree`; `origins` names the keys that somebody set, under the names that they were
    set by."""
    judged = Judged(origins={key: origin for key, origin in origins.items() if key in known_keys(schema)})
    foreign: dict[str, Any] = {}
    for key, value in flatten(schema, tree):
        try:
            if _has_interpolation(value):
                judged.written[key] = value
                value = _as_typed(schema, key, resolve(key))
            _sort(schema, key, value, judged, foreign)
        except ConfigError as error:
            judged.problems += error.problems
            judged.doubts.add(key)
    if schema is PPOConfig:
        verl.translate(foreign, judged.leaves, judged.origins, origins, judged.translation, judged.written)
        judged.problems += judged.translation.problems
        foreign = judged.translation.unknown
    else:
        foreign = dict(_without_aliases(schema, foreign, judged, origins))
    for key, value in foreign.items():
        problem = unknown_key(schema, key, value)
        judged.problems.append(verl.suggested(problem, value) if schema is PPOConfig else problem)
        judged.doubts.add(*nearest_keys(schema, key, 1))
    return judged


def _without_aliases(
    schema: type, foreign: Mapping[str, Any], judged: Judged, origins: Mapping[str, str]
) -> Iterator[tuple[str, Any]]:
    """Takes the keys that the other entry points of verl's call otherwise; yields the rest."""
    for key, value in foreign.items():
        new = OTHER_ALIASES.get(schema.__name__, {}).get(key)
        if new is None or new in judged.origins:
            yield key, value
            continue
        _sort(schema, new, value, judged, {})
        judged.origins[new] = origins.get(key, COMMAND_LINE)
        judged.translation.notes.append(f"{key}: taken as {new}={shown(value, new)}")


def _sort(schema: type, key: str, value: Any, judged: Judged, foreign: dict[str, Any]) -> None:
    """One leaf: taken, refused, or put to the foreign ones."""
    known = known_keys(schema).get(key)
    if known is None:
        foreign[key] = value
        return
    if schema is PPOConfig:
        value, note = value_of(key, value)
        judged.translation.notes += [note] if note else []
        if value == "???" or (
            value is None and not accepts(known.hint, None) and _is_default_of_verls(key, judged)
        ):
            return
    if known.is_section or not accepts(known.hint, value):
        judged.problems.append(_as_meant(known, value) or wrong_type(schema, known, value))
        judged.doubts.add(f"{key}." if known.is_section else key)
        return
    judged.leaves[key] = value


def _as_meant(known: Key, value: Any) -> Problem | None:
    """The report of a value that is right but for the quotes around it, or for a list too many."""
    if known.is_section:
        return None
    if isinstance(value, str):
        try:
            meant = yaml.safe_load(value)
        except yaml.YAMLError:
            return None
        if isinstance(meant, str) or meant is None or not accepts(known.hint, meant):
            return None
        rule = f"must be {type_words(known.hint)}, and the quotes make it text"
        return Problem(known.path, shown(f"'{value}'", known.path), rule, f"{known.path}={shown(meant)}")
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        flat = [one for item in value for one in (item if isinstance(item, list) else [item])]
        if accepts(known.hint, flat):
            rule = f"must be {type_words(known.hint)}, without a list inside"
            return Problem(known.path, shown(value), rule, f"{known.path}={shown(flat)}")
    return None


def _is_default_of_verls(key: str, judged: Judged) -> bool:
    """Whether a file leaves a key at the null that a version of verl's has for it."""
    return verl.in_file(judged.origins.get(key, COMMAND_LINE)) and verl.is_other_default(key, None)


def _as_typed(schema: type, key: str, value: Any) -> Any:
    """The value of an interpolation as it would be without: text from the environment may stand for a
    number."""
    known = known_keys(schema).get(key)
    if known is None or known.is_section or not isinstance(value, str) or accepts(known.hint, value):
        return value
    return yaml.safe_load(value)


def value_problems(schema: type, key: str, value: Any) -> list[Problem]:
    """What is wrong with one setting by itself; `value` may be a mapping that sets several keys below `key`.

    >>> from hydraflow.schema import SFTConfig
    >>> print(*value_problems(SFTConfig, "trainer", {"sed": 2}))
    trainer.sed=2: unknown key
          -> trainer.seed=2
    """
    judged = judge(schema, nested({key: value}), {}, lambda key: None)
    later = [
        *judged.translation.unsupported,
        *(one for one in judged.problems if verl.counts_all_ranks(verl.classify(one.field))),
    ]
    return [problem for problem in judged.problems if problem not in later]


def flatten(schema: type, tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of every leaf; the content of an open mapping is one value, and so is an empty one."""
    keys = known_keys(schema)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        known = keys.get(key)
        whole = known is not None and not known.is_section
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
    """A tree with what it leaves out taken from another.

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
    """The schema's leaf that a key sets: itself, or the open mapping that it stands in."""
    known = known_keys(schema)
    while key not in known and is_below_open(known, key):
        key = key.rpartition(".")[0]
    return key


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(_has_interpolation(item) for item in value.values())
    return isinstance(value, list) and any(_has_interpolation(item) for item in value)
