"""The origin of each value of a composition: a YAML file, or the command line.

In: what Hydra composed, file by file, and the overrides. Out: key -> origin for every key that is set, under
the name by which it was set. The `config.yaml` of a run folder has `config_origins.json` beside it: its
unedited values keep their original origins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from hydraflow.batch_plan.settings import COMMAND_LINE, DEFAULT
from hydraflow.compose import yaml_values
from hydraflow.compose.overrides import groups_in, overridden
from hydraflow.compose.own_files import yaml_in
from hydraflow.compose.tree import flatten, leaf_of, nested
from hydraflow.compose.verl_trees import keys_of
from hydraflow.redact import fingerprinted
from hydraflow.system.whole_files import json_object

OURS = "config/"
"""Prefix of our own YAML files in messages, independent of where they are installed."""


@dataclass
class Origins:
    """Where values come from; keys have the names by which they were set."""

    of: dict[str, str] = field(default_factory=dict)
    """Key -> the file or the command line that set it last."""
    in_files: dict[str, Any] = field(default_factory=dict)
    """Key -> its value in the last file that sets it, with interpolations unresolved."""


def find(
    schema: type, config_name: str, words: Sequence[str], own_folders: Sequence[Path], ours: Path
) -> Origins:
    """The origins of all keys that are set. `words`: the overrides as Hydra got them; `own_folders`: the
    user's; `ours`: the folder of our own files."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    folders = [Path(source.path) for source in sources if source.scheme() == "file"]
    folders += [*own_folders, ours]
    # words with ++ set values; the others may choose files
    choosing = tuple(word for word in words if not word.startswith("++"))
    memory = _FOUND if set(folders) == {ours} else {}
    chosen = (schema, ours, config_name, choosing)
    if chosen not in memory:
        memory[chosen] = _of_files(schema, config_name, choosing, folders, ours)
    origins = dict(memory[chosen].of)
    for key, value in overridden(words, groups_in([ours, *folders], schema)).items():
        for leaf, _ in flatten(schema, nested({key: value})):
            origins[leaf_of(schema, leaf)] = COMMAND_LINE
    for word in words:
        if word.startswith("~"):  # a deleted key has the schema's default
            gone = word[1:].partition("=")[0]
            origins = {key: one for key, one in origins.items() if not f"{key}.".startswith(f"{gone}.")}
    return Origins(origins, memory[chosen].in_files)


def _of_files(
    schema: type, config_name: str, words: Sequence[str], folders: Sequence[Path], ours: Path
) -> Origins:
    """The origins of the keys that files set; the other arguments as in `find`."""
    found = Origins()
    loader = GlobalHydra.instance().config_loader()
    primary = yaml_in(folders, config_name)
    for default in loader.compute_defaults_list(config_name, list(words), RunMode.RUN).defaults:
        name = default.config_path or ""
        file = None if name.startswith("hydra/") else yaml_in(folders, name)  # hydra/* sets none of our keys
        if file:
            _add(found, schema, file, default.package or "", _label(file, ours))
        elif primary and primary.parent != ours and default.config_path:
            chosen = keys_of(schema, default.config_path, default.package or "")
            found.of |= dict.fromkeys(chosen, _label(primary, ours))
    return found


def is_users(origin: str) -> bool:
    """Whether the user set it: on the command line or in a file of theirs.

    >>> is_users("command line"), is_users("mine.yaml")
    (True, True)
    >>> is_users("config/recipe/arithmetic.yaml"), is_users("default")
    (False, False)
    """
    return not origin.startswith((OURS, DEFAULT, "follows "))


def _add(found: Origins, schema: type, file: Path, package: str, label: str) -> None:
    """Adds the keys that a file sets."""
    tree = yaml_values.load(file.read_text(encoding="utf-8"))
    if not isinstance(tree, Mapping):
        return
    beside = file.with_name(f"{file.stem}_origins.json")  # written by a run beside its config.yaml
    kept = json_object(beside) or {}
    inside = {str(name): value for name, value in tree.items() if name not in ("defaults", "hydra")}
    section = "" if package in ("", "_global_") else package
    for key, value in flatten(schema, nested({section: inside}) if section else inside):
        fact, leaf = kept.get(key), leaf_of(schema, key)
        origin = label
        if isinstance(fact, dict) and fingerprinted(fact.get("value"), key) == fingerprinted(value, key):
            origin = str(fact.get("from", label))
        if origin != DEFAULT:
            found.of[leaf] = origin
            found.in_files |= {key: value} if key == leaf else {}


def _label(file: Path, ours: Path) -> str:
    """The name of a file in messages: for ours, relative to the config folder; for the user's, its path."""
    file = file.resolve()
    if file.is_relative_to(ours.resolve()):
        return OURS + file.relative_to(ours.resolve()).as_posix()
    here = Path.cwd().resolve()
    path = file.relative_to(here).as_posix() if file.is_relative_to(here) else str(file)
    return f"./{path}" if path.startswith(OURS) else path


_FOUND: dict[tuple[type, Path, str, tuple[str, ...]], Origins] = {}
"""Cached results of `_of_files` if all files are ours, which do not change while a process runs. Listing the
files takes Hydra a third of a composition's time, and a sweep composes for each of its runs."""
