"""The table of columns names what the code names, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest
import torch
from known_columns import assert_as_documented
from source_tree import FILES, ROOT, label, tree_of

from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.fields import FIELDS

PLACES = (
    "workers/*",
    "trainer/*",
    "engine/*",
    "algorithms/*_loss.py",
    "data/prompts.py",
    "data/conversations.py",
    "jobs/generate.py",
)
"""Files below hydraflow/ that make or read columns."""
NAMES_OF_WEIGHTS = {"engine/megatron/saved_names.py"}
"""Files whose lists are names of weights."""
READERS = [
    path
    for path in FILES
    if path.name != "config.py"
    and (name := path.relative_to(ROOT / "hydraflow").as_posix()) not in NAMES_OF_WEIGHTS
    and any(fnmatch(name, place) for place in PLACES)
]

METHODS = {"get", "select", "rename", "columns"}
"""What is called with names of columns."""
MAPPINGS = {"columns", "padded", "objects", "non_tensor_batch"}
"""Variables and attributes that are indexed by the name of a column."""
MAKERS = {"tensors", "non_tensors", "objects", "columns"}
"""Keyword arguments and variables that take a dict from the name of a column to the column."""
OTHER_DICTS = {"reward_model", "row", "model", "environ", "extra", "manifest", "train", "rope"}
OTHER_DICTS |= {"override_transformer_config", "overrides", "described", "about"}
"""What has a `get` but is no batch."""


def last_name(node: ast.AST) -> str:
    """self.a.b -> b; x[0] and calls -> nothing."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def columns_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name of a column, line) wherever the code reads, chooses or makes columns."""
    for node in ast.walk(tree):
        for place in places_of_names(node):
            names = place if isinstance(place, list) else [place]
            for name in names:
                if (
                    isinstance(name, ast.Constant)
                    and isinstance(name.value, str)
                    and re.fullmatch(r"\w+", name.value)
                ):
                    yield name.value, name.lineno


def places_of_names(node: ast.AST) -> Iterator[ast.AST | list]:
    match node:
        case ast.Subscript(value=mapping, slice=key) if last_name(mapping) in MAPPINGS:
            yield key
        case ast.Call(func=ast.Attribute(value=receiver)) if last_name(receiver) in OTHER_DICTS:
            return
        case ast.Call(func=function, args=arguments) if last_name(function) in METHODS:
            yield arguments
        case ast.Call(func=function, args=[ast.Dict(keys=keys), *_]) if last_name(function) == "from_dict":
            yield keys
        case ast.List(elts=items):  # in these files a list of names is a choice of columns
            yield items
        case ast.keyword(arg=name, value=ast.Dict(keys=keys)) if name in MAKERS:
            yield keys
        case ast.Assign(targets=[target], value=ast.Dict(keys=keys)) if last_name(target) in MAKERS:
            yield keys
        case ast.AnnAssign(target=target, value=ast.Dict(keys=keys)) if last_name(target) in MAKERS:
            yield keys


def test_every_column_that_is_named_is_in_the_table() -> None:
    unknown = [
        f"{label(path)}:{line}: {name}"
        for path in READERS
        for name, line in columns_in(tree_of(path))
        if name not in FIELDS
    ]
    assert not unknown, f"add it to protocol/fields.py, or correct the name: {unknown}"


def test_every_column_of_the_table_is_used() -> None:
    used = {name for path in READERS for name, _ in columns_in(tree_of(path))}
    assert [name for name in FIELDS if name not in used] == []


@pytest.mark.parametrize(
    "source",
    [
        "batch.get('wrong')",
        "padded['wrong']",
        "batch.columns['wrong'] = x",
        "names += ['values', 'wrong'] if critic else []",
        "output.rename('log_probs', 'wrong')",
        "prompts.select(batch_keys=['wrong'])",
        "DataProto.from_dict(tensors={'wrong': x})",
        "DataProto.from_dict({'wrong': x})",
        "columns = {'wrong': rewards}",
    ],
)
def test_the_law_sees_a_wrong_name(source: str) -> None:
    assert "wrong" in {name for name, _ in columns_in(ast.parse(source))}


def test_a_column_of_another_type_is_seen() -> None:
    assert_as_documented(DataProto.from_dict({"score": torch.zeros(2)}, {"uid": ["a", "b"]}))
    ids = ragged.from_rows([torch.tensor([1.0])])
    for tensors in (
        {"score": torch.zeros(2, dtype=torch.int64)},
        {"scores": torch.zeros(2)},
        {"responses": ids},
    ):
        with pytest.raises(AssertionError, match="not as in protocol/fields.py"):
            assert_as_documented(DataProto.from_dict(tensors))
