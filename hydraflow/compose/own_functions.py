"""Checks that the files, names and parameters of user-defined losses and estimators fit the configuration.

In: a configuration. Out: problems; and for functions that fit, their location and the values of the keys that
they read. The files are parsed, not run. Left out on purpose: importing them (`jobs/own_code.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydraflow.algorithms.config import ESTIMATORS, OF_ESTIMATORS, OF_LOSSES, POLICY_LOSSES
from hydraflow.batch_plan.settings import with_value
from hydraflow.errors import Problem
from hydraflow.schema import PPOConfig
from hydraflow.system.own_code import OwnFunction, Parameters
from hydraflow.system.paths import expanded, no_file

LOSS, ESTIMATOR = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"
REWARD = "reward.custom_reward_function.path"
_FIRST_PARAMETERS = (("scores",), ("rewards", "mask", "lengths"))
"""What an estimator may take first, per trajectory or per token."""


@dataclass(frozen=True)
class OwnChoice:
    """A key that names a user's function."""

    key: str
    given: str
    function: OwnFunction
    keys: dict[str, Any]
    """Values of the keys that it reads, by the names of its parameters."""


def own_choices(config: PPOConfig) -> list[OwnChoice]:
    """The user's functions that a configuration names."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    found = []
    for key, given, table, sections in (
        (ESTIMATOR, algorithm.adv_estimator, ESTIMATORS, (algorithm,)),
        (LOSS, actor.policy_loss.loss_mode, POLICY_LOSSES, (actor, actor.policy_loss)),
    ):
        function = OwnFunction.named(given)
        if function is not None:
            found.append(OwnChoice(key, given, function, table[given].keys(*sections)))
    return found


def with_whole_paths(config: PPOConfig) -> PPOConfig:
    """The configuration with absolute paths, for processes with another working directory."""
    for choice in own_choices(config):
        config = with_value(config, choice.key, f"{choice.function.path}:{choice.function.name}")
    return config


def own_files(config: PPOConfig) -> dict[str, Path]:
    """The user's code files of a legal configuration, by the keys that name them."""
    found = {choice.key: choice.function.path for choice in own_choices(config)}
    rewards = {REWARD: config.reward.custom_reward_function.path}
    for place, entry in enumerate(config.reward.functions):
        rewards[f"reward.functions[{place}].path"] = entry.get("path")
    return found | {key: expanded(path).absolute() for key, path in rewards.items() if path}


def own_problems(config: PPOConfig) -> Iterator[Problem]:
    """Problems of files, functions and parameters that do not fit."""
    for choice in own_choices(config):
        try:
            parameters = choice.function.parameters()
        except OSError as error:
            path, name = choice.function.path, choice.function.name
            if path.is_file():
                remedy = f"make {path} readable"
                yield Problem(choice.key, choice.given, f"cannot be read: {error.strerror}", remedy)
            else:
                yield no_file(path, choice.key, endings=(".py",), after=f":{name}")
            continue
        except ValueError as error:
            yield Problem(choice.key, choice.given, str(error), f"{choice.key}=path/to/file.py:function")
            continue
        why = _misfit(choice, parameters)
        if why:
            start = "tokens, *" if choice.key == LOSS else "scores, *, group_ids"
            yield Problem(choice.key, choice.given, why, f"def {choice.function.name}({start}, ...)")


def _misfit(choice: OwnChoice, parameters: Parameters) -> str:
    """Why the parameters do not fit; empty: they do."""
    if choice.key == LOSS:
        data, section, begins = 1, "actor or actor.policy_loss", bool(parameters.names)
        columns: tuple[str, ...] = OF_LOSSES
        how = f"must take the tokens first, then by name {', '.join(columns)} or keys of actor"
    else:
        first = (names for names in _FIRST_PARAMETERS if parameters.names[: len(names)] == names)
        data = len(next(first, ()))
        section, begins = "algorithm", data > 0
        columns = tuple(OF_ESTIMATORS)
        how = (
            f"must take scores, or rewards, mask and lengths, then {', '.join(columns)} or keys of algorithm"
        )
    if not begins:
        return f"{how}; it takes {', '.join(parameters.names) or 'nothing'}"
    if data == 1 and choice.key == ESTIMATOR and "values" in parameters.names:
        return "takes scores, one per trajectory, so it cannot take values, which are per token"
    given = {*choice.keys, *columns}
    unknown = [name for name in parameters.names[data:] if name not in given | parameters.optional]
    if not unknown:
        return ""
    named = ", ".join(columns)
    return f"its parameter {unknown[0]} is not a key of {section}, nor one of {named}, and has no default"
