"""No dead options: every leaf of the schema is read by something."""

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import get_type_hints

import pytest
from source_tree import FILES, tree_of

from hydraflow import schema


def entry_points() -> list[type]:
    """The classes of schema.py that are whole configurations."""
    return [value for name, value in vars(schema).items() if is_dataclass(value) and value.__module__ == schema.__name__]


def leaves(kind: type) -> Iterator[tuple[str, str]]:
    """(class, field) of every field that is not a dataclass itself, as its reader's class declares it."""
    types = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(types[field.name]):
            yield from leaves(types[field.name])
        else:
            yield declaring_class(kind, field.name), field.name


def declaring_class(kind: type, name: str) -> str:
    return next(base.__name__ for base in reversed(kind.__mro__) if name in getattr(base, "__annotations__", {}))


ALL_LEAVES = sorted({leaf for kind in entry_points() for leaf in leaves(kind)})


@cache
def names_read() -> set[str]:
    """Every `.name` that is read (not assigned) outside of the config files."""
    readers = [path for path in FILES if path.name not in ("config.py", "schema.py")]
    nodes = (node for path in readers for node in ast.walk(tree_of(path)))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("leaf", ALL_LEAVES, ids=".".join)
def test_leaf_is_read(leaf: tuple[str, str]) -> None:
    assert leaf[1] in names_read(), f"nothing reads {'.'.join(leaf)}: remove it, or do what it says"


def test_the_walk_finds_nested_and_inherited_leaves() -> None:
    assert ("OptimConfig", "lr") in ALL_LEAVES  # actor_rollout_ref.actor.optim.lr
    assert ("RunConfig", "seed") in ALL_LEAVES  # trainer.seed, declared two classes up
    assert not any(name == "optim" for _, name in ALL_LEAVES)
