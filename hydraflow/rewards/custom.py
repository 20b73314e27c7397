"""Finds, imports and checks the user's reward function.

In: path and name of the function and its keyword arguments. Out: a callable, or a `ConfigError` that says
what is wrong. Importing runs the user's code, which may hang or exit: before a run starts it
is done in a process of a pool (`RewardPool.require_loaded`).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from hydraflow.errors import ConfigError

SECTION = "reward.custom_reward_function"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

RewardFunction = Callable[..., Any]


def load_function(
    path: str | Path,
    name: str,
    reward_kwargs: Mapping[str, Any],
    *,
    arguments: Sequence[str] = ARGUMENTS,
    key: str = SECTION,
) -> RewardFunction:
    """The function `name` in the Python file `path`, to be called with `arguments` by name; `reward_kwargs`
    are bound to it. Its arguments may have other names if they are in this order. `key`: the section for
    messages. Raises `ConfigError`."""
    module = _import_file(_absolute(path), f"{key}.path")
    if not hasattr(module, name):
        functions = inspect.getmembers(module, inspect.isfunction)
        defined = ", ".join(n for n, value in functions if value.__module__ == module.__name__)
        rule = f"{path} defines no such function; it has {defined or 'none'}"
        raise ConfigError.one(f"{key}.name", name, rule)
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError.one(
            f"{key}.name", name, f"is a {type(function).__name__} in {path}, not a function"
        )
    by_name = _takes_names(function, f"{name} in {path}", arguments, reward_kwargs, key)
    bound = partial(function, **reward_kwargs)
    return bound if by_name else partial(_in_order, bound, arguments)


def _in_order(function: RewardFunction, arguments: Sequence[str], **values: Any) -> Any:
    return function(*(values[name] for name in arguments))


def is_async(function: RewardFunction) -> bool:
    """Whether calling it gives a coroutine."""
    while isinstance(function, partial):
        function = function.args[0] if function.func is _in_order else function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def _takes_names(
    function: RewardFunction,
    called: str,
    arguments: Sequence[str],
    reward_kwargs: Mapping[str, Any],
    key: str,
) -> bool:
    """Whether it takes the arguments by name; False: only in their order. ConfigError: neither."""
    doubled = [name for name in reward_kwargs if name in arguments]
    if doubled:
        rule = "are passed by the trainer and cannot be set"
        raise ConfigError.one(f"{key}.{'reward_kwargs' if key == SECTION else 'kwargs'}", doubled, rule)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C may have none
        return True
    try:
        signature.bind(**dict.fromkeys(arguments), **reward_kwargs)
    except TypeError as error:
        with suppress(TypeError):
            signature.bind(*arguments, **reward_kwargs)
            return False
        given = ", ".join(map(str, [*arguments, *reward_kwargs]))
        name = called.partition(" ")[0]
        rule = f"{called} has the arguments {signature} and is called with {given}: {error}"
        remedy = f"def {name}({', '.join(arguments)}, **kwargs)"
        raise ConfigError.one(f"{key}.name", name, rule, remedy) from error
    return True


def _import_file(path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError.one(key, path, "no such file")
    spec = importlib.util.spec_from_file_location(f"hydraflow_custom_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError.one(key, path, "is not a Python file", "its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    try:
        with redirect_stdout(sys.stderr):  # a command's stdout is reserved for its report
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything; it becomes our message
        where = f" ({line})" if (line := line_of(error, path)) else ""
        rule = f"cannot be imported: {type(error).__name__}: {error}{where}"
        raise ConfigError.one(key, path, rule) from error
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
