"""The house rules that a program can check."""

import ast
import re
from pathlib import Path

import pytest
from source_tree import FILES, ROOT, label, tree_of

MOST_LINES = 600
MOST_FUNCTION_LINES = 80
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ALL_FILES = FILES + sorted(path for path in (ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("path", ALL_FILES, ids=label)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, FUNCTIONS):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MOST_FUNCTION_LINES, (
                f"{label(path)}:{node.lineno}: {node.name} has {length} lines"
            )


@pytest.mark.parametrize("path", FILES, ids=label)
def test_a_file_opens_by_saying_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), f"{label(path)} has no docstring"


OFFERS_A_FUNCTION = {"hydraflow/model_merger/__init__.py"}
"""Packages that users call by their own name. A definition does nothing at import: what it needs is imported
when it is called."""


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "__init__.py"], ids=label)
def test_packages_do_nothing_at_import(path: Path) -> None:
    body = tree_of(path).body[1:]
    if label(path) in OFFERS_A_FUNCTION:
        body = [node for node in body if not isinstance(node, FUNCTIONS) and not is_for_types_only(node)]
    assert not body, f"{label(path)} holds more than a docstring"


def is_for_types_only(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:` and what it needs itself."""
    if isinstance(node, ast.ImportFrom):
        return node.module in ("__future__", "typing")
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


CALLS_THE_USERS_CODE = {
    *(
        "hydraflow/rewards/child.py",
        "hydraflow/checkup/table.py",
        "hydraflow/tracking/guarded.py",
        "hydraflow/jobs/session.py",
    )
}
"""Where a broad except is right: a reward function may raise anything, and costs its row, not the run; a
check of the doctor opens any file and runs the model's own code, and costs its line of the report; a
tracker's library raises what it likes, and costs a warning; so does what the end of a run does, of which each
step must be taken whatever became of the one before."""


@pytest.mark.parametrize("path", FILES, ids=label)
def test_no_broad_except(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            if isinstance(node.body[-1], ast.Raise) or label(path) in CALLS_THE_USERS_CODE:
                continue
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in ("everything", "Exception", "BaseException"), (
                f"{label(path)}:{node.lineno} catches {caught}"
            )


@pytest.mark.parametrize("path", FILES, ids=label)
def test_nothing_is_left_to_do_and_nothing_is_unpickled_blindly(path: Path) -> None:
    found = re.findall(r"\b(?:TODO|FIXME|XXX)\b|weights_only\s*=\s*False", path.read_text(encoding="utf-8"))
    assert not found, f"{label(path)}: {found}"


@pytest.mark.parametrize("path", FILES, ids=label)
def test_signatures_are_typed(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, FUNCTIONS):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        bare = [
            argument.arg
            for argument in arguments
            if argument.annotation is None and argument.arg not in ("self", "cls")
        ]
        assert not bare, f"{label(path)}:{node.lineno}: {node.name} does not type {bare}"
        assert node.returns or node.name == "__init__", (
            f"{label(path)}:{node.lineno}: {node.name} does not say what it returns"
        )
