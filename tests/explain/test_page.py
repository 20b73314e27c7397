"""docs/batch_plan.md says what the program does: its commands run, its picture and its output are the
program's, every rule is there."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs.command import hydraflow
from source_tree import FILES, ROOT, tree_of

from hydraflow.batch_plan.handles import NO_MINI_BATCH

PAGE = (ROOT / "docs" / "batch_plan.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|text)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [text for kind, text in BLOCKS if kind == "bash"]
DYNAMIC = {
    "row",
    "experts",
    "attention heads",
    "key-value heads",
    "mapping readable",
    "mapping once",
    "mapping beyond",
}
"""Rules whose names the source puts together."""


def run(command: str, cwd: Path) -> tuple[int, str]:
    """Exit code and what was printed for a command of the page, with pictures drawn into `cwd`."""
    words = shlex.split(command.replace("\\\n", " ").replace("docs/step.svg", "step.svg"))
    assert words[:3] == ["python", "-m", "hydraflow.plan"]
    done = hydraflow("plan", *words[3:], cwd=cwd)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_commands_run_and_outputs_are_the_programs(number: int, tmp_path: Path) -> None:
    position = [text for _, text in BLOCKS].index(COMMANDS[number])
    code, said = run(COMMANDS[number], tmp_path)
    kind, shown = BLOCKS[position + 1] if position + 1 < len(BLOCKS) else ("bash", "")
    if kind == "text":
        assert (code, said.strip()) == (2, shown.strip())
    else:
        assert code == 0, said


def test_the_picture_is_what_the_program_draws(tmp_path: Path) -> None:
    (command,) = [text for text in COMMANDS if "--svg" in text]
    run(command, tmp_path)
    assert (tmp_path / "step.svg").read_text() == (ROOT / "docs" / "step.svg").read_text()


def rule_names(tree: ast.Module) -> Iterator[str]:
    """What each `Violation(...)` and `_step_violation(...)` of the source calls its rule, up to the colon
    before the role."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("Violation", "_step_violation"):
            continue
        given = [keyword.value for keyword in node.keywords if keyword.arg == "rule"]
        names = given or node.args[1 if ast.unparse(node.func) == "_step_violation" else 0 :][:1]
        first = (
            names[0].values[0] if names and isinstance(names[0], ast.JoinedStr) else next(iter(names), None)
        )
        if isinstance(first, ast.Constant):
            yield str(first.value).partition(":")[0].strip()


def test_every_rule_is_in_the_table() -> None:
    listed = {
        name.replace("\\|", "|")
        for name in re.findall(r"^\| `((?:[^`])+)` \|", PAGE.partition("## Every rule")[2], re.MULTILINE)
    }
    plan = [path for path in FILES if path.parent.name == "batch_plan"]
    found = {name for path in plan for name in rule_names(tree_of(path))} - {"mapping"} | {NO_MINI_BATCH}
    assert {"M | Q", "dp | G", "size", "machines"} <= found
    assert listed == found | DYNAMIC
