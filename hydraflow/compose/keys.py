"""The keys of a configuration schema: their types and descriptions, and the nearest key to a misspelt one.

In: a dataclass of `schema.py`, keys and values as the user wrote them. Out: problems, or text for `--help`.
Left out on purpose: ranges and choices (`rules.py`), and whole trees (`tree.py`).
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import yaml

from hydraflow.compose import yaml_values
from hydraflow.compose.nearest import missing_words, nearest
from hydraflow.errors import Problem, shown
from hydraflow.options import Rule, option_of
from hydraflow.redact import HIDDEN, public
from hydraflow.system.columns import paragraph

_SWITCHED = {"yes": True, "on": True, "y": True, "t": True, "no": False, "off": False, "n": False, "f": False}
"""Other words for true and false, most of them from YAML 1.1."""
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "any value"}


@dataclass(frozen=True)
class Key:
    """A leaf or a section of the schema."""

    path: str
    hint: Any
    """Type of a leaf, dataclass of a section."""
    default: Any
    owner: type
    """The dataclass that has it."""
    rule: Rule | None = None
    """Limits of a leaf's value beyond its type."""

    @property
    def doc(self) -> str:
        """Its description, read from the source, which takes a tenth of a second for all keys."""
        if is_dataclass(self.default):
            text = inspect.getdoc(type(self.default)) or ""
        else:
            text = field_docs(self.owner).get(self.path.rpartition(".")[2], "")
        return " ".join(text.split())

    @property
    def limits(self) -> str:
        """The limits in words; empty if there are none."""
        return self.rule.text.removeprefix("must be ").removeprefix("must ") if self.rule else ""

    @property
    def is_section(self) -> bool:
        """Whether it is a group of keys."""
        return is_dataclass(self.hint)

    @property
    def is_open(self) -> bool:
        """Whether it is a mapping that takes any key."""
        return typing.get_origin(self.hint) is dict


@functools.cache
def known_keys(schema: Any) -> dict[str, Key]:
    """Every section and leaf of a schema by its dotted path, in source order."""
    return {key.path: key for key in _walk(schema(), "")}


def _walk(section: Any, prefix: str) -> Iterator[Key]:
    owner: type = type(section)
    hints = typing.get_type_hints(owner)
    for field in fields(section):
        value, path = getattr(section, field.name), prefix + field.name
        yield Key(path, hints[field.name], value, owner, option_of(field).rule)
        if is_dataclass(value):
            yield from _walk(value, f"{path}.")


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """The string that follows each field in the source of a dataclass and its bases."""
    docs: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if not is_dataclass(owner):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=doc)):
                    docs[name] = str(doc)
    return docs


def unknown_key(schema: type, path: str, value: Any) -> Problem:
    """The problem of an unknown key, with the nearest known ones that take such a value."""
    near = nearest_keys(schema, path)
    fitting = [key for key in near if _takes(schema, key, value)]
    for key in (path, *near):  # hide a value that is secret under any of these names
        value = public(value, key)
    known = known_keys(schema)
    remedies = [f"{key}={shown(value)}" for key in fitting if value != HIDDEN]
    if not remedies and near:  # a name inside an open mapping is not a known key
        remedies = [f"{near[0]}=<{type_words(known[near[0]].hint if near[0] in known else Any)}>"]
    return Problem(path, shown(value), "unknown key", " or ".join(remedies) or "--help lists every key")


def leaf_keys(schema: type) -> list[str]:
    return [key.path for key in known_keys(schema).values() if not key.is_section]


def keys_for(schema: type, path: str) -> list[str]:
    """The keys that `path` may be a misspelling of: the schema's leaves, and the same name inside each open
    mapping that the sections of `path` resemble.

    >>> from hydraflow.schema import PPOConfig
    >>> keys_for(PPOConfig, "teachers.math")[-1]
    'distillation.teachers.math'
    """
    known, names = known_keys(schema), path.split(".")
    open_keys = [key.path for key in known.values() if key.is_open]
    inside = []
    for cut in range(1, len(names)):
        above, below = ".".join(names[:cut]), ".".join(names[cut:])
        # misspelt sections, not shortened ones
        near = [key for key in nearest(above, open_keys) if missing_words(above, key) is None]
        inside += [f"{key}.{below}" for key in near]
    return [*leaf_keys(schema), *inside]


def nearest_keys(schema: type, path: str, count: int = 3) -> list[str]:
    """Known leaves and names in open mappings that resemble `path`, the nearest first. The critic's keys come
    last unless the path names the critic.

    >>> from hydraflow.schema import PPOConfig
    >>> nearest_keys(PPOConfig, "train_batch_size")[0]
    'data.train_batch_size'
    """
    found = nearest(path, keys_for(schema, path), max(count, 3))
    names_critic = difflib.get_close_matches("critic", path.lower().split("."), 1)
    if not names_critic:
        found = sorted(found, key=lambda key: key.startswith("critic."))
    return found[:count]


