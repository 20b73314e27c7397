"""Replacements for verl's configuration files, which a command line or a defaults list may name.

In: `verl_data/trees.yaml`, options and groups as the user wrote them. Out: configurations for Hydra's store
that replace verl's files, or overrides of our keys. A user's file takes precedence over its replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from hydraflow.compose.verl_table import read
from hydraflow.schema import PPOConfig

STRATEGIES = ("actor_rollout_ref.actor.strategy", "critic.strategy")
"""Our keys for verl's `model_engine`."""
_registered: set[str] = set()
"""Top-level groups and files in Hydra's store that replace verl's."""


def primary_names(schema: type) -> list[str]:
    """Names of verl's primary configurations, such as ppo_trainer."""
    return list(_trees(schema)["primary"])


def _trees(schema: type) -> dict[str, Any]:
    return read("trees").get(schema.__name__, {"primary": {}, "defaults": [], "files": {}})


def register(schema: type, config_name: str, folders: Sequence[Path]) -> None:
    """Adds a replacement to Hydra's store for each of verl's files that is not in `folders`, and removes
    those of an earlier command of this process. No folders: no replacements.

    Files in `folders` get none, because Hydra would take a stored configuration of the same name as a schema.
    """
    store = ConfigStore.instance()
    for group in _registered:
        store.repo.pop(group, None)
    _registered.clear()
    if not folders:
        return
    trees = _trees(schema)
    recipe = [{"recipe": "none"}] if "recipe" in schema.__annotations__ else []
    plain = {"defaults": [f"schema_{config_name}", *recipe, *trees["defaults"], "_self_"]}
    megatron = {"defaults": ["ppo_trainer", {"override model_engine": "megatron"}, "_self_"]}
    primary = {name: megatron if engine == "megatron" else plain for name, engine in trees["primary"].items()}
    for path, content in {**trees["files"], **primary}.items():
        group, _, name = path.rpartition("/")
        if any((folder / f"{path}.yaml").is_file() for folder in folders):
            continue
        package = "_global_" if group in ("", "model_engine") else None
        store.store(name, dict(content), group=group or None, package=package)
        _registered.add(group.partition("/")[0] if group else f"{name}.yaml")


def keys_of(schema: type, path: str, package: str) -> list[str]:
    """The keys that the replacement of one of verl's files sets in a package.

    >>> keys_of(PPOConfig, "critic/megatron_critic", "critic"), keys_of(PPOConfig, "mine", "")
    (['critic.strategy'], [])
    """
    prefix = f"{package}." if package else ""
    return [prefix + name for name in _trees(schema)["files"].get(path, {})]


def config_file(schema: type, name: str) -> list[str] | None:
    """The overrides that replace one of verl's primary configurations; None: the name is not one of them.

    >>> config_file(PPOConfig, "ppo_megatron_trainer.yaml"), config_file(PPOConfig, "mine")
    (['++model_engine=megatron'], None)
    """
    engines, name = _trees(schema)["primary"], name.removesuffix(".yaml")
    if name not in engines:
        return None
    return ["++model_engine=megatron"] if engines[name] == "megatron" else []


def group_override(schema: type, group: str, package: str | None, value: Any) -> list[str] | None:
    """The overrides that replace verl's `engine=fsdp`, `actor@actor_rollout_ref.actor=megatron_actor` and the
    like; None: it is none of these.

    >>> from hydraflow.schema import SFTConfig
    >>> group_override(PPOConfig, "critic", "critic", "megatron_critic")
    ['++critic.strategy=megatron']
    >>> group_override(SFTConfig, "optim", None, "fsdp")
    []
    """
    trees, package = _trees(schema), package or group
    named = {name for entry in trees["defaults"] if isinstance(entry, dict) for name in entry}
    keys = trees["files"].get(f"{group}/{value}")
    if f"{group}@{package}" not in named or keys is None:
        return None
    return [f"++{package}.{name}={setting}" for name, setting in keys.items()]


def choices(schema: type) -> dict[str, list[str]]:
    """verl's groups whose choices a command line gives as `engine=fsdp`, and their choices.

    >>> from hydraflow.schema import SFTConfig
    >>> choices(SFTConfig)["model"]
    ['hf_model', 'torchtitan_model']
    """
    found: dict[str, list[str]] = {}
    for path in _trees(schema)["files"]:
        group, _, name = path.rpartition("/")
        if group_override(schema, group, None, name) is not None:
            found.setdefault(group, []).append(name)
    return found


def engine_override(engine: Any) -> list[str] | None:
    """The overrides that replace `model_engine=...`; None: there is no such engine. Hydra would read the word
    as a choice of verl's group if the user's file names that group.

    >>> engine_override("megatron")
    ['++actor_rollout_ref.actor.strategy=megatron', '++critic.strategy=megatron']
    """
    if engine not in _trees(PPOConfig)["primary"].values():
        return None
    return [f"++{key}={engine}" for key in STRATEGIES if engine != "dp"]
