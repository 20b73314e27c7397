"""Code that nothing calls is a defect: every function, class, method and constant of the package is named
somewhere else in the package, in scripts, examples or configuration. Tests do not count."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from source_tree import FILES, ROOT, label, tree_of

CALLED_BY_LIBRARIES = {
    "hydraflow/dispatch/transport.py: _Pickler.persistent_id": "pickle",
    "hydraflow/dispatch/transport.py: _Unpickler.persistent_load": "pickle",
    "hydraflow/engine/dcp_index.py: _InertUnpickler.find_class": "pickle",
    "hydraflow/engine/megatron/experts.py: CoreReplay.get_replay_topk": "Megatron-Core",
    "hydraflow/engine/megatron/experts.py: ExpertLayer.postprocess": "Megatron-Core",
    "hydraflow/engine/megatron/experts.py: Router.gating": "Megatron-Core",
    "hydraflow/engine/megatron/experts.py: Router.routing": "Megatron-Core",
    "hydraflow/engine/megatron/layers.py: Rotary.get_rotary_seq_len": "Megatron-Core",
    "hydraflow/engine/megatron/layers.py: Trunk._postprocess": "Megatron-Core",
    "hydraflow/engine/megatron/without_cuda.py: _Loader.get_code": "import",
    "hydraflow/engine/optim.py: ShardAdamW._init_group": "torch",
    "hydraflow/generation/cache.py: GrowingLayer.get_seq_length": "transformers",
    "hydraflow/generation/cache.py: SlidingLayer.get_seq_length": "transformers",
    "hydraflow/engine/stored/pieces.py: _Window.readinto": "io",
    "hydraflow/engine/stored/pieces.py: _Window.seekable": "io",
    "hydraflow/system/role_logs.py: PrintedLines.writable": "io",
    "hydraflow/system/role_logs.py: RoleLogs.emit": "logging",
}
STANDS_IN = "hydraflow/engine/megatron/no_cuda.py"
"""Megatron-Core calls all of it; `tests/engine/test_without_cuda.py` looks."""
FOR_USERS = {
    "hydraflow/dispatch/modes.py: register_dispatch_mode": "verl's: a dispatch mode of the user's own",
    "hydraflow/protocol/verl_methods.py: VerlMethods.from_tensordict": "verl's",
    "hydraflow/protocol/verl_methods.py: VerlMethods.make_iterator": "verl's",
    "hydraflow/protocol/verl_methods.py: VerlMethods.sample_level_repeat": "verl's",
    "hydraflow/protocol/verl_methods.py: VerlMethods.to_tensordict": "verl's",
    "hydraflow/protocol/verl_methods.py: VerlMethods.unfold_column_chunks": "verl's",
    "hydraflow/workers/skipping.py: read_skipped": "opens the rows that a skipped step leaves behind",
}
"""Wanted without a caller in the package, and why."""

CODE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Definition:
    """Something that has a name."""

    name: str
    place: str
    is_method: bool
    own: Counter[tuple[str, str]]
    """Names that occur in it: a function that only calls itself is called by nobody."""

    def uses(self, named: Counter[tuple[str, str]], words: set[str]) -> int:
        kinds = ("attribute", "text") if self.is_method else ("name", "attribute", "text")
        found = sum(named[kind, self.name] - self.own[kind, self.name] for kind in kinds)
        return found + (self.name in words)


def names_in(tree: ast.AST) -> Counter[tuple[str, str]]:
    """Kind and name of everything that the code reads."""
    found: Counter[tuple[str, str]] = Counter()
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found["name", node.id] += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found["attribute", node.attr] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.update(("text", word) for word in _named_by(node.value))
    return found


def _named_by(text: str) -> set[str]:
    """Names in a text that is nothing else ("gae:gae"), or that a program in it imports."""
    if re.fullmatch(r"[\w.:]+", text):
        return set(re.findall(r"\w+", text))
    imported = re.findall(r"^from hydraflow\S* import (.+)$", text, re.MULTILINE)
    return {word for names in imported for word in re.findall(r"\w+", names)}


def definitions(path: Path, body: list[ast.stmt], owner: str = "") -> Iterator[Definition]:
    """Functions, classes, methods, and constants of a module; not the fields of a class."""
    for node in body:
        names: list[str] = []
        if isinstance(node, CODE):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not owner:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        for name in names:
            own: Counter[tuple[str, str]] = names_in(node) if isinstance(node, CODE) else Counter()
            is_method = bool(owner) and not isinstance(node, ast.ClassDef)
            yield Definition(name, f"{label(path)}: {owner}{name}", is_method, own)
        if isinstance(node, ast.ClassDef):
            yield from definitions(path, node.body, f"{node.name}.")


def uncalled(files: dict[Path, ast.Module], words: set[str]) -> list[str]:
    """Places of definitions in `files` that nothing names; dunder methods are Python's."""
    named: Counter[tuple[str, str]] = Counter()
    for tree in files.values():
        named.update(names_in(tree))
    return [
        one.place
        for path, tree in files.items()
        for one in definitions(path, tree.body)
        if not one.name.startswith("__") and one.uses(named, words) <= 0
    ]


def words_of(*patterns: str) -> set[str]:
    """Every word of the files that these patterns find."""
    texts = (path.read_text(encoding="utf-8") for pattern in patterns for path in ROOT.glob(pattern))
    return {word for text in texts for word in re.findall(r"\w+", text)}


def test_everything_has_a_caller() -> None:
    scripts = sorted(path for folder in ("scripts", "examples") for path in (ROOT / folder).rglob("*.py"))
    words = words_of(
        "config/**/*.yaml",
        "examples/**/*.yaml",
        "examples/**/*.sbatch",
        "scripts/**/*.sh",
        "hydraflow/**/*.js",
    )
    found = uncalled({path: tree_of(path) for path in [*FILES, *scripts]}, words)
    of_package = {place for place in found if place.startswith("hydraflow/") and STANDS_IN not in place}
    wanted = CALLED_BY_LIBRARIES.keys() | FOR_USERS.keys()
    assert of_package - wanted == set(), "nothing calls these"
    assert wanted - of_package == set(), "these have a caller: take them off the lists"


def test_what_counts_as_a_call() -> None:
    source = """
LIMIT = 3
UNUSED = OTHER = 4
def called(): return LIMIT
def calls_itself(): return calls_itself()
def by_name(): ...
async def awaited(): return awaited()
class Kept:
    def used(self): ...
    def unused(self): ...
    def keyword(self): ...
    async def sent(self): ...
TABLE = {"a": "module:by_name", "b": "prose that says unused"}
called(keyword=Kept().used(), table=TABLE, other=OTHER)
"""
    path = FILES[0]
    assert [place.split(": ")[1] for place in uncalled({path: ast.parse(source)}, set())] == [
        "UNUSED", "calls_itself", "awaited", "Kept.unused", "Kept.keyword", "Kept.sent",
    ]  # fmt: skip
    assert len(uncalled({path: ast.parse(source)}, {"unused"})) == 5
