"""Which functions score a run's responses: `reward.functions`, the user's file, or the data source's own.

In: the section `reward`. Out: a list of `SelectedFunction`, at least one, or the problems that can be found
without loading a function.
"""

from __future__ import annotations

import math
import os
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydraflow.errors import ConfigError, Problem, shown
from hydraflow.options import listed
from hydraflow.rewards.config import FUNCTIONS, RewardConfig
from hydraflow.rewards.custom import ARGUMENTS
from hydraflow.rewards.functions import find_scorer, unknown_sources
from hydraflow.rewards.sandbox import require_sandbox

KEY = "reward.functions"
BY_SOURCE = "data_source"
_FIELDS = {"name": None, "path": None, "weight": 1.0, "kwargs": None}
"""Fields of an entry, with defaults."""
_TAKEN = ("score", "acc", "failed", "failed_rows")


@dataclass(frozen=True)
class SelectedFunction:
    """A reward function and its weight in the score."""

    label: str
    """Its name in metrics and in the reward's numbers."""
    name: str
    """A key of FUNCTIONS, or the name in the user's file."""
    path: str | None = None
    """The user's file; None: a built-in function."""
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def selected(config: RewardConfig) -> list[SelectedFunction]:
    """The functions in their order. The configuration must have no `problems`.

    >>> [one.name for one in selected(RewardConfig(functions=[{"name": "math"}, {"name": "length"}]))]
    ['math', 'length']
    """
    if config.functions:
        return [_written(entry) for entry in config.functions]
    custom = config.custom_reward_function
    if custom.path is None:
        return [SelectedFunction(BY_SOURCE, BY_SOURCE)]
    return [SelectedFunction(custom.name, custom.name, custom.path, kwargs=custom.reward_kwargs)]


def check_sources(config: RewardConfig, data_sources: Iterable[str]) -> None:
    """`ConfigError` for data sources that need a built-in function but have none, and for programs that
    cannot be sandboxed here."""
    if any(problems(config)):
        return  # reported by `RewardPool.require_loaded`
    data_sources = set(data_sources)
    if uses(config, BY_SOURCE) and (unknown := unknown_sources(data_sources)):
        raise ConfigError(unknown)
    names = {one.name for one in selected(config) if one.path is None}
    if BY_SOURCE in names:
        names |= {find_scorer(source) for source in data_sources}
    if "code" in names:
        require_sandbox(config.sandbox, config.timeout)


def uses(config: RewardConfig, name: str) -> bool:
    """Whether one of the functions is the built-in one of that name."""
    return any(one.path is None and one.name == name for one in selected(config))


def problems(config: RewardConfig) -> Iterator[Problem]:
    """Problems of the section that can be found without loading anything."""
    found = [
        problem for place, entry in enumerate(config.functions) for problem in _entry_problems(place, entry)
    ]
    yield from found
    custom = config.custom_reward_function.path
    if config.functions and custom is not None:
        rule, remedy = "already selects the functions", f"{KEY}=[{{path: {custom}}},...] without it"
        yield Problem("reward.custom_reward_function.path", custom, f"{KEY} {rule}", remedy)
    if config.reward_manager.name == "batch" and (config.functions or custom is None):
        rule = "calls a single custom function with many rows"
        remedy = "reward.custom_reward_function.path=... or reward.reward_manager.name=naive"
        yield Problem("reward.reward_manager.name", "batch", rule, remedy)
    if found:
        return
    labels = [one.label for one in selected(config)]
    if doubled := sorted({label for label in labels if labels.count(label) > 1}):
        rule = f"two functions are called {doubled[0]}"
        yield Problem(KEY, shown(labels), rule, "give the files or functions other names")
    if config.functions and (taken := [label for label in labels if label in _TAKEN]):
        rule = f"{taken[0]} is reserved for another number of a reward"
        yield Problem(KEY, shown(labels), rule, "give the function another name")
    if uses(config, "judge"):
        yield from _judge_problems(config)


