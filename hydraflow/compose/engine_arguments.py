"""Checks keys of open mappings that name another library's arguments, without importing that library.

In: a configuration, whose open mappings say which library reads them (`Option.passes_to`). Out: a problem for
each name that the library does not have, with the nearest, or, where it is not installed, a note that the
names were not checked. The known names are parsed from the library's source, because importing vLLM takes
seconds and needs a GPU driver.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydraflow.compose.effects import without_effect
from hydraflow.compose.nearest import nearest
from hydraflow.errors import Problem, shown
from hydraflow.options import ArgumentSource, walk


def check_names(config: object, skipped: Collection[str] = ()) -> tuple[list[Problem], list[str]]:
    """Problems and notes about the open mappings of a configuration, except the keys `skipped`."""
    problems: list[Problem] = []
    notes: list[str] = []
    for leaf in walk(config):
        key, source, content = leaf.key, leaf.option.passes_to, leaf.value
        if source is None or key in skipped or not isinstance(content, Mapping) or not content:
            continue
        if without_effect(config, key) is not None:  # a note says so
            continue
        known = argument_names(source)
        if known is None:
            names, library = ", ".join(map(str, content)), source.library.name
            notes.append(f"{key}: {names} not checked, {library} is not installed here")
        else:
            problems += _unknown_names(key, content, source, known)
    return problems, notes


def _unknown_names(
    key: str, content: Mapping[str, Any], source: ArgumentSource, known: frozenset[str]
) -> Iterator[Problem]:
    for name, value in content.items():
        if name not in known:
            near = nearest(str(name), sorted(known))
            suggested = [f"{key}.{one}={shown(value, f'{key}.{name}')}" for one in near]
            remedy = " or ".join(suggested) or f"leave out {key}.{name}"
            yield Problem(
                f"{key}.{name}", shown(value), f"{source.library.name} has no such argument", remedy
            )


@cache
def argument_names(source: ArgumentSource) -> frozenset[str] | None:
    """The names of a library's arguments; None: it is not installed, or the classes are not found."""
    spec = importlib.util.find_spec(source.library.package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [folder / file for folder in folders for file in source.files if (folder / file).is_file()]
    names = frozenset(
        field.target.id
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in source.classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
    return names or None
