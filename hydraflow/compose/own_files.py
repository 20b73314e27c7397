"""The YAML files that a user brings with --config-dir and --config-name: whether they are there, and why they
cannot be read.

In: a command line, our own folder of YAML files; or what a reader of YAML raised. Out: problems.
Left out on purpose: what is in them (`tree.py`), and --config-path, which is Hydra's to judge.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml

from hydraflow.compose.arguments import Arguments
from hydraflow.errors import Problem


def missing_files(arguments: Arguments, ours: Path) -> list[Problem]:
    """What is wrong with the folder and the file that a command line names; `ours` is the folder of our own
    files."""
    folder, name = arguments.value("--config-dir", "-cd"), arguments.value("--config-name", "-cn")
    if folder is not None and not Path(folder).is_dir():
        rule = "is a file, not a folder" if Path(folder).is_file() else "there is no such folder"
        return [
            Problem(
                f"--config-dir {folder}",
                None,
                rule,
                f"--config-dir {Path(folder).parent}" if Path(folder).is_file() else "",
            )
        ]
    if name is None or arguments.has("--config-path", "-cp"):
        return []
    folders = [ours, *([Path(folder)] if folder else [])]
    if any(_yaml(each, name).is_file() for each in folders):
        return []
    choices = sorted({file.stem for each in folders for file in each.glob("*.yaml")})
    close = difflib.get_close_matches(Path(name).stem, choices, n=1)
    remedy = f"--config-name {close[0]}" if close else "--config-dir DIR names the folder of your own files"
    return [
        Problem(
            f"--config-name {name}", None, f"there is no such file; there are {', '.join(choices)}", remedy
        )
    ]


def unreadable(error: yaml.YAMLError | UnicodeDecodeError) -> Problem:
    """What a file's content made its reader raise.

    >>> try:
    ...     yaml.safe_load("a: [1")
    ... except yaml.YAMLError as error:
    ...     print(unreadable(error))
    configuration: is not YAML: expected ',' or ']', but got '<stream end>' (line 1)
    """
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, UnicodeDecodeError) or mark is None:
        return Problem("configuration", None, f"a YAML file cannot be read: {error}", "write it in UTF-8")
    file = "configuration" if mark.name.startswith("<") else mark.name
    return Problem(file, None, f"is not YAML: {getattr(error, 'problem', error)} (line {mark.line + 1})")


def _yaml(folder: Path, name: str) -> Path:
    return folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
