"""From overrides and YAML files to a checked configuration, with notes for the user.

In: what Hydra composed, or overrides to compose. Out: an instance of the schema's dataclass and a `Command`;
or one ConfigError with every mistake in options, overrides, keys, types and values, and in the entry point's
own checks.

The base of a composition is the schema's defaults as plain values, so that we find all unknown keys and wrong
types together; Hydra would report one at a time. Left out on purpose: legal values
(`rules.py`), the meaning of keys (`tree.py`, `verl.py`, `effects.py`), processes (`launch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraflow.batch_plan.roles import needs_critic
from hydraflow.batch_plan.settings import COMMAND_LINE, DEFAULT
from hydraflow.batch_plan.topology import ROLLOUT
from hydraflow.compose import allocated, rules, verl_trees
from hydraflow.compose import origins as provenance
from hydraflow.compose.arguments import Arguments, CommandLineOption
from hydraflow.compose.command import Command, KeyCounts
from hydraflow.compose.effects import keys_without_effect
from hydraflow.compose.engine_arguments import check_names
from hydraflow.compose.environment import unread_environment
from hydraflow.compose.hydra_errors import translated
from hydraflow.compose.keys import fitted, known_keys, leaf_keys
from hydraflow.compose.overrides import PreparedCommandLine, config_folder, prepare
from hydraflow.compose.tree import CheckedTree, UnknownValues, check, nested, over
from hydraflow.compose.verl_values import shard_over_all
from hydraflow.device import planned_devices
from hydraflow.errors import ConfigError, HydraflowError, Problem
from hydraflow.schema import CommandConfig, PPOConfig, SupervisedConfig
from hydraflow.system.allocation import allocation, torchrun_processes

Config = TypeVar("Config")
Judge = Callable[[Any, Command], Iterable[Problem]]
"""An entry point's own check of a configuration, whose problems join the report."""
VERSION_BASE = "1.3"
_stored: dict[str, type] = {}
"""Name -> schema of the configurations whose defaults are in Hydra's store."""
# Hydra would copy its store for each composition, which takes a tenth of the time. Nothing changes the copy:
# what is loaded from the store is a copy itself.
ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


@dataclass(frozen=True)
class EntryPoint(Generic[Config]):
    """An entry point: its schema, options and checks."""

    config_name: str
    """Name of its file in the config folder, without the suffix."""
    schema: type[Config]
    options: Sequence[CommandLineOption] = ()
    """Options besides Hydra's."""
    judges: Sequence[Judge] = ()
    missing: Judge | None = None
    """Reports missing files, but only along with other mistakes. Without any, the job reports missing files
    together with everything else that is wrong with this machine."""
    tolerant: bool = False
    """Nothing will run: unsupported keys are reported, not rejected, and the entry point prints the notes."""
    advise: Callable[..., Iterable[str]] | None = None
    """Notes on values that are legal but probably unintended (`advice.py`)."""
    show_error: Callable[[HydraflowError], None] | None = None
    """Prints an error for the user; None: it goes to standard error."""
    switches: Mapping[str, str | bool] = field(default_factory=dict)
    """Its options that were given."""
    words: tuple[str, ...] = ()
    """The command line of the process, without its secrets."""


@dataclass(frozen=True)
class ComposedConfig(Generic[Config]):
    """A composition without errors."""

    config: Config
    command: Command
    tree: dict[str, Any]
    """The configuration with unresolved interpolations, for `--cfg job`."""


def load(config_name: str, schema: type[Config], overrides: Sequence[str] = ()) -> Config:
    """The configuration of a command line with these overrides, for tests and tools. Raises ConfigError.

    >>> from hydraflow.schema import CommandConfig, PPOConfig
    >>> load("ppo", PPOConfig, ["data.train_batch_size=96"]).data.train_batch_size
    96
    """
    return load_command(config_name, schema, overrides)[0]


def load_command(
    config_name: str, schema: type[Config], overrides: Sequence[str] = (), **checks: Any
) -> tuple[Config, Command]:
    """As `load`, with the `Command` and its notes; `checks`: fields of `EntryPoint`."""
    entry = EntryPoint(config_name, schema, **checks)
    prepared = prepare(config_name, schema, Arguments(overrides=list(overrides)))
    register(entry)
    with hydra.initialize_config_dir(str(config_folder(config_name)), version_base=VERSION_BASE):
        try:
            composed = hydra.compose(config_name, prepared.words)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError([*prepared.problems, translated(error)]) from error
        found = finish(entry, composed, prepared, config_name, prepared.words)
    return found.config, found.command


