"""From overrides and YAML files to a checked configuration, and what there is to say about it.

In: what Hydra composed, or overrides to compose. Out: an instance of the schema's dataclass and a `Command`;
or one ConfigError with every mistake: in options, overrides, keys, types, values, and in what the entry
point's judges find.

The base of a composition is the schema's defaults as plain values, so that unknown keys and wrong types of
all files and overrides are found by us, together, instead of by Hydra, one at a time. Left out on purpose:
what values may be (`rules.py`), what keys mean (`tree.py`, `verl.py`, `effects.py`), processes (`launch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraflow.batch_plan.roles import needs_critic
from hydraflow.compose import allocated, verl_trees
from hydraflow.compose import origins as provenance
from hydraflow.compose import rules as checks
from hydraflow.compose.arguments import Arguments
from hydraflow.compose.command import DEFAULT, Command, Counts
from hydraflow.compose.effects import idle_keys
from hydraflow.compose.engine_arguments import check_names
from hydraflow.compose.environment import unread_environment
from hydraflow.compose.hydra_errors import translated
from hydraflow.compose.keys import fitted, known_keys
from hydraflow.compose.overrides import Prepared, config_folder, groups_in, prepare
from hydraflow.compose.tree import Doubts, Judged, judge, nested, over
from hydraflow.compose.verl_values import ROLLOUT
from hydraflow.device import planned_devices
from hydraflow.errors import ConfigError, HydraflowError, Problem
from hydraflow.schema import EvalConfig, GenerateConfig, PPOConfig, SFTConfig
from hydraflow.system.allocation import allocation

Config = TypeVar("Config")
ShowError = Callable[[HydraflowError], None]

Judge = Callable[[Any, Command], Iterable[Problem]]
"""What an entry point itself has to say against a configuration, for the same report."""
VERSION_BASE = "1.3"


class Advise(Protocol):
    """What is said of a configuration without refusing it."""

    def __call__(self, config: object, *, planning: bool) -> Iterable[str]: ...


@dataclass(frozen=True)
class Entry(Generic[Config]):
    """Who asks for a configuration."""

    config_name: str
    """A file of the config folder without its ending."""
    schema: type[Config]
    judges: Sequence[Judge] = ()
    missing: Judge | None = None
    """Names files that are not there. It speaks only beside other mistakes: alone, they are left to the job,
    which finds them with everything else that is wrong with this machine, and reports all at once."""
    tolerant: bool = False
    """Nothing will run: what could not be honoured is told, not refused."""
    switches: Mapping[str, str | bool] = field(default_factory=dict)
    """The entry point's own options that were given."""
    words: tuple[str, ...] = ()
    """The command line of the process, without its secrets."""
    advise: Advise | None = None
    """Notes on values that are legal and hardly meant (`advice.py`)."""
    show_error: ShowError | None = None
    """Prints an error for the user; None: it goes to standard error."""


@dataclass(frozen=True)
class Composed(Generic[Config]):
    """A composition that nothing is wrong with."""

    config: Config
    command: Command
    tree: dict[str, Any]
    """The same with interpolations as they were written, for `--cfg job`."""


def load(config_name: str, schema: type[Config], overrides: Sequence[str] = ()) -> Config:
    """The configuration that a command line of these overrides gives, for tests and tools. Raises
    ConfigError.

    >>> from hydraflow.schema import PPOConfig
    >>> load("ppo", PPOConfig, ["data.train_batch_size=96"]).data.train_batch_size
    96
    """
    return load_command(config_name, schema, overrides)[0]


def load_command(
    config_name: str,
    schema: type[Config],
    overrides: Sequence[str] = (),
    *,
    judges: Sequence[Judge] = (),
    missing: Judge | None = None,
    tolerant: bool = False,
) -> tuple[Config, Command]:
    """The same, and what there is to say about it."""
    entry = Entry(config_name, schema, judges, missing, tolerant)
    prepared = prepare(config_name, schema, Arguments(overrides=list(overrides)))
    register(entry)
    with hydra.initialize_config_dir(str(config_folder(config_name)), version_base=VERSION_BASE):
        try:
            composed = hydra.compose(config_name, prepared.words)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError([*prepared.problems, *translated(error).problems]) from error
        found = finish(entry, composed, prepared, config_name, prepared.words)
    return found.config, found.command


