"""Checks overrides before Hydra sees them, and rewrites them to a form that Hydra accepts.

In: the words of a command line, the groups of YAML files, a schema. Out: `PreparedCommandLine`: words for
Hydra, and one problem for each word that it would reject. `key=v`, `+key=v` and `++key=v` mean the same for
every known key. Left out on purpose: unknown keys and wrong types, which are checked in the whole composed
tree (`tree.py`).
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from hydraflow.compose import yaml_values
from hydraflow.compose.arguments import CONFIG_DIR, CONFIG_NAME, CONFIG_PATH, Arguments
from hydraflow.compose.command_words import plain, unparsed, values
from hydraflow.compose.keys import (
    accepts,
    is_below_open,
    known_above,
    known_keys,
    nearest_keys,
    unknown_key,
    wrong_type,
)
from hydraflow.compose.tree import UnknownValues, value_problems
from hydraflow.compose.verl import classify
from hydraflow.compose.verl_trees import choices, engine_override, group_override, primary_names
from hydraflow.errors import ConfigError, Problem, first_line, shown
from hydraflow.options import one_of
from hydraflow.redact import public_word

Groups = Mapping[str, Sequence[str]]
"""Folder of YAML files -> the choices in it."""

_KEY = re.compile(r"[A-Za-z_][\w@:/-]*(\.[\w@:/-]+)*")
_IS_OVERRIDE = re.compile(r"[+~]+|[A-Za-z_][\w@:/.-]*=")
"""Matches the start of a word that is an override of its own, not part of the value before it."""
_DEFAULT_RECIPE = "recipe=arithmetic"
_OWN_MODEL_OR_DATA = {"recipe", "actor_rollout_ref.model.path", "data.train_files", "data.val_files"}
"""The default recipe is not used if one of these keys is given."""


@dataclass
class PreparedCommandLine:
    """A command line that Hydra accepts."""

    words: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    folders: Sequence[Path] = ()
    """Folders that may hold the user's YAML files."""
    files: Sequence[str] = ()
    """File names that a defaults list may use."""
    unknown: UnknownValues = field(default_factory=UnknownValues)
    """Keys whose rejected words are not in `words`: their defaults must not be checked instead."""


def config_folder(config_name: str) -> Path:
    """The folder with our YAML files: in the package when installed, else beside it in a clone. Raises
    ConfigError."""
    package = Path(__file__).resolve().parents[1]
    candidates = [package / "config", package.parent / "config"]
    for folder in candidates:
        if (folder / f"{config_name}.yaml").is_file():
            return folder
    raise ConfigError.one(
        f"{config_name}.yaml",
        None,
        f"is neither in {candidates[0]} nor in {candidates[1]}",
        "install hydraflow again",
    )


