"""Finds the user's YAML files (--config-path, --config-dir, --config-name), and says why one cannot be read.

In: a command line, our own folder of YAML files; or an error of the YAML parser. Out: folders to search and
problems. Left out on purpose: the contents of the files (`tree.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from hydraflow.compose import verl_trees
from hydraflow.compose.arguments import CONFIG_DIR, CONFIG_NAME, CONFIG_PATH, Arguments
from hydraflow.compose.command_words import parsed, plain
from hydraflow.errors import ConfigError, Problem, first_line

_FILE, _SEARCH = "file://", "hydra.searchpath"
_VERLS_FOLDER = "config"
"""verl's folder of YAML files as its command lines name it, relative to verl's entry point."""


def take(arguments: Arguments, ours: Path, schema: type) -> list[Path]:
    """The folders that may hold the user's YAML files; rewrites the command line so that Hydra finds them,
    too.

    `ours`: the folder of our own files. If the name is that of one of verl's primary configurations and there
    is no such file, overrides replace it. Raises ConfigError for folders and files that do not exist.
    """
    _split_name(arguments)
    path, extra, name = (arguments.value(*names) for names in (CONFIG_PATH, CONFIG_DIR, CONFIG_NAME))
    if path is not None and path.startswith("pkg://"):
        return []
    named = [Path(folder) for folder in (path, extra) if folder is not None]
    instead = verl_trees.config_file(schema, name) if name and not yaml_in(named, name) else None
    if instead is not None and (path is None or Path(path).parts == (_VERLS_FOLDER,)):
        arguments.take(*CONFIG_NAME)
        arguments.take(*CONFIG_PATH)
        arguments.overrides += instead
        return take(arguments, ours, schema)
    problems = [*_missing_folder("--config-path", path), *_missing_folder("--config-dir", extra)]
    if name is not None and not problems:
        searched = [ours, *named] if path is None else named
        problems = _missing_file(name, searched, schema if path is not None else None)
    if problems:
        raise ConfigError([*arguments.problems, *problems])
    folders = [folder.resolve() for folder in named]
    if path is not None:
        arguments.take(*CONFIG_PATH)
        arguments.options += ["--config-path", str(Path(path).resolve())]
    return folders + _search(arguments, ours, folders, name)


def unreadable(error: yaml.YAMLError | UnicodeDecodeError, folders: Sequence[Path] = ()) -> Problem:
    """The problem of a file that cannot be parsed; `folders`: those of the user, because an error of decoding
    does not name the file.

    >>> try:
    ...     yaml.safe_load("a: [1")
    ... except yaml.YAMLError as error:
    ...     print(unreadable(error))
    configuration: is not YAML: expected ',' or ']', but got '<stream end>' (line 1)
          -> write lines `key: value`, those of one section indented by the same number of spaces
    """
    if isinstance(error, UnicodeDecodeError):
        files = [file for folder in folders for file in sorted(folder.rglob("*.yaml")) if _is_not_utf8(file)]
        named = ", ".join(map(str, files)) or "configuration"
        return Problem(named, None, f"is not UTF-8: {error}", "write it in UTF-8")
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # a character that YAML does not allow
        file = getattr(error, "name", "configuration")
        return Problem(file, None, f"is not YAML: {first_line(error)}", "remove that character")
    file = "configuration" if mark.name.startswith("<") else mark.name
    why = str(getattr(error, "problem", error))
    remedy = "write lines `key: value`, those of one section indented by the same number of spaces"
    if "\\t" in why:
        remedy = "indent with spaces, not tabs"
    elif why.startswith("found duplicate key"):
        remedy = "leave out one of the two lines"
    return Problem(file, None, f"is not YAML: {why} (line {mark.line + 1})", remedy)


def _is_not_utf8(file: Path) -> bool:
    try:
        with suppress(OSError):
            file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return True
    return False


def _split_name(arguments: Arguments) -> None:
    """Splits `--config-name folder/mine.yaml` into folder and name, if there is such a file."""
    name = arguments.value(*CONFIG_NAME)
    if name is None or arguments.has(*CONFIG_PATH) or len(Path(name).parts) < 2:
        return
    if file := yaml_in([Path()], name):
        arguments.take(*CONFIG_NAME)
        arguments.options += ["--config-path", str(file.parent), "--config-name", file.stem]


def _missing_folder(option: str, folder: str | None) -> list[Problem]:
    if folder is None or Path(folder).is_dir():
        return []
    if Path(folder).is_file():
        remedy = f"{option} {Path(folder).parent}"
        return [Problem(f"{option} {folder}", None, "is a file, not a folder", remedy)]
    beside = [each.name for each in Path(folder).parent.glob("*") if each.is_dir()]
    close = difflib.get_close_matches(Path(folder).name, beside, n=1)
    remedy = f"{option} DIR names a folder that exists"
    if close:
        remedy = f"{option} {Path(folder).with_name(close[0])}"
    return [Problem(f"{option} {folder}", None, "there is no such folder", remedy)]


def _missing_file(name: str, folders: list[Path], schema: type | None) -> list[Problem]:
    """`schema`: given with --config-path, to say whether the name alone would mean one of verl's files."""
    if yaml_in(folders, name):
        return []
    if Path(name).suffix == ".yml" and any((each / name).is_file() for each in folders):
        rule = "Hydra reads only files that end in .yaml"
        return [Problem(f"--config-name {name}", None, rule, f"rename it to {Path(name).stem}.yaml")]
    choices = sorted({file.stem for each in folders for file in each.glob("*.yaml") if file.is_file()})
    close = difflib.get_close_matches(Path(name).stem, choices, n=1)
    remedy = f"--config-name {close[0]}" if close else "--config-dir DIR names the folder of your own files"
    if schema is not None and verl_trees.config_file(schema, name) is not None:
        remedy = f"leave out --config-path: {name} alone means verl's own file"
    there = f"the folder has {', '.join(choices)}" if choices else f"there is no YAML file in {folders[0]}"
    return [Problem(f"--config-name {name}", None, f"there is no such file; {there}", remedy)]