def register(entry: Entry[Any], folders: Sequence[Path] = ()) -> None:
    """Makes the schema's defaults known as `schema_<config_name>`, which the YAML files start from.

    `folders` have files of the user's, which may name verl's.
    """
    ConfigStore.instance().store(f"schema_{entry.config_name}", asdict(entry.schema()))
    verl_trees.register(folders if entry.schema is PPOConfig else ())


def finish(
    entry: Entry[Config],
    composed: DictConfig,
    prepared: Prepared,
    config_name: str,
    words: Sequence[str],
    *,
    only_keys: bool = False,
) -> Composed[Config]:
    """The configuration, once everything about it has been found right; raises ConfigError with everything
    that is not.

    `config_name` and `words` are the file and the overrides that this composition is of. `only_keys`: values
    are not judged, since the configuration is only to be shown.
    """
    origins = _find_origins(entry, config_name, words, prepared)
    content = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(content, dict)
    tree = {str(name): value for name, value in content.items()}
    if config_name != entry.config_name:
        tree = over(asdict(cast(Any, entry.schema())), tree)
        composed = OmegaConf.create(tree)
    judged = judge(entry.schema, tree, origins, lambda key: _resolved(composed, key))
    allocated.take(entry.schema, judged.leaves, judged.origins, allocation())
    judged.doubts.keys |= prepared.doubts.keys
    judged.doubts.everything |= prepared.doubts.everything
    unsupported = judged.translation.unsupported
    if not entry.tolerant:  # what takes the place of a refused value is not the user's
        judged.doubts.keys |= {one.field for one in unsupported if one.field == f"{ROLLOUT}.name"}
    problems = prepared.problems + [
        one for one in judged.problems if not (entry.tolerant and one in unsupported)
    ]
    config = _build(entry.schema, judged.leaves)
    command, idle = _describe(entry, config, judged, from_environment(entry.schema, composed, tree, origins))
    if not only_keys:
        problems += _value_problems(entry, config, command, judged, idle, refused=bool(problems))
    if problems:
        raise ConfigError(problems)
    written = {key: judged.written.get(key, value) for key, value in judged.leaves.items()}
    return Composed(config, command, nested(written))


def _find_origins(
    entry: Entry[Any], config_name: str, words: Sequence[str], prepared: Prepared
) -> dict[str, str]:
    loader, ours = GlobalHydra.instance().config_loader(), config_folder(entry.config_name)
    sources = [Path(source.path) for source in loader.get_sources() if source.scheme() == "file"]
    folders = [*sources, *prepared.folders, ours]
    words = [*words, *(word for word in prepared.words if word.startswith("hydra.searchpath="))]
    groups = groups_in([ours, *folders], entry.schema)
    return provenance.find(entry.schema, loader, config_name, words, groups, folders, ours)


def from_environment(
    schema: type, composed: DictConfig, tree: Mapping[str, Any], origins: Mapping[str, str]
) -> dict[str, Any]:
    """The leaves that get values from the environment, also by way of other keys, as in `Command.written`.

    They are found by resolving once more with names in place of what the environment holds.
    """
    if "oc.env" not in str(tree):
        return {}
    with unread_environment() as named:
        leaves = judge(schema, tree, origins, lambda key: _resolved(composed, key)).leaves
    found = {key: named.put_back(value) for key, value in leaves.items()}
    return {key: value for key, value in found.items() if value != leaves[key]}


def _resolved(composed: DictConfig, key: str) -> Any:
    """A value with its interpolations replaced. Raises ConfigError where they lead nowhere."""
    try:
        value = OmegaConf.select(composed, key, throw_on_missing=True)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        problem = translated(error).problems[0]
        raise ConfigError([replace(problem, field=key)]) from error


def _build(schema: type[Config], leaves: Mapping[str, Any]) -> Config:
    """The dataclass instance with these leaves, which fit their types, and defaults elsewhere."""
    owner: type = schema
    config, keys = schema(), known_keys(owner)
    for key, value in leaves.items():
        *sections, name = key.split(".")
        setattr(reduce(getattr, sections, config), name, fitted(keys[key].hint, value))
    return config