def register(entry: EntryPoint[Any], folders: Sequence[Path] = ()) -> None:
    """Registers the schema's defaults as `schema_<config_name>`, the base of the YAML files.

    `folders` contain the user's files, which may name verl's.
    """
    if _stored.get(entry.config_name) is not entry.schema:
        ConfigStore.instance().store(f"schema_{entry.config_name}", asdict(entry.schema()))
        _stored[entry.config_name] = entry.schema
    verl_trees.register(entry.schema, entry.config_name, folders)


def finish(
    entry: EntryPoint[Config],
    composed: DictConfig,
    prepared: PreparedCommandLine,
    config_name: str,
    words: Sequence[str],
    *,
    only_keys: bool = False,
) -> ComposedConfig[Config]:
    """The checked configuration; raises one ConfigError with all its problems.

    `config_name` and `words`: the file and the overrides that were composed. `only_keys`: values are not
    checked, because the configuration is only shown.
    """
    # Hydra does not list it among the overrides of the task
    searched = [word for word in prepared.words if word.startswith("hydra.searchpath=")]
    ours = config_folder(entry.config_name)
    found = provenance.find(entry.schema, config_name, [*words, *searched], prepared.folders, ours)
    content = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(content, dict)
    tree = {str(name): value for name, value in content.items()}
    if config_name != entry.config_name:  # the user's own file may leave ours out of its defaults list
        tree = over(asdict(cast(Any, entry.schema())), tree)
        composed = OmegaConf.create(tree)
    checked = check(entry.schema, tree, found.of, lambda key: _resolved(composed, key), found.in_files)
    allocated.fill_in(entry.schema, checked.leaves, checked.origins, allocation())
    checked.translation.notes += shard_over_all(checked.leaves)
    checked.unknown.keys |= prepared.unknown.keys
    checked.unknown.everything |= prepared.unknown.everything
    unsupported = checked.translation.unsupported
    if not entry.tolerant:  # do not report the replacement of a rejected value
        checked.unknown.keys |= {one.field for one in unsupported if one.field == f"{ROLLOUT}.name"}
    tolerated = unsupported if entry.tolerant else []
    problems = prepared.problems + [one for one in checked.problems if one not in tolerated]
    config = _build(entry.schema, checked.leaves)
    # wrong names in copied values are reported under the key that they were copied from
    copied = {key for key, origin in checked.origins.items() if origin.startswith("follows ")}
    foreign, notes = check_names(config, copied)
    written = from_environment(entry.schema, composed, tree, found.of)
    command, ineffective = _describe(entry, config, checked, written, notes)
    if not only_keys:
        asked: CommandConfig = cast(Any, config)
        suspects = [*foreign, *(ineffective if asked.strict else [])]
        problems += _value_problems(entry, config, command, checked, suspects, refused=bool(problems))
    if problems:
        raise ConfigError([checked.translation.as_named(problem) for problem in problems])
    as_written = {key: checked.written.get(key, value) for key, value in checked.leaves.items()}
    return ComposedConfig(config, command, nested(as_written))


def from_environment(
    schema: type, composed: DictConfig, tree: Mapping[str, Any], origins: Mapping[str, str]
) -> dict[str, Any]:
    """The leaves that get values from the environment, directly or through other keys, as in
    `Command.written`.

    They are found by resolving once more with markers in place of the environment's values.
    """
    if "oc.env" not in str(tree):
        return {}
    with unread_environment() as named:
        leaves = check(schema, tree, origins, lambda key: _resolved(composed, key)).leaves
    found = {key: named.put_back(value) for key, value in leaves.items()}
    return {key: value for key, value in found.items() if value != leaves[key]}


def _resolved(composed: DictConfig, key: str) -> Any:
    """A value with its interpolations resolved. Raises ConfigError if one cannot be."""
    try:
        value = OmegaConf.select(composed, key, throw_on_missing=True)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise ConfigError([replace(translated(error), field=key)]) from error


def _build(schema: type[Config], leaves: Mapping[str, Any]) -> Config:
    """The dataclass instance with these leaves, whose types have been checked, and defaults elsewhere."""
    owner: type = schema
    config, keys = schema(), known_keys(owner)
    for key, value in leaves.items():
        *sections, name = key.split(".")
        setattr(reduce(getattr, sections, config), name, fitted(keys[key].hint, value))
    return config