def groups_in(folders: Sequence[Path], schema: type) -> dict[str, list[str]]:
    """Folders of YAML files and the choices in each. In our own folder, the first, a group counts only if the
    schema has a section of that name."""
    groups: dict[str, list[str]] = {}
    for number, folder in enumerate(folders):
        for file in sorted(folder.rglob("*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            if group != "." and (number > 0 or group in schema.__annotations__):
                groups.setdefault(group, []).append(file.stem)
    return groups


def prepare(
    config_name: str, schema: type, arguments: Arguments, own_folders: Sequence[Path] = ()
) -> PreparedCommandLine:
    """Words for Hydra, and problems of those that it would reject. `own_folders`: the user's."""
    folders = [config_folder(config_name), *own_folders]
    groups = groups_in(folders, schema)
    ours = yaml.safe_load((folders[0] / f"{config_name}.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = {group for entry in ours if isinstance(entry, Mapping) for group in entry}
    own_file = arguments.has(*CONFIG_NAME, *CONFIG_PATH)
    prepared = PreparedCommandLine(problems=list(arguments.problems), folders=own_folders)
    prepared.files = [
        *(file.stem for folder in folders for file in folder.glob("*.yaml")),
        *(primary_names(schema) if own_folders else ()),
    ]
    keys: set[str] = set()
    given, problems_of_spaces = _without_spaces(arguments.overrides)
    prepared.problems += problems_of_spaces
    for word in given:
        parsed = _parse(word, schema, prepared)
        if parsed is None:
            continue
        keys.add(parsed.key_or_group)
        if problems := _problems(parsed, schema, groups, multirun=arguments.multirun):
            prepared.problems += problems
            prepared.unknown.keys.update([parsed.key_or_group, *nearest_keys(schema, parsed.key_or_group, 1)])
            prepared.unknown.everything |= _is_choice(parsed, groups)  # a file may set any key
        else:
            prepared.words += _normalised(parsed, schema, groups, chosen, own_file=own_file)
    brings_files = own_file or arguments.has(*CONFIG_DIR)
    if "recipe" in groups and not brings_files and not keys & _OWN_MODEL_OR_DATA:
        prepared.words.append(_DEFAULT_RECIPE)
    return prepared


def overridden(words: Sequence[str], groups: Groups) -> dict[str, Any]:
    """Key -> value of each override that sets a key; not choices of groups or Hydra's own settings."""
    parser = OverridesParser.create()
    found: dict[str, Any] = {}
    for word in words:
        override = parser.parse_override(word)
        if not is_hydras(override) and not _is_choice(override, groups) and not override.is_sweep_override():
            found[override.key_or_group] = plain(override.value())
    return found


def swept_keys(words: Sequence[str]) -> set[str]:
    """The keys that are given several values, one for each run."""
    parsed = map(OverridesParser.create().parse_override, words)
    return {override.key_or_group for override in parsed if override.is_sweep_override()}


def is_hydras(override: Override) -> bool:
    """Deletions, packages and Hydra's own settings, which Hydra checks itself."""
    key = override.key_or_group
    return override.is_delete() or override.package is not None or key.startswith(("hydra.", "hydra/"))


def _parse(word: str, schema: type, prepared: PreparedCommandLine) -> Override | None:
    key, equals, value = word.lstrip("+~").partition("=")
    if word.startswith("~") or (key and equals):
        try:
            return OverridesParser.create().parse_override(word)
        except HydraException as error:
            reason = first_line(error)
            prepared.problems.append(_unreadable(word, key, value, reason, schema))
    else:
        prepared.problems.append(_missing_value(word, schema))
    if key:
        prepared.unknown.keys.add(key)
    return None


def _without_spaces(words: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """The words, except for `key = value`, `key: value` and `key={a: 1}` that the shell split into several
    words, and a problem for each of these."""
    kept, problems = list[str](), list[Problem]()
    for word in words:
        if kept and _unclosed(kept[-1]) and not _IS_OVERRIDE.match(word):
            kept[-1] += f" {word}"
            if not _unclosed(kept[-1]):
                whole = public_word(joined := kept.pop())
                remedy = f"quote it: {shlex.quote(whole)}" if whole == joined else "quote all of it"
                problems.append(Problem(whole, None, "contains spaces, so the shell split it", remedy))
        elif kept and kept[-1].endswith(":") and "=" not in kept[-1] + word:
            problems.append(_as_in_yaml(kept.pop().removesuffix(":"), word))
        elif len(kept) > 1 and kept[-1] == "=" and "=" not in kept[-2]:
            kept.pop()
            meant = public_word(f"{kept.pop()}={word}")
            problems.append(Problem(meant.replace("=", " = ", 1), None, "has spaces around its =", meant))
        else:
            kept.append(word)
    return kept, problems


def _unclosed(word: str) -> str:
    """The closing brackets that are missing from a value that begins with a bracket: the shell splits
    `{a: 1}` in two."""
    value, closers = word.partition("=")[2], ""
    for letter in re.sub(r"'[^']*'|\"[^\"]*\"", "", value) if value.startswith(("[", "{")) else "":
        if letter in "[{":
            closers = ("]" if letter == "[" else "}") + closers
        elif closers.startswith(letter):
            closers = closers[1:]
    return closers


def _missing_value(word: str, schema: type) -> Problem:
    name, _, value = word.lstrip("+").partition(":")
    if value.strip() and name in known_keys(schema):
        return _as_in_yaml(name, value.strip())
    known, remedy = known_keys(schema).get(word.lstrip("+")), "--help lists every key"
    if known is not None and not known.is_section:
        remedy = f"{word}={shown(known.default)}"
    return Problem(word or "''", None, "is not key=value", remedy)


def _as_in_yaml(name: str, value: str) -> Problem:
    """The problem of `name: value`."""
    meant = public_word(f"{name}={value}")
    return Problem(meant.replace("=", ": ", 1), None, "is not key=value", shlex.quote(meant))


def _unreadable(word: str, key: str, value: str, reason: str, schema: type) -> Problem:
    hidden, dotted = unparsed(word), re.sub("[:/]", ".", key)
    if foreign := [char for char in key if not char.isascii()]:
        rule = f"{foreign[0]} (U+{ord(foreign[0]):04X}) is not allowed in a key"
        near = nearest_keys(schema, key, 1)
        remedy = f"{near[0]}={hidden.partition('=')[2]}" if near else "--help lists every key"
        return Problem(hidden, None, rule, remedy)
    if hidden == word and (not _KEY.fullmatch(key) or key != dotted):
        rule = f"{key} is not a key: a key is names joined by dots"
        remedy = f"{dotted}={value}" if dotted in known_keys(schema) else "--help lists every key"
        return Problem(word, None, rule, remedy)
    if hidden == word and value.startswith("="):
        return Problem(word, None, "has more than one =", f"{key}={value.lstrip('=')}")
    if hidden == word and (closers := _unclosed(word)):
        more = "..." if word.endswith((":", ",")) else ""
        return Problem(word, None, f"its {value[0]} is not closed", shlex.quote(f"{word}{more}{closers}"))
    if hidden == word and (trimmed := _trimmed(schema, key, value)):
        return Problem(word, None, f"cannot be read: {reason}", f"{key}={trimmed}")
    rule, inner = f"cannot be read: {reason}", value.replace('"', r"\"")
    if value.count("'") % 2 or value.count('"') % 2:  # the user's own quote is unpaired
        inner = value.replace("'", "").replace('"', "")
    if hidden != word:  # Hydra's message would quote the secret
        rule, inner = "cannot be read", "..."
    quoted = shlex.quote(f'{key}="{inner}"')
    return Problem(hidden, None, rule, f"quote the value, and all of it for the shell: {quoted}")


def _trimmed(schema: type, key: str, value: str) -> str:
    """The value without punctuation around it, if the key accepts that but not text; else empty."""
    known, trimmed = known_keys(schema).get(key), value.strip(" ;:,()[]{}'\"")
    if known is None or accepts(known.hint, "text") or not trimmed.isascii():
        return ""
    with suppress(yaml.YAMLError):
        return trimmed if accepts(known.hint, yaml_values.load(trimmed)) else ""
    return ""


def _problems(override: Override, schema: type, groups: Groups, *, multirun: bool) -> list[Problem]:
    """Why Hydra would reject an override; for a sweep, also the problems of each value, before the first one
    runs."""
    key = override.key_or_group
    if override.is_delete() and not key.startswith("hydra") and key not in groups:
        return _deletion_problems(key, schema)
    if is_hydras(override):
        return []
    if override.is_sweep_override() and not multirun:
        several = unparsed(override.input_line or "").partition("=")[2]
        known = known_keys(schema).get(key)
        is_list = known is None or accepts(known.hint, list(values(override)))
        one = (
            f"{key}=[{several}] for one list"
            if is_list
            else f"{key}={several.partition(',')[0]} for one value"
        )
        remedy = f"{one}, or --multirun for several runs"
        return [Problem(key, several, "several values need --multirun", remedy)]
    if group_override(schema, key, None, override.value()) is not None:
        return []
    named = groups if key in known_keys(schema) else {**choices(schema), **groups}
    if _is_choice(override, named):
        return [
            _unknown_choice(key, value, named[key]) for value in values(override) if value not in named[key]
        ]
    if problem := _breaks_the_tree(override, schema):
        return [problem]
    given = values(override) if multirun else []
    return [problem for value in given for problem in value_problems(schema, key, value)]


def _unknown_choice(group: str, value: Any, known: Sequence[str]) -> Problem:
    close = difflib.get_close_matches(str(value), known, n=1)
    remedy = " or ".join(f"{group}={choice}" for choice in close or known)
    return Problem(group, shown(value), one_of(*known).text, remedy)


def _deletion_problems(key: str, schema: type) -> list[Problem]:
    """A problem unless the key can be deleted: known keys can, and keys that a file may have added."""
    known = known_keys(schema)
    if key in known or is_below_open(known, key) or classify(schema, key) is not None:
        return []
    section = key.rpartition(".")[0]
    beside = [name for name in nearest_keys(schema, key) if name.rpartition(".")[0] == section]
    near = " or ".join(f"~{name}" for name in beside) or f"leave out ~{key}"
    return [Problem(f"~{key}", None, "there is no such key to delete", near)]


def _is_choice(override: Override, groups: Groups) -> bool:
    """Whether it selects a file of a group. `group={a: 1}` sets keys instead."""
    return override.key_or_group in groups and not any(isinstance(value, dict) for value in values(override))


def _breaks_the_tree(override: Override, schema: type) -> Problem | None:
    """The problem of a value for a section, of a key below a leaf, or of another command's YAML files."""
    key, keys, value = override.key_or_group, known_keys(schema), values(override)[:1]
    known = keys.get(key)
    if len(key) > 255:  # Hydra looks for files of that name
        return unknown_key(schema, key, value[0] if value else None)
    if known is None and os.path.isdir(config_folder("ppo") / key):
        rule = "this command has no such section"
        return Problem(key, shown(value[0]) if value else None, rule, f"leave out {key}")
    if known and known.is_section and value and not isinstance(value[0], Mapping):
        return wrong_type(schema, known, value[0])
    above = known_above(keys, key)
    if above is None or above.is_section or above.is_open:
        return None
    return unknown_key(schema, key, value[0] if value else None)


def _normalised(
    override: Override, schema: type, groups: Groups, chosen: set[str], *, own_file: bool
) -> list[str]:
    """The words for Hydra, which requires a + for exactly those groups that are not in the defaults list yet.
    `chosen`: the groups in our file's list; with an `own_file`, the user must write the +."""
    word = override.input_line
    assert word is not None
    ours = group_override(schema, override.key_or_group, override.package, override.value())
    if ours is not None:
        return ours
    if is_hydras(override):
        return [word]
    bare = word.lstrip("+")
    if own_file and override.key_or_group == "model_engine":
        engine = engine_override(plain(override.value()))
        return [word] if engine is None else engine
    if not _is_choice(override, groups):
        return [f"++{bare}"]
    if override.key_or_group in chosen:
        return [bare]
    return [word] if own_file else [f"+{bare}"]
