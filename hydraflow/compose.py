"""From a command line to a configuration: the only place, with the entry points, that knows Hydra and OmegaConf.

In: overrides, YAML files, a schema. Out: an instance of the schema's dataclass; or every mistake at once and exit code 2.

The base of a composition is the schema's defaults as plain values, so that unknown keys and wrong types of all files and
overrides are found by us, together, instead of by Hydra, one at a time. `key=v`, `+key=v` and `++key=v` mean the same.
Left out on purpose: what values may be (`checks.py`) and batch sizes (`batch_plan.py`).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraflow import checks
from hydraflow.compose_arguments import Arguments, split
from hydraflow.compose_keys import describe, item_problems, tree_problems
from hydraflow.errors import ConfigError, HydraflowError, Problem

Config = TypeVar("Config")

INTERRUPTED = 130
"""Exit code after Ctrl-C, which also ends a sweep."""
_VERSION_BASE = "1.3"
_DEFAULT_RECIPE = "recipe=arithmetic"
_OWN_MODEL_OR_DATA = {"recipe", "actor_rollout_ref.model.path", "data.train_files", "data.val_files"}
"""Whoever gives one of these keys does not get the default recipe."""
_QUIET = {
    "hydra/job_logging": "none",
    "hydra/hydra_logging": "none",
    "hydra.run.dir": ".",
    "hydra.output_subdir": "null",
    "hydra.sweep.subdir": ".",
}
"""Hydra writes no logs, folders or copies of the configuration; a sweep writes one multirun.yaml."""


def launch(config_name: str, schema: type[Config], run: Callable[[Config], int | None]) -> int:
    """Runs `run` with the configuration that the command line asks for, or with each one of a sweep; returns the exit code.

    `config_name` is a file of the config folder without its ending. Use: `sys.exit(launch("ppo", PPOConfig, run))`.
    """
    arguments = split(sys.argv[1:])
    if arguments.has("--help", "-h"):
        print(help_text(config_name, schema))
        return 0
    codes: list[int] = []

    def job(composed: DictConfig) -> int:
        codes.append(run_guarded(lambda: run(_to_config(composed, schema))))
        if codes[-1] == INTERRUPTED:
            sys.exit(INTERRUPTED)
        return codes[-1]

    code = run_guarded(lambda: _hydra_main(config_name, schema, arguments, job))
    return code or next((code for code in codes if code), 0)


def load(config_name: str, schema: type[Config], overrides: Sequence[str] = ()) -> Config:
    """The configuration that a command line of these overrides gives, for tests and tools. Raises ConfigError.

    >>> from hydraflow.schema import PPOConfig
    >>> load("ppo", PPOConfig, ["data.train_batch_size=96"]).data.train_batch_size
    96
    """
    prepared = _prepare(config_name, schema, Arguments(overrides=list(overrides)))
    with hydra.initialize_config_dir(str(config_folder(config_name)), version_base=_VERSION_BASE):
        try:
            composed = hydra.compose(config_name, prepared)
        except (HydraException, OmegaConfBaseException) as error:
            raise _translated(error) from error
    return _to_config(composed, schema)


def run_guarded(work: Callable[[], int | None]) -> int:
    """Runs `work` and returns its exit code. Errors for the user become a message on stderr and their exit code.

    With HYDRAFLOW_FULL_ERROR=1 in the environment the stack trace comes first. Faults of our own propagate.
    """
    try:
        return work() or 0
    except HydraflowError as error:
        if os.environ.get("HYDRAFLOW_FULL_ERROR") == "1":
            traceback.print_exc()
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def given_keys(argv: Sequence[str] | None = None) -> set[str]:
    """The configuration keys that a command line sets (that of this process by default), for the provenance of numbers."""
    parser = OverridesParser.create()
    words = split(sys.argv[1:] if argv is None else argv).overrides
    overrides = [parser.parse_override(word) for word in words]
    return {override.key_or_group for override in overrides if not _is_hydras(override)}


def config_folder(config_name: str) -> Path:
    """The folder with our YAML files: in the package when installed, else beside it in a clone. Raises ConfigError."""
    package = Path(__file__).resolve().parent
    candidates = [package / "config", package.parent / "config"]
    for folder in candidates:
        if (folder / f"{config_name}.yaml").is_file():
            return folder
    raise ConfigError.one(f"{config_name}.yaml", None, f"is neither in {candidates[0]} nor in {candidates[1]}", "install hydraflow again")


def help_text(config_name: str, schema: type) -> str:
    """What `--help` prints: how to call, the groups and their choices, every key with its default and meaning."""
    groups = [f"  {group}={'|'.join(choices)}" for group, choices in _groups([config_folder(config_name)], schema).items()]
    parts = [
        f"{schema.__doc__} [options] [key=value ...]",
        "Settings: key=value, one for each key below; lists as key=[a,b]; +key=value and ++key=value mean the same.",
        "Options:  --cfg job prints the configuration; --multirun runs key=a,b once for each value; --config-dir DIR and",
        "          --config-name NAME take your own YAML file (start it with `defaults: [" + config_name + ", _self_]`);",
        "          --info shows where values come from; --hydra-help lists the rest.",
        *(["\nGroups:", *groups] if groups else []),
        "\nKeys:",
    ]
    return "\n".join(parts) + describe(schema)


# --- before Hydra: the command line ----------------------------------------------------------------------------------


def _prepare(config_name: str, schema: type, arguments: Arguments) -> list[str]:
    """Checked overrides in the form that Hydra takes for every key, and our own; raises ConfigError with all problems."""
    folders = [config_folder(config_name), *(Path(path) for path in [arguments.value("--config-dir", "-cd")] if path)]
    groups = _groups(folders, schema)
    parsed, problems = _parse(arguments.overrides)
    for override in parsed:
        problems += _override_problems(override, schema, groups, multirun=arguments.multirun)
    if problems := arguments.problems + problems:
        raise ConfigError(problems)
    keys = {override.key_or_group for override in parsed}
    words = [_normalised(override, groups) for override in parsed]
    if "recipe" in groups and not arguments.own_files and not keys & _OWN_MODEL_OR_DATA:
        words.append(_DEFAULT_RECIPE)
    _register(config_name, schema)
    return words


def _parse(words: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    parser, parsed, problems = OverridesParser.create(), [], []
    for word in words:
        try:
            parsed.append(parser.parse_override(word))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            rule = "is not key=value" if "=" not in word else f"cannot be read: {reason}"
            remedy = "" if "=" not in word else "quote special characters: 'key=\"a value, with signs\"'"
            problems.append(Problem(word, None, rule, remedy))
    return parsed, problems


def _override_problems(override: Override, schema: type, groups: dict[str, list[str]], *, multirun: bool) -> list[Problem]:
    key = override.key_or_group
    if _is_hydras(override):
        return []
    if override.is_sweep_override() and not multirun:
        values = (override.input_line or "").partition("=")[2]
        return [Problem(key, values, "several values need --multirun", f"{key}=[{values}] for one list, or --multirun for several runs")]
    if key in groups:
        return _choice_problems(override, groups[key])
    return [problem for value in _values(override) for problem in item_problems(schema, key, value)]


def _choice_problems(override: Override, choices: list[str]) -> list[Problem]:
    key = override.key_or_group
    unknown = [value for value in _values(override) if value not in choices]
    return [Problem(key, value, f"there is no such choice; there are {', '.join(choices)}", _options(key, choices)) for value in unknown]


def _options(key: str, choices: list[str]) -> str:
    return " or ".join(f"{key}={choice}" for choice in choices)


def _values(override: Override) -> list[Any]:
    """The values that an override sets: one, or those of a sweep; ranges and globs are left to Hydra."""
    if not override.is_sweep_override():
        return [_plain(override.value())]
    sweep = override.value()
    return [_plain(value) for value in sweep.list] if isinstance(sweep, ChoiceSweep) else []


def _plain(value: Any) -> Any:
    """A parsed value without the parser's own classes."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(name)): _plain(item) for name, item in value.items()}
    return value