def _describe(
    entry: Entry[Any], config: Any, judged: Judged, written: Mapping[str, Any]
) -> tuple[Command, list[Problem]]:
    """What there is to say about a configuration, and its keys without effect. `written`: see `Command`."""
    schema: type = entry.schema
    given = [(key, written.get(key, judged.leaves[key])) for key in _keys_of_the_user(schema, judged)]
    idle = [*judged.translation.ignored, *idle_keys(config, given, planning=entry.tolerant)]
    unsupported = judged.translation.unsupported
    notes = [
        *judged.translation.notes,
        *(str(one).partition("\n")[0] for one in idle),
        *_open_mappings(judged)[1],
        *_default_devices(config, judged),
        *_default_estimator(config, judged),
        *(entry.advise(config, planning=entry.tolerant) if entry.advise else ()),
    ]
    if entry.tolerant:
        notes += [str(one).partition("\n")[0] for one in unsupported]
    without_effect = len(idle)
    counts = Counts(
        len(given) - (without_effect - len(judged.translation.ignored)), without_effect, len(unsupported)
    )
    origins = {
        key.path: DEFAULT for key in known_keys(schema).values() if not key.is_section
    } | judged.origins
    told = tuple(unsupported) if entry.tolerant else ()
    said = tuple(dict.fromkeys(notes))
    return Command(entry.config_name, origins, said, counts, told, entry.switches, entry.words, written), idle


def _default_devices(config: Any, judged: Judged) -> Iterator[str]:
    """What takes the place of verl's 8 GPUs, where a command line of verl's does not say how many."""
    key, said = "trainer.n_gpus_per_node", judged.translation
    if not isinstance(config, PPOConfig) or key in judged.origins or config.cluster.devices_per_node:
        return
    if said.honoured or said.ignored or said.unsupported or said.untouched:
        count = planned_devices(config.trainer.device)
        yield f"{key}: not set; verl takes 8, here it is what this machine has ({count})"


def _default_estimator(config: Any, judged: Judged) -> Iterator[str]:
    """A critic by default: the recipe's estimator needs none, that of one's own data does."""
    key = "algorithm.adv_estimator"
    is_meant = any(given == key or given.startswith("critic.") for given in judged.origins)
    if isinstance(config, PPOConfig) and not is_meant and needs_critic(config):
        name = config.algorithm.adv_estimator
        yield f"{key}: not set, so {name} as in verl, which trains a critic; {key}=grpo needs none"


def _open_mappings(judged: Judged) -> tuple[list[Problem], list[str]]:
    """What the libraries say to the names in open mappings; a mapping that follows another is not looked at
    twice."""
    return check_names(
        {
            key: value
            for key, value in judged.leaves.items()
            if not judged.origins.get(key, "").startswith("follows ")
        }
    )


def _keys_of_the_user(schema: type, judged: Judged) -> list[str]:
    """Keys that the command line sets, and those that a user's file sets to something else than the
    default."""
    keys = known_keys(schema)
    return [
        key
        for key, origin in judged.origins.items()
        if key in judged.leaves
        and provenance.is_users(origin)
        and (origin == provenance.COMMAND_LINE or judged.leaves[key] != keys[key].default)
    ]


def _refuses_idle_keys(config: PPOConfig | SFTConfig | GenerateConfig | EvalConfig) -> bool:
    return config.strict


def _value_problems(
    entry: Entry[Any], config: Any, command: Command, judged: Judged, idle: list[Problem], *, refused: bool
) -> list[Problem]:
    """What is wrong with the values, as far as it can be said: problems that a doubtful value may cause are
    left out.

    `refused`: something else is wrong already.
    """
    problems = checks.problems(config, planning=entry.tolerant)
    problems += _open_mappings(judged)[0]
    problems += idle if _refuses_idle_keys(config) else []
    problems += [] if entry.tolerant else allocated.contradictions(config, allocation())
    problems = [problem for problem in problems if not judged.doubts.touch(problem)]
    doubts = Doubts(judged.doubts.keys | {problem.field for problem in problems}, judged.doubts.everything)
    if doubts.hide_the_plan:
        return problems
    judgement = [problem for one in entry.judges for problem in one(config, command)]
    problems += [problem for problem in judgement if not doubts.touch(problem)]
    if entry.missing is None or not (problems or refused):
        return problems
    return problems + [problem for problem in entry.missing(config, command) if not doubts.touch(problem)]