def key_of(variable: str) -> str:
    """The judge's API key, from an environment variable. ConfigError when it is unset or empty."""
    if key := os.environ.get(variable, "").strip():
        return key
    rule = "the environment has no such variable, or it is empty"
    remedy = f"export {variable}=... before the command, or reward.judge.api_key_env=null"
    raise ConfigError.one("reward.judge.api_key_env", variable, rule, remedy)


def _written(entry: Mapping[str, Any]) -> SelectedFunction:
    given = _FIELDS | dict(entry)
    name, path = given["name"] or "compute_score", given["path"]
    label = Path(path).stem if path and not given["name"] else name
    return SelectedFunction(label, name, path, float(given["weight"]), given["kwargs"] or {})


def _entry_problems(place: int, entry: Any) -> Iterator[Problem]:
    key = f"{KEY}[{place}]"
    if not isinstance(entry, Mapping):
        yield Problem(key, shown(entry), "must be a mapping", f"{KEY}=[{{name: {entry}, weight: 1.0}}]")
        return
    if unknown := [name for name in entry if name not in _FIELDS]:
        yield Problem(f"{key}.{unknown[0]}", shown(entry[unknown[0]]), f"only {listed(_FIELDS)} are known")
    given = _FIELDS | dict(entry)
    name, path, weight, kwargs = (given[field] for field in _FIELDS)
    if name is not None and not isinstance(name, str):
        yield Problem(f"{key}.name", shown(name), "must be the name of a function")
    elif path is None and name not in FUNCTIONS:
        own = f"{KEY}=[{{path: mine.py, name: {name}}}] for your own function"
        yield Problem(f"{key}.name", shown(name), f"must be {listed(FUNCTIONS)}", own)
    if path is not None and not isinstance(path, str):
        yield Problem(f"{key}.path", shown(path), "must be the path of a Python file")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        yield Problem(f"{key}.weight", shown(weight), "must be a finite number", f"{key}.weight=1.0")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)):
        yield Problem(f"{key}.kwargs", shown(kwargs), "must be a mapping of keyword arguments")


def _judge_problems(config: RewardConfig) -> Iterator[Problem]:
    judge, key = config.judge, "reward.judge"
    for name in ("base_url", "model"):
        if not getattr(judge, name):
            yield Problem(f"{key}.{name}", "null", "must be given for the judge", f"{key}.{name}=...")
    if judge.base_url and not judge.base_url.startswith(("http://", "https://")):
        rule, remedy = "must begin with http:// or https://", f"{key}.base_url=http://{judge.base_url}"
        yield Problem(f"{key}.base_url", judge.base_url, rule, remedy)
    if judge.timeout > config.timeout:
        rule = f"exceeds reward.timeout={config.timeout:g}, which limits all attempts together"
        remedy = f"reward.timeout={judge.timeout * (judge.max_retries + 1):g}"
        yield Problem(f"{key}.timeout", judge.timeout, rule, remedy)
    try:
        if re.compile(judge.pattern).groups != 1:
            rule, remedy = "must have one group, which is the score", f"{key}.pattern='Score: ([0-9]+)'"
            yield Problem(f"{key}.pattern", judge.pattern, rule, remedy)
    except re.error as error:
        yield Problem(f"{key}.pattern", judge.pattern, f"is not a regular expression: {error}")
    try:
        places = [name for _, name, _, _ in string.Formatter().parse(judge.prompt) if name is not None]
    except ValueError as error:
        yield Problem(f"{key}.prompt", None, f"{error}", "write {{ and }} for braces")
        return
    if unknown := [name for name in places if name.partition("[")[0] not in ARGUMENTS]:
        rule = f"{{{unknown[0]}}} is unknown; known are {listed([f'{{{name}}}' for name in ARGUMENTS])}"
        yield Problem(f"{key}.prompt", None, rule, "write {{ and }} for braces")
