"""The known keys of a configuration schema: what type each takes, which is nearest to a misspelt one, what each does.

In: a dataclass of `schema.py`, keys and values as a user wrote them. Out: problems, or text for `--help`.
Left out on purpose: ranges and choices (`checks.py`), and Hydra, which only `compose.py` knows.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from hydraflow.errors import Problem

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "any value"}


@dataclass(frozen=True)
class Key:
    """A leaf or a section of the schema."""

    path: str
    hint: Any
    """Type of a leaf, dataclass of a section."""
    default: Any
    doc: str

    @property
    def is_section(self) -> bool:
        """Whether keys stand below it."""
        return is_dataclass(self.hint)

    @property
    def is_open(self) -> bool:
        """Whether anything may stand below it."""
        return typing.get_origin(self.hint) is dict


@functools.cache
def known_keys(schema: type) -> dict[str, Key]:
    """Every section and leaf of a schema by its dotted path, in the order of the source."""
    return {key.path: key for key in _walk(schema(), "")}


def _walk(section: Any, prefix: str) -> Iterator[Key]:
    owner: type = type(section)
    hints, docs = typing.get_type_hints(owner), field_docs(owner)
    for field in fields(section):
        value, path = getattr(section, field.name), prefix + field.name
        doc = (inspect.getdoc(type(value)) or "") if is_dataclass(value) else docs.get(field.name, "")
        yield Key(path, hints[field.name], value, doc)
        if is_dataclass(value):
            yield from _walk(value, f"{path}.")


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """The string that follows each field in the source of a dataclass and of those that it extends."""
    docs: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if not is_dataclass(owner):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                docs[field.target.id] = str(text.value.value)
    return docs


def tree_problems(schema: type, tree: Mapping[str, Any]) -> list[Problem]:
    """Unknown keys and wrong types in a nested mapping, such as a YAML file's content.

    >>> from hydraflow.schema import SFTConfig
    >>> print(*tree_problems(SFTConfig, {"trainer": {"sed": 2}}))
    trainer.sed=2: unknown key
          -> trainer.seed=2
    """
    return [problem for name, value in tree.items() for problem in item_problems(schema, str(name), value)]


def item_problems(schema: type, path: str, value: Any) -> list[Problem]:
    """Unknown keys and wrong types in one setting; `value` may be a mapping that sets several keys below `path`."""
    keys = known_keys(schema)
    key = keys.get(path)
    if key is None:
        return [] if _below_open(keys, path) else [unknown_key(schema, path, value)]
    if not key.is_section:
        return [] if accepts(key.hint, value) else [_wrong_type(key, value)]
    if not isinstance(value, Mapping):
        first = next(name for name in keys if name.startswith(f"{path}."))
        return [Problem(path, _shown(value), "is a group of keys, not a value", f"set a key of it, such as {first}=...")]
    return [problem for name, below in value.items() for problem in item_problems(schema, f"{path}.{name}", below)]


def unknown_key(schema: type, path: str, value: Any) -> Problem:
    """The report of a key that the schema does not have, with the nearest that it has."""
    near = nearest_keys(schema, path)
    remedy = " or ".join(f"{key}={_shown(value)}" for key in near) or "--help lists every key"
    return Problem(path, _shown(value), "unknown key", remedy)


def nearest_keys(schema: type, path: str, count: int = 3) -> list[str]:
    """Known keys that resemble `path`, as a whole or in their last name, the nearest first.

    >>> from hydraflow.schema import PPOConfig
    >>> nearest_keys(PPOConfig, "train_batch_size")[0]
    'data.train_batch_size'
    """
    name = path.rpartition(".")[2]
    scores: dict[str, float] = {}
    for key in known_keys(schema):
        last = difflib.SequenceMatcher(None, name, key.rpartition(".")[2]).ratio()
        whole = difflib.SequenceMatcher(None, path, key).ratio()
        if last >= 0.75 or whole >= 0.8:
            scores[key] = last + whole
    return sorted(scores, key=lambda key: -scores[key])[:count]


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value that was parsed from YAML or the command line fits a type hint; interpolations fit all."""
    if hint is Any or (isinstance(value, str) and "${" in value):
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
    return isinstance(value, int | float if hint is float else hint)


def type_words(hint: Any) -> str:
    """A type hint in plain words.

    >>> type_words(list[int] | None)
    'a list of whole numbers or null'
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_words(part) for part in arguments)
    if origin is list:
        return f"a list of {'text' if arguments[0] is str else type_words(arguments[0]).removeprefix('a ') + 's'}"
    if origin is dict:
        return "a mapping such as {name: value}"
    return "null" if hint is type(None) else _WORDS[hint]


def describe(schema: type) -> str:
    """Every key with its default, its type and what it does; sections as headings."""
    lines: list[str] = []
    for key in known_keys(schema).values():
        if key.is_section:
            lines += ["", f"{key.path}: {key.doc.partition(chr(10))[0]}"]
        else:
            lines += [f"  {key.path}={_shown(key.default)}   ({type_words(key.hint)})", f"      {key.doc}"]
    return "\n".join(lines)


def _below_open(keys: Mapping[str, Key], path: str) -> bool:
    while path:
        path = path.rpartition(".")[0]
        if path in keys:
            return keys[path].is_open
    return False


def _wrong_type(key: Key, value: Any) -> Problem:
    whole = isinstance(value, float) and value.is_integer() and accepts(key.hint, int(value))
    example = int(value) if whole else key.default
    remedy = "" if example is None else f"{key.path}={_shown(example)}"
    kind = "" if value is None or isinstance(value, list) else f", not {_kind(value)}"
    return Problem(key.path, _shown(value), f"must be {type_words(key.hint)}{kind}", remedy)


def _kind(value: Any) -> str:
    return "a mapping" if isinstance(value, Mapping) else _WORDS.get(type(value), "text")


def _shown(value: Any) -> str:
    """A value as it is written in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(_shown(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}: {_shown(item)}' for name, item in value.items())}}}"
    return str(value)