def _describe(
    entry: EntryPoint[Any],
    config: Any,
    checked: CheckedTree,
    written: Mapping[str, Any],
    names: Sequence[str],
) -> tuple[Command, list[Problem]]:
    """The command with its notes, and the problems of keys without effect. `written`: see `Command`; `names`:
    notes on the names in open mappings."""
    schema: type = entry.schema
    given = [(key, written.get(key, checked.leaves[key])) for key in _keys_of_the_user(schema, checked)]
    ineffective = [*checked.translation.ignored, *keys_without_effect(config, given, planning=entry.tolerant)]
    unsupported = checked.translation.unsupported
    notes = [
        *checked.translation.notes,
        *(one.fault for one in ineffective),
        *names,
        *_default_devices(config, checked),
        *_default_estimator(config, checked),
        *(entry.advise(config, planning=entry.tolerant) if entry.advise else ()),
    ]
    if entry.tolerant:
        notes += [one.fault for one in unsupported]
    honoured = len(given) + len(checked.translation.ignored) - len(ineffective)
    command = Command(
        entry.config_name,
        origins=dict.fromkeys(leaf_keys(schema), DEFAULT) | checked.origins,
        notes=tuple(dict.fromkeys(notes)),
        counts=KeyCounts(honoured, len(ineffective), len(unsupported)),
        unsupported=tuple(unsupported) if entry.tolerant else (),
        switches=entry.switches,
        words=entry.words,
        written=written,
    )
    return command, ineffective


def _default_devices(config: Any, checked: CheckedTree) -> Iterator[str]:
    """Notes the default number of GPUs, which differs from verl's, if a verl command line does not set it."""
    key, translation = "trainer.n_gpus_per_node", checked.translation
    if not isinstance(config, PPOConfig | SupervisedConfig) or key in checked.origins:
        return
    if isinstance(config, PPOConfig) and config.cluster.devices_per_node:
        return
    if translation.honoured or translation.ignored or translation.unsupported or translation.untouched:
        verls = "verl takes 8" if isinstance(config, PPOConfig) else "verl gets it from torchrun"
        count = planned_devices(config.trainer.device)
        yield f"{key}: not set; {verls}, here it is the number on this machine ({count})"


def _default_estimator(config: Any, checked: CheckedTree) -> Iterator[str]:
    """Notes that the default estimator trains a critic, which the recipe's does not."""
    key = "algorithm.adv_estimator"
    if not isinstance(config, PPOConfig) or key in checked.origins or not needs_critic(config):
        return
    # model_engine sets critic.strategy along with the actor's
    if not any(
        name.startswith("critic.") and name != "critic.strategy" and provenance.is_users(origin)
        for name, origin in checked.origins.items()
    ):
        name = config.algorithm.adv_estimator
        yield f"{key}: not set, so {name} as in verl, which trains a critic; {key}=grpo needs none"


def _keys_of_the_user(schema: type, checked: CheckedTree) -> list[str]:
    """Keys that the command line sets, and those that a user's file sets to other values than the default."""
    keys = known_keys(schema)
    return [
        key
        for key, origin in checked.origins.items()
        if key in checked.leaves
        and provenance.is_users(origin)
        and (origin == COMMAND_LINE or checked.leaves[key] != keys[key].default)
    ]


def _value_problems(
    entry: EntryPoint[Any],
    config: Any,
    command: Command,
    checked: CheckedTree,
    others: list[Problem],
    *,
    refused: bool,
) -> list[Problem]:
    """Problems of the values, except those that may be due to a rejected value.

    `others`: problems already found, to filter in the same way. `refused`: whether there are further
    problems.
    """
    problems = [*rules.problems(config, planning=entry.tolerant, usual=checked.usual), *others]
    # the key that these follow is reported instead
    followed = {f"follows {problem.field}" for problem in problems}
    problems = [problem for problem in problems if checked.origins.get(problem.field) not in followed]
    if not entry.tolerant:
        problems += allocated.contradictions(config, allocation())
        problems += allocated.started_by_torchrun(config, torchrun_processes())
    problems = checked.unknown.unrelated(problems)
    keys = checked.unknown.keys | {problem.field for problem in problems}
    unknown = UnknownValues(keys, checked.unknown.everything)
    if unknown.hide_the_plan:
        return problems
    # judges look choices up in tables, so unknown ones are replaced by their defaults
    wrong = rules.unknown_choices(config)
    config = _build(entry.schema, {key: checked.leaves[key] for key in checked.leaves if key not in wrong})
    problems += unknown.unrelated(problem for judge in entry.judges for problem in judge(config, command))
    if entry.missing is not None and (problems or refused):
        problems += unknown.unrelated(entry.missing(config, command))
    return problems