def _is_hydras(override: Override) -> bool:
    """Deletions, packages and Hydra's own settings, which Hydra judges itself."""
    key = override.key_or_group
    return override.is_delete() or override.package is not None or key.startswith(("hydra.", "hydra/"))


def _normalised(override: Override, groups: dict[str, list[str]]) -> str:
    word = override.input_line
    assert word is not None
    if _is_hydras(override):
        return word
    bare = word.lstrip("+")
    if override.key_or_group not in groups:
        return f"++{bare}"
    return bare if override.key_or_group == "recipe" else word


def _groups(folders: Sequence[Path], schema: type) -> dict[str, list[str]]:
    """Folders of YAML files and the choices in each; a folder of ours counts where the schema has such a section."""
    groups: dict[str, list[str]] = {}
    for number, folder in enumerate(folders):
        for file in sorted(folder.rglob("*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            if group != "." and (number > 0 or group in schema.__annotations__):
                groups.setdefault(group, []).append(file.stem)
    return groups


def _register(config_name: str, schema: type) -> None:
    """Makes the schema's defaults known as `schema_<config_name>`, which the YAML files start from."""
    defaults = OmegaConf.to_container(OmegaConf.structured(schema))
    assert isinstance(defaults, dict)
    ConfigStore.instance().store(f"schema_{config_name}", defaults)


# --- Hydra, and after it ---------------------------------------------------------------------------------------------


def _hydra_main(config_name: str, schema: type, arguments: Arguments, job: Callable[[DictConfig], int]) -> None:
    """Lets Hydra compose and call `job`, or do what its options ask for."""
    words = _prepare(config_name, schema, arguments)
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    quiet = [f"{key}={value}" for key, value in (_QUIET | {"hydra.job.name": config_name}).items() if key not in keys]
    main = hydra.main(version_base=_VERSION_BASE, config_path=str(config_folder(config_name)), config_name=config_name)(job)
    sys.argv[1:] = [*arguments.options, *words, *quiet]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints errors itself and ends the process with code 1
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        raise _translated(error) from error


def _to_config(composed: DictConfig, schema: type[Config]) -> Config:
    """The dataclass instance, once keys, types and values have been found right; raises ConfigError."""
    tree = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(tree, dict)
    if problems := tree_problems(schema, {str(name): value for name, value in tree.items()}):
        raise ConfigError(problems)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), composed))
    except OmegaConfBaseException as error:
        raise _translated(error) from error
    assert isinstance(config, schema)
    if problems := checks.problems(config):
        raise ConfigError(problems)
    return config


def _translated(error: HydraException | OmegaConfBaseException) -> ConfigError:
    """What Hydra or OmegaConf found, as a problem of the user's."""
    key = getattr(error, "full_key", None) or "configuration"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ConfigError.one(key, None, " ".join(line for line in lines if not line.startswith(("full_key:", "object_type="))))
