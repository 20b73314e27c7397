"""Translates errors of Hydra and OmegaConf to this program's form: field, value, rule, remedy. An unknown
message is passed on verbatim.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from hydraflow.errors import Problem, first_line
from hydraflow.options import one_of


def translated(error: Exception, files: Sequence[str] = ()) -> Problem:
    """The problem that Hydra or OmegaConf found; `files`: names that a defaults list may use.

    >>> from hydra.errors import ConfigCompositionException
    >>> print(translated(ConfigCompositionException("In 'mine': Could not load 'pqo'."), ["ppo"]))
    mine.yaml: its defaults list names 'pqo', and there is no such file
          -> write ppo instead
    """
    key = getattr(error, "full_key", None) or "configuration"
    text = str(error).partition("Config search path:")[0]  # the rest lists folders that the user did not name
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    message = " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=")))
    known = _of_a_key(key, message) or _of_a_file(key, message) or _of_a_name(message, files)
    return known or Problem(key, None, message or first_line(error.__cause__ or error))


def unusable_path(error: OSError, *, sweeps: bool) -> Problem:
    """The problem of a folder that Hydra cannot create, or of a file that it cannot read; `sweeps`: for a
    sweep.

    >>> print(unusable_path(NotADirectoryError(20, "Not a directory", "data.txt/out"), sweeps=False))
    hydra.run.dir=data.txt/out: the folder cannot be created: Not a directory
          -> hydra.run.dir=. and trainer.default_local_dir=<folder>, where all results go
    """
    if str(error.filename).endswith(".yaml"):
        rule = f"the file cannot be read: {error.strerror}"
        return Problem(str(error.filename), None, rule, "a file that you may read, or another name for it")
    key = "hydra.sweep.dir" if sweeps else "hydra.run.dir"
    remedy = f"{key}=<a folder that can be created>"
    if not sweeps:
        remedy = f"{key}=. and trainer.default_local_dir=<folder>, where all results go"
    return Problem(key, error.filename, f"the folder cannot be created: {error.strerror}", remedy)


def _of_a_key(key: str, message: str) -> Problem | None:
    """Errors in values, deletions and interpolations."""
    if found := re.search(r"Could not delete from config\. (?:The value of )?'(.+?)'", message):
        if "The value of" in message:
            return Problem(f"~{found[1]}", None, "the key has a different value", f"~{found[1]}")
        return Problem(f"~{found[1]}", None, "there is no such key to delete", f"leave out ~{found[1]}")
    if found := re.search(r"Error merging override \+*([\w.]+)=([{\[].*)", message):
        kind = "a list such as [a,b], not a mapping"
        if found[2].startswith("["):
            kind = "a mapping such as {name: value}, not a list"
        return Problem(found[1], found[2], f"must be {kind}")
    if found := re.search(r"Error merging override \+*(hydra[\w./]*)=(.*)", message):
        return Problem(found[1], found[2], "is not a value that Hydra takes", f"leave out {found[1]}")
    if found := re.search(r"Interpolation key '(.+?)' not found", message):
        remedy = "write the whole path of a key that --help lists, such as ${trainer.seed}"
        return Problem(key, f"${{{found[1]}}}", f"Interpolation key '{found[1]}' not found", remedy)
    if found := re.search(r"Environment variable '(.+?)' not found", message):
        name = found[1]
        remedy = f"export {name}=<value>, or ${{oc.env:{name},<default>}}"
        return Problem(key, f"${{oc.env:{name}}}", f"the environment has no variable {name}", remedy)
    if found := re.search(r"Unsupported interpolation type (\S+)", message):
        rule, remedy = f"there is no resolver {found[1]}", "${oc.env:NAME} is a variable of the environment"
        return Problem(key, f"${{{found[1]}:...}}", rule, remedy)
    if "Recursive interpolation detected" in message:
        return Problem(key, None, "its interpolations refer to each other in a circle", f"{key}=<value>")
    return None


def _of_a_file(key: str, message: str) -> Problem | None:
    """Errors in files: not a mapping, or a defaults list that cannot be read."""
    no_list = r"Invalid defaults list in '(.+?)', defaults must be a list \(got (.+?)\)"
    if found := re.search(no_list, message):
        rule = f"defaults must be a list, not {found[2]}"
        return Problem(f"{found[1]}.yaml", None, rule, "defaults: [_self_]")
    if found := re.search(r"Unsupported (?:type|item value) in defaults : (\w+)", message):
        rule = f"an entry of a defaults list must be text or a mapping, not {found[1]}"
        return Problem(key, None, rule, "write the name of a file, or group: name")
    if found := re.search(r"Multiple values for (\S+)\. To override a value use '(override .+?)'", message):
        rule = f"your defaults list names {found[1]}, which an earlier file in the list already has"
        return Problem(found[1], None, rule, f"write {found[2]} in the defaults list")
    if found := re.search(r"Cannot find primary config '(.+?)'", message):
        rule = f"the folder of --config-path has no {found[1]}.yaml"
        return Problem("--config-path", None, rule, "--config-name NAME, for a file NAME.yaml in it")
    if "maximum recursion depth exceeded" in message:
        rule = "the defaults lists are circular"
        return Problem(key, None, rule, "leave out one of the names")
    if found := re.search(r"primary config '(.+?)' must be a DictConfig, got (\w+)", message):
        rule = f"holds {'a list' if found[2] == 'ListConfig' else 'no keys'} where keys belong"
        return Problem(f"{found[1]}.yaml", None, rule, "write lines `key: value`")
    return None


def _of_a_name(message: str, files: Sequence[str]) -> Problem | None:
    """Entries of a defaults list, groups and choices that do not exist."""
    in_a_list = r"In '(.+?)': Could not (?:load|find) '(.+?)'"
    if found := re.search(rf"{in_a_list}\.?\s*Available options in '.+?':\s*(.+)", message):
        group, _, name = found[2].rpartition("/")
        choices = found[3].split()
        close = difflib.get_close_matches(name, choices, n=1)
        rule = f"its defaults list names '{name}' of {group}, which {one_of(*choices).text}"
        return Problem(f"{found[1]}.yaml", None, rule, f"write {group}: {(close or choices)[0]}")
    if found := re.search(in_a_list, message):
        others = [file for file in files if file != found[1]]
        close = difflib.get_close_matches(found[2].rpartition("/")[2], others, n=1)
        remedy = f"leave out {found[2]}, or --config-dir DIR names its folder"
        remedy = f"write {close[0]} instead" if close else remedy
        rule = f"its defaults list names '{found[2]}', and there is no such file"
        return Problem(f"{found[1]}.yaml", None, rule, remedy)
    if found := re.search(r"In '(.+?)': Could not override '(.+?)'\. No match in the defaults list", message):
        rule = f"overrides '{found[2]}', which no earlier file in the defaults list has"
        remedy = f"write {found[2]} without override, or put the file that has it first"
        return Problem(f"{found[1]}.yaml", None, rule, remedy)
    rule = "there is no such key or group to override"
    suggestion = r"Did you mean to override (?:one of )?(.+?)\?"
    if found := re.search(rf"Could not override '(.+?)'\.(?:\s*{suggestion})?", message):
        return Problem(found[1], None, rule, f"override {found[2]}" if found[2] else f"leave out {found[1]}")
    if found := re.search(r"Override (\S+?)=\S* looks like a config group override", message):
        return Problem(found[1], None, rule, f"leave out {found[1]}")
    return None
