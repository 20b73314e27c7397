"""Translates errors of Hydra and OmegaConf to this program's form: field, value, rule, remedy.

In: an exception. Out: ConfigError. A message that matches no row below is passed on verbatim.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

from hydraflow.errors import ConfigError, Problem


def translated(error: Exception, files: Sequence[str] = ()) -> ConfigError:
    """An error of Hydra or OmegaConf as a problem of the configuration; `files`: names that a defaults list
    may use.

    >>> from hydra.errors import ConfigCompositionException
    >>> print(translated(ConfigCompositionException("In 'mine': Could not load 'pqo'."), ["ppo"]).problems[0])
    mine.yaml: its defaults list names 'pqo', and there is no such file
          -> write ppo instead
    """
    key = getattr(error, "full_key", None) or "configuration"
    text = str(error).partition("Config search path:")[0]  # the rest lists folders that the user did not name
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    message = " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=")))
    for pattern, problem in _ROWS:
        if match := re.search(pattern, message):
            return ConfigError([problem(key, match, files)])
    return ConfigError.one(key, None, message)


def _deletion(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    name = match[1]
    return Problem(f"~{name}", None, "there is no such key to delete", f"leave out ~{name}")


def _interpolation(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    remedy = "write the whole path of a key that --help lists, such as ${trainer.seed}"
    return Problem(key, f"${{{match[1]}}}", f"Interpolation key '{match[1]}' not found", remedy)


def _environment(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    name = match[1]
    remedy = f"export {name}=<value>, or ${{oc.env:{name},<default>}}"
    return Problem(key, f"${{oc.env:{name}}}", f"the environment has no variable {name}", remedy)


def _resolver(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    rule = f"there is no resolver {match[1]}"
    return Problem(key, f"${{{match[1]}:...}}", rule, "${oc.env:NAME} is a variable of the environment")


def _circle(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    return Problem(key, None, "its interpolations refer to each other in a circle", f"{key}=<value>")


def _no_group(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    remedy = f"override {match[2]}" if match[2] else f"leave out {match[1]}"
    return Problem(match[1], None, "there is no such key or group to override", remedy)


def _no_mapping(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    kind = "a list" if match[2] == "ListConfig" else "no keys"
    return Problem(f"{match[1]}.yaml", None, f"holds {kind} where keys belong", "write lines `key: value`")


def _default(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    name = match[2]
    others = [file for file in files if file != match[1]]
    close = difflib.get_close_matches(name.rpartition("/")[2], others, n=1)
    remedy = f"leave out {name}, or --config-dir DIR names its folder"
    remedy = f"write {close[0]} instead" if close else remedy
    rule = f"its defaults list names '{name}', and there is no such file"
    return Problem(f"{match[1]}.yaml", None, rule, remedy)


def _choice(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    group, _, name = match[2].rpartition("/")
    choices = match[3].split()
    close = difflib.get_close_matches(name, choices, n=1)
    rule = f"its defaults list names '{name}' of {group}; there are {', '.join(choices)}"
    return Problem(f"{match[1]}.yaml", None, rule, f"write {group}: {(close or choices)[0]}")


def _override(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    rule = f"overrides '{match[2]}', which no file before it in the defaults list has"
    remedy = f"write {match[2]} without override, or put the file that has it first"
    return Problem(f"{match[1]}.yaml", None, rule, remedy)


def _no_list(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    return Problem(f"{match[1]}.yaml", None, f"defaults must be a list, not {match[2]}", "defaults: [_self_]")


def _no_entry(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    rule = f"an entry of a defaults list must be text or a mapping, not {match[1]}"
    return Problem(key, None, rule, "write the name of a file, or group: name")


def _no_end(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    return Problem(key, None, "files name each other in their defaults lists", "leave out one of the names")


def _other_kind(key: str, match: re.Match[str], files: Sequence[str]) -> Problem:
    name, value = match.groups()
    kinds = "a list such as [a,b], not a mapping", "a mapping such as {name: value}, not a list"
    return Problem(name, value, f"must be {kinds[value.startswith('[')]}")


_ROWS: tuple[tuple[str, Callable[[str, re.Match[str], Sequence[str]], Problem]], ...] = (
    (r"Could not delete from config\. (?:The value of )?'(.+?)'", _deletion),
    (r"Error merging override \+*([\w.]+)=([{\[].*)", _other_kind),
    (r"Interpolation key '(.+?)' not found", _interpolation),
    (r"Environment variable '(.+?)' not found", _environment),
    (r"Unsupported interpolation type (\S+)", _resolver),
    (r"Recursive interpolation detected", _circle),
    (r"Invalid defaults list in '(.+?)', defaults must be a list \(got (.+?)\)", _no_list),
    (r"Unsupported (?:type|item value) in defaults : (\w+)", _no_entry),
    (r"maximum recursion depth exceeded", _no_end),
    (r"primary config '(.+?)' must be a DictConfig, got (\w+)", _no_mapping),
    (r"In '(.+?)': Could not (?:load|find) '(.+?)'\.?\s*Available options in '.+?':\s*(.+)", _choice),
    (r"In '(.+?)': Could not (?:load|find) '(.+?)'", _default),
    (r"In '(.+?)': Could not override '(.+?)'\. No match in the defaults list", _override),
    (r"Could not override '(.+?)'\.(?:\s*Did you mean to override (?:one of )?(.+?)\?)?", _no_group),
    (r"Override (\S+?)=\S* looks like a config group override()", _no_group),
)
"""Pattern of Hydra's message -> the problem."""
