"""The house rules that a program can check."""

import ast
import re

from source_tree import FILES, ROOT, label, tree_of

MOST_LINES = 600
MOST_FUNCTION_LINES = 80
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ALL_FILES = FILES + sorted(path for path in (ROOT / "tests").rglob("*.py"))


def functions_in(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Looks at statements alone: no expression contains a function that has a name."""
    found: list[ast.AST] = [tree]
    for node in found:
        for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, blocks, None)
            found += inner if isinstance(inner, list) else []
    return [node for node in found if isinstance(node, FUNCTIONS)]


def test_files_are_short() -> None:
    lines = {label(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL_FILES}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_functions_are_short() -> None:
    own = {*FILES}
    lines = {
        f"{label(path)}:{node.lineno}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in ALL_FILES
        # trees of tests are not needed again: keeping them would make every collection of garbage longer
        for node in functions_in(tree_of(path) if path in own else ast.parse(path.read_text("utf-8")))
    }
    assert {name: count for name, count in lines.items() if count > MOST_FUNCTION_LINES} == {}


def test_a_file_opens_by_saying_what_it_is() -> None:
    assert [label(path) for path in FILES if not ast.get_docstring(tree_of(path))] == []


OFFERS_A_FUNCTION = {"hydraflow/model_merger/__init__.py"}
"""Packages that users call by their own name. A definition does nothing at import: what it needs is imported
when it is called."""
PREPARES_IMPORTS = {"hydraflow/engine/megatron/__init__.py"}
"""What changes a library has to be there before the library is imported."""


def test_packages_do_nothing_at_import() -> None:
    for path in FILES:
        if path.name != "__init__.py":
            continue
        body = tree_of(path).body[1:]
        if label(path) in OFFERS_A_FUNCTION:
            body = [node for node in body if not isinstance(node, FUNCTIONS) and not is_for_types_only(node)]
        if label(path) in PREPARES_IMPORTS:
            continue
        assert not body, f"{label(path)} holds more than a docstring"


def is_for_types_only(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:` and what it needs itself."""
    if isinstance(node, ast.ImportFrom):
        return node.module in ("__future__", "typing")
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


CALLS_THE_USERS_CODE = {
    *(
        "hydraflow/rewards/child.py",
        "hydraflow/system/own_code.py",
        "hydraflow/rewards/concurrent.py",
        "hydraflow/checkup/table.py",
        "hydraflow/tracking/guarded.py",
        "hydraflow/jobs/session.py",
        "hydraflow/system/role_logs.py",
        "hydraflow/workers/saving.py",
        "hydraflow/generation/sglang.py",
    )
}
"""Where a broad except is right: a reward function may raise anything, and costs its row, not the run, and
so may the text of a user's exception; a check of the doctor opens any file and runs the model's own code,
and costs its line of the report; a tracker's library raises what it likes, and costs a warning; so does
what the end of a run does, of which each step must be taken whatever became of the one before; a wrong call
of `logging` costs its line. Whatever a library raises while it writes a part of a checkpoint is reported to
the controller, and what happens in a thread that waits for SGLang is raised by its caller."""


def catches_everything(node: ast.AST) -> bool:
    """An except that lets no exception pass, and does not raise it again."""
    if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
        return False
    return node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")


def test_no_broad_except() -> None:
    careful = [path for path in FILES if label(path) not in CALLS_THE_USERS_CODE]
    found = [
        f"{label(path)}:{node.lineno}"
        for path in careful
        for node in ast.walk(tree_of(path))
        if catches_everything(node)
    ]
    assert found == []


def test_nothing_is_left_to_do_and_nothing_is_unpickled_blindly() -> None:
    wrong = re.compile(r"\b(?:TODO|FIXME|XXX)\b|weights_only\s*=\s*False")
    found = {label(path): wrong.findall(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: words for name, words in found.items() if words} == {}


def untyped(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """What a signature does not type: arguments, and "return"."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    bare = [argument.arg for argument in arguments if argument.annotation is None]
    bare = [name for name in bare if name not in ("self", "cls")]
    return bare if function.returns or function.name == "__init__" else [*bare, "return"]


def test_signatures_are_typed() -> None:
    found = {
        f"{label(path)}:{node.lineno}: {node.name}": untyped(node)
        for path in FILES
        for node in functions_in(tree_of(path))
    }
    assert {name: words for name, words in found.items() if words} == {}
