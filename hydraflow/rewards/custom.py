"""The user's own reward function: found, imported and checked.

In: path and name of the function and its keyword arguments. Out: a callable, or a `ConfigError` that says
what is wrong. Importing runs the user's code, which may hang or exit: before a run starts it
is done in a process of a pool (`RewardPool.require_loaded`).
Left out on purpose: asynchronous functions. Each reward process scores one row at a time, so there is nothing
to run concurrently.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from hydraflow.errors import ConfigError
from hydraflow.rewards.config import RewardConfig
from hydraflow.rewards.functions import unknown_sources

PATH_KEY = "reward.custom_reward_function.path"
NAME_KEY = "reward.custom_reward_function.name"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")

RewardFunction = Callable[..., Any]


def check_sources(config: RewardConfig, data_sources: Iterable[str]) -> None:
    """`ConfigError` for sources without a built-in function. A custom function accepts any."""
    if config.custom_reward_function.path is None and (problems := unknown_sources(data_sources)):
        raise ConfigError(problems)


def load_function(path: str | Path, name: str, reward_kwargs: Mapping[str, Any]) -> RewardFunction:
    """The function `name` in the Python file `path`. It must accept data_source, solution_str, ground_truth
    and extra_info by name, and `reward_kwargs`. Raises `ConfigError`."""
    module = _import_file(_absolute(path))
    if not hasattr(module, name):
        functions = inspect.getmembers(module, inspect.isfunction)
        defined = ", ".join(n for n, value in functions if value.__module__ == module.__name__)
        rule = f"{path} defines no such function; it has {defined or 'none'}"
        raise ConfigError.one(NAME_KEY, name, rule)
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError.one(NAME_KEY, name, f"is a {type(function).__name__} in {path}, not a function")
    if inspect.iscoroutinefunction(function):
        rule = "is an async function, which is not supported"
        raise ConfigError.one(NAME_KEY, name, rule, "make it a plain function (def)")
    _check_signature(function, path, name, reward_kwargs)
    return function


def _check_signature(
    function: RewardFunction, path: str | Path, name: str, reward_kwargs: Mapping[str, Any]
) -> None:
    doubled = [key for key in reward_kwargs if key in ARGUMENTS]
    if doubled:
        rule = "are given by the trainer and cannot be set"
        raise ConfigError.one("reward.custom_reward_function.reward_kwargs", doubled, rule)
    given = dict.fromkeys(ARGUMENTS) | dict(reward_kwargs)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C may have none
        return
    try:
        signature.bind(**given)
    except TypeError as error:
        rule = f"{name}{signature} in {path} is called with {', '.join(given)} by name: {error}"
        remedy = f"def {name}({', '.join(ARGUMENTS)}, **kwargs)"
        raise ConfigError.one(NAME_KEY, name, rule, remedy) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError.one(PATH_KEY, path, "no such file")
    spec = importlib.util.spec_from_file_location("hydraflow_custom_reward", path)
    if spec is None or spec.loader is None:
        raise ConfigError.one(PATH_KEY, path, "is not a Python file", "its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    try:
        with redirect_stdout(sys.stderr):  # a command's stdout is reserved for its report
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything; it becomes our message
        where = f" ({line})" if (line := line_of(error, path)) else ""
        rule = f"cannot be imported: {type(error).__name__}: {error}{where}"
        raise ConfigError.one(PATH_KEY, path, rule) from error
    return module


def line_of(error: BaseException, path: str | Path) -> str:
    """The line of the user's file that raised, such as `line 7: return table[key]`; empty if the file is not
    in the traceback."""
    if isinstance(error, SyntaxError):
        return ""  # its message names file and line
    file = _absolute(path)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file]
    return f"line {frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()