def _search(arguments: Arguments, ours: Path, folders: list[Path], name: str | None) -> list[Path]:
    """The user's further folders on Hydra's search path. Adds our own files to that path, and drops folders
    that do not exist, such as verl's in a file that was written for a clone of verl."""
    given = _given_search(arguments)
    listed = _search_of(name, folders) if given is None else given
    files = {entry: Path(entry.removeprefix(_FILE)) for entry in listed if entry.startswith(_FILE)}
    kept = [entry for entry in listed if entry not in files or files[entry].is_dir()]
    wanted = [*kept, *([f"{_FILE}{ours}"] if arguments.has(*CONFIG_PATH) else [])]
    if wanted != listed or given is not None:
        quoted = ",".join('"' + entry.replace('"', '\\"') + '"' for entry in wanted)
        arguments.overrides.insert(0, f"{_SEARCH}=[{quoted}]")
    return [files[entry].resolve() for entry in kept if entry in files]


def _given_search(arguments: Arguments) -> list[str] | None:
    """Removes the search path from the command line and returns it."""
    word = next((word for word in arguments.overrides if word.lstrip("+").startswith(f"{_SEARCH}=")), None)
    if word is None:
        return None
    override = parsed(word)
    if override is None:
        return None
    listed = plain(override.value())
    arguments.overrides.remove(word)
    return [str(entry) for entry in listed] if isinstance(listed, list) else [str(listed)]


def _search_of(name: str | None, folders: list[Path]) -> list[str]:
    """The search path in the user's primary file; errors in the file are left to Hydra."""
    file = yaml_in(folders, name) if name else None
    if file is None:
        return []
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return []
    hydra = content.get("hydra") if isinstance(content, Mapping) else None
    listed: Any = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
    return [str(entry) for entry in listed] if isinstance(listed, list) else []


def yaml_in(folders: Sequence[Path], name: str) -> Path | None:
    """The YAML file of this name in the first folder that has one; `.yaml` may be left out."""
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    return next((folder / file for folder in folders if (folder / file).is_file()), None)