def _takes(schema: type, path: str, value: Any) -> bool:
    """Whether a key takes a value, as it is or as it was probably meant."""
    key = known_keys(schema).get(path)
    if key is None:
        return True
    if not accepts(key.hint, value):
        return _as_meant(key.hint, value) is not None
    return key.rule is None or value is None or key.rule.holds(value)


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value that was parsed from YAML or the command line fits a type hint."""
    if hint is Any:
        return True
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(accepts(part, value) for part in arguments)
    if origin is list:
        return isinstance(value, list) and all(accepts(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, Mapping)
    if isinstance(value, bool):
        return hint is bool
    if hint is str:
        return isinstance(value, str | int | float)
    if hint is float and isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, hint)


def without_quotes(value: Any) -> Any:
    """The number, list or mapping that quoted text would be without its quotes; None: still text.

    >>> without_quotes("64"), without_quotes("[/a,/b]"), without_quotes("a, b"), without_quotes("[/a")
    (64, ['/a', '/b'], None, None)
    >>> without_quotes("1e-6"), without_quotes("true"), without_quotes("yes")
    (1e-06, True, None)
    >>> without_quotes("1:30"), without_quotes("0x40"), without_quotes("2024-13-45")  # YAML's, not Hydra's
    (None, None, None)
    """
    try:
        meant = yaml_values.load(value) if isinstance(value, str) else None
    except (yaml.YAMLError, ValueError):
        return None
    if isinstance(meant, int | float) and (":" in value or "x" in value or value.lower() in _SWITCHED):
        return None
    return meant if isinstance(meant, int | float | list | dict) else None


def fitted(hint: Any, value: Any) -> Any:
    """Converts a value that `accepts` took to the exact type: 1 for a float is 1.0, 5 for text is '5'.

    >>> fitted(list[float] | None, [1, 0.5]), fitted(str, 5)
    ([1.0, 0.5], '5')
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return next(fitted(part, value) for part in arguments if accepts(part, value))
    if origin is list:
        return [fitted(arguments[0], item) for item in value]
    return hint(value) if hint in (float, str) else value


def type_words(hint: Any) -> str:
    """A type hint in plain words.

    >>> type_words(list[int] | None)
    'a list of whole numbers or null'
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_words(part) for part in arguments)
    if origin is list:
        items = "text" if arguments[0] is str else f"{type_words(arguments[0]).removeprefix('a ')}s"
        return f"a list of {items}"
    if origin is dict:
        return "a mapping such as {name: value}"
    return "null" if hint is type(None) else _WORDS[hint]


def describe(schema: type, name: str = "") -> str:
    """Every key with its default, its legal values and what it does; sections as headings. `name`: only this
    key, or the keys of this section."""
    lines: list[str] = []
    for key in known_keys(schema).values():
        if name and not f"{key.path}.".startswith(f"{name}."):
            continue
        if key.is_section:
            lines += ["", *wrapped(f"{key.path}: {key.doc}")]
        else:
            legal = "; ".join(filter(None, (type_words(key.hint), key.limits)))
            lines += wrapped(f"{key.path}={shown(key.default)}   ({legal})", first=2, rest=8)
            lines += wrapped(key.doc, first=6, rest=6)
    return "\n".join(lines)


def wrapped(text: str, *, first: int = 0, rest: int = 0) -> list[str]:
    """Lines as wide as the terminal, at most 110, without splitting words; first, rest: their indentation."""
    width = min(shutil.get_terminal_size().columns, 110)
    return paragraph(text, width, first=" " * first, rest=" " * rest)


def known_above(keys: Mapping[str, Key], path: str) -> Key | None:
    """The nearest known key above a key."""
    while path := path.rpartition(".")[0]:
        if path in keys:
            return keys[path]
    return None


def is_below_open(keys: Mapping[str, Key], path: str) -> bool:
    """Whether a key is inside a mapping that takes any key."""
    above = known_above(keys, path)
    return above is not None and above.is_open


def wrong_type(schema: type, key: Key, value: Any) -> Problem:
    """The problem of a value of the wrong type, or of a value for a section."""
    if key.is_section:
        first = next(name for name in known_keys(schema) if name.startswith(f"{key.path}."))
        remedy = f"set a key of it, such as {first}=..."
        return Problem(key.path, shown(value), "is a group of keys, not a value", remedy)
    meant = _as_meant(key.hint, value)
    if meant is not None and key.rule and not key.rule.holds(fitted(key.hint, meant)):
        meant = None
    example = key.default if meant is None else meant
    is_guess = meant is None and key.rule is not None and bool(key.rule.choices)
    remedy = f"leave out {key.path}" if example is None or is_guess else f"{key.path}={shown(example)}"
    kind = "a mapping" if isinstance(value, Mapping) else _WORDS.get(type(value), "text")
    kind = "" if value is None or isinstance(value, list | float) else f", not {kind}"
    return Problem(key.path, shown(value), f"must be {type_words(key.hint)}{kind}", remedy)


def _as_meant(hint: Any, value: Any) -> Any:
    """The value that was probably meant: 1000 for 1e3 in an int, true for yes and 1, [a] for a in a list,
    a for [a]; None: no guess."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 and accepts(hint, int(value)):
        return int(value)
    if isinstance(value, str) and accepts(hint, True) and value.lower() in _SWITCHED:
        return _SWITCHED[value.lower()]
    if type(value) is int and value in (0, 1) and accepts(hint, True):
        return bool(value)
    if isinstance(value, list) and len(value) == 1 and accepts(hint, value[0]):
        return value[0]
    return [value] if value is not None and accepts(hint, [value]) else None
