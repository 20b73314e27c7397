"""Finds, imports and checks the user's reward function.

In: path and name of the function and its keyword arguments. Out: a callable, or a `ConfigError` that says
what is wrong. Importing runs the user's code, which may hang or exit, so before a run starts this happens in
a process of a pool (`RewardPool.require_loaded`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hydraflow.errors import ConfigError
from hydraflow.system.own_code import import_file
from hydraflow.system.paths import expanded, no_file

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
    file = absolute(path)
    if not file.is_file():
        raise ConfigError([no_file(file, f"{key}.path", endings=(".py",))])
    name_of_module = f"hydraflow_custom_reward_{file.stem}"
    module = import_file(file, module=name_of_module, field=f"{key}.path", value=file)
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


def by_names(function: RewardFunction, names: Sequence[str], kwargs: Mapping[str, Any], **values: Any) -> Any:
    """Calls a function with those of the values that it takes."""
    return function(**{name: values[name] for name in names}, **kwargs)


def _in_order(function: RewardFunction, arguments: Sequence[str], **values: Any) -> Any:
    return function(*(values[name] for name in arguments))


def is_async(function: RewardFunction) -> bool:
    """Whether calling it gives a coroutine."""
    while isinstance(function, partial):
        function = function.args[0] if function.func in (_in_order, by_names) else function.func
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


def absolute(path: str | Path) -> Path:
    """The path of the user's file, as used for the import."""
    return expanded(path).absolute()
