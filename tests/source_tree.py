"""The project's own source, parsed: for tests about its shape."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "hydraflow").rglob("*.py"))


def label(path: Path) -> str:
    """Path from the root, as the name of a parametrized test."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """hydraflow/engine/base.py -> hydraflow.engine.base; a package's __init__.py -> the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports(path: Path, tree: ast.Module | None = None) -> Iterator[str]:
    """Every module that the file imports, wherever in the file: in functions and under TYPE_CHECKING, too.

    `from a.b import c` gives a.b.c where that may be a module (always, for modules that are not ours).
    """
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(tree or tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _imported_from(node, package)


def _imported_from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        parent = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parent, base]).rstrip(".")
    for alias in node.names:
        full = f"{base}.{alias.name}"
        yield full if full in MODULES or not base.startswith("hydraflow") else base


def top_part(module: str) -> str:
    """The folder or file directly below hydraflow: hydraflow.engine.fsdp.wrap -> engine."""
    return module.split(".")[1] if "." in module else ""
