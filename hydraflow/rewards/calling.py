"""Loads the functions that `selection.py` found, and combines them into one call per row, or per batch of
rows.

In: the section `reward`. Out: a `RewardCall`. Loading runs the user's code (`custom.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from typing import Any

from hydraflow.errors import ConfigError
from hydraflow.rewards.config import FUNCTIONS, RewardConfig
from hydraflow.rewards.custom import ARGUMENTS, BATCH_ARGUMENTS, SECTION, by_names, is_async, load_function
from hydraflow.rewards.selection import BY_SOURCE, KEY, SelectedFunction, key_of, selected
from hydraflow.rewards.values import read_value

ALL_ROWS = 2**31
"""Concurrency of a function that takes batches: no limit."""


@dataclass(frozen=True)
class RewardCall:
    """A reward function and how to call it."""

    function: Callable[..., Any]
    """Called with the values of ARGUMENTS by name; with BATCH_ARGUMENTS if `is_batched`."""
    is_async: bool = False
    """It returns coroutines."""
    is_batched: bool = False
    by_source: bool = False
    """It needs the functions of the rows' data sources."""
    paths: tuple[str, ...] = ()
    """The user's files."""

    def of_row(self, row: Sequence[Any]) -> Any:
        """What the function returns for one row, whose values are those of ARGUMENTS in order."""
        return self.function(**dict(zip(ARGUMENTS, row, strict=True)))

    def at_once(self, max_concurrent: int) -> int:
        """Maximum number of rows that a process scores concurrently."""
        return ALL_ROWS if self.is_batched else max_concurrent if self.is_async else 1


@dataclass(frozen=True)
class _Part:
    selected: SelectedFunction
    function: Callable[..., Any]


def load(config: RewardConfig) -> RewardCall:
    """Loads the functions of a run. `ConfigError` for one that cannot be loaded or called."""
    parts = [_Part(one, _load(one, config, place)) for place, one in enumerate(selected(config))]
    waits = any(is_async(part.function) for part in parts)
    weighted: Callable[..., Any] = _weighted_async if waits else _weighted
    return RewardCall(
        partial(weighted, parts) if config.functions else parts[0].function,
        is_async=waits,
        is_batched=config.reward_manager.name == "batch",
        by_source=any(part.selected.name == BY_SOURCE for part in parts),
        paths=tuple(part.selected.path for part in parts if part.selected.path is not None),
    )


def settings_of(config: RewardConfig) -> dict[str, Any]:
    """The section as plain values, for a process of a pool; without the fields of a subclass."""
    plain = asdict(config)
    return {field.name: plain[field.name] for field in fields(RewardConfig)}


def config_of(settings: Mapping[str, Any]) -> RewardConfig:
    """The inverse of `settings_of`."""
    sections: dict[str, Any] = {name: type(value) for name, value in vars(RewardConfig()).items()}
    given: dict[str, Any] = {
        name: sections[name](**value) if is_dataclass(sections[name]) else value
        for name, value in settings.items()
    }
    return RewardConfig(**given)


def _load(one: SelectedFunction, config: RewardConfig, place: int) -> Callable[..., Any]:
    if one.path is not None:
        arguments = BATCH_ARGUMENTS if config.reward_manager.name == "batch" else ARGUMENTS
        key = f"{KEY}[{place}]" if config.functions else SECTION
        function = load_function(one.path, one.name, one.kwargs, arguments=arguments, key=key)
        if arguments == BATCH_ARGUMENTS and is_async(function):
            rule = "is an async function, which scores rows one by one"
            remedy = "make it a plain function (def), or reward.reward_manager.name=naive"
            raise ConfigError.one(f"{key}.name", one.name, rule, remedy)
        return function
    if one.name == "judge" and config.judge.api_key_env is not None:
        key_of(config.judge.api_key_env)  # reports a missing key now, not at the first row
    built_in = FUNCTIONS[one.name].bound(config)
    takes = inspect.signature(built_in).parameters
    ours = (*ARGUMENTS, *FUNCTIONS[one.name].reads)
    own = [name for name, taken in takes.items() if taken.kind is taken.KEYWORD_ONLY and name not in ours]
    if unknown := [name for name in one.kwargs if name not in own]:
        rule = f"{one.name} has no argument {unknown[0]}; it takes {', '.join(own) or 'none'}"
        raise ConfigError.one(f"{KEY}[{place}].kwargs", dict(one.kwargs), rule)
    names = [name for name in ARGUMENTS if name in takes]
    return partial(by_names, built_in, names, one.kwargs)


def _weighted(parts: list[_Part], **row: Any) -> dict[str, float]:
    return _weighted_sum(parts, (part.function(**row) for part in parts))


def _weighted_async(parts: list[_Part], **row: Any) -> Awaitable[dict[str, float]]:
    """Runs the synchronous parts at once, and returns a coroutine that awaits the others."""
    computed = [None if is_async(part.function) else part.function(**row) for part in parts]
    return _await_all(parts, computed, row)


async def _await_all(parts: list[_Part], computed: list[Any], row: dict[str, Any]) -> dict[str, float]:
    values = []
    for part, value in zip(parts, computed, strict=True):  # rows are already concurrent, so parts need not be
        found = part.function(**row) if is_async(part.function) else value
        values.append(await found if inspect.isawaitable(found) else found)
    return _weighted_sum(parts, iter(values))


def _weighted_sum(parts: list[_Part], values: Iterator[Any]) -> dict[str, float]:
    """`score`: the weighted sum. <label>: a function's score; <label>/<name>: its other numbers. `acc`: that
    of the first function that returns one, else the first function's score."""
    numbers: dict[str, float] = {"score": 0.0}
    for part, value in zip(parts, values, strict=True):
        label = part.selected.label
        score, extra, failed = read_value(value)
        if score is None:
            raise ValueError(f"{label} {failed}")
        numbers["score"] += part.selected.weight * score
        numbers[label] = score
        numbers |= {f"{label}/{name}": number for name, number in extra.items()}
    accuracies = [numbers[key] for part in parts if (key := f"{part.selected.label}/acc") in numbers]
    return {"acc": accuracies[0] if accuracies else numbers[parts[0].selected.label]} | numbers
