"""Replacements for verl's configuration files that a command line or a defaults list names.

In: `verl_data/trees.yaml`, options and groups as the user wrote them. Out: configurations for Hydra's store
that replace verl's files, or overrides of ours. A file of the user takes precedence over its replacement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from hydraflow.compose.verl_table import read

_SECTIONS = {"actor": "actor_rollout_ref.actor", "ref": "actor_rollout_ref.ref", "critic": "critic"}


_registered: set[str] = set()
"""Groups and files at the top of Hydra's store that replace verl's."""


def is_primary(name: str) -> bool:
    """Whether the name is that of one of verl's primary configurations.

    >>> is_primary("ppo_trainer.yaml"), is_primary("mine")
    (True, False)
    """
    return name.removesuffix(".yaml") in read("trees")["primary"]


def primary_names() -> list[str]:
    """Names of verl's primary configurations, such as ppo_trainer."""
    return list(read("trees")["primary"])


def register(folders: Sequence[Path]) -> None:
    """Adds a replacement for each of verl's files that is not in `folders` to Hydra's store, and removes
    those of an earlier command of this process. No folders: no replacements.

    Hydra would use one beside a file of the same name as that file's schema.
    """
    store = ConfigStore.instance()
    for group in _registered:
        store.repo.pop(group, None)
    _registered.clear()
    if not folders:
        return
    trees = read("trees")
    plain = ["schema_ppo", {"recipe": "none"}, *trees["defaults"], "_self_"]
    megatron = ["ppo_trainer", {"override model_engine": "megatron"}, "_self_"]
    primary = {"ppo_trainer": {"defaults": plain}, "ppo_megatron_trainer": {"defaults": megatron}}
    for path, content in {**trees["files"], **primary}.items():
        group, _, name = path.rpartition("/")
        if any((folder / f"{path}.yaml").is_file() for folder in folders):
            continue
        package = "_global_" if group in ("", "model_engine") else None
        store.store(name, dict(content), group=group or None, package=package)
        _registered.add(group.partition("/")[0] if group else f"{name}.yaml")


def keys_of(path: str, package: str) -> list[str]:
    """The keys that one of verl's files sets in a package, if its replacement was used.

    >>> keys_of("critic/megatron_critic", "critic"), keys_of("mine", "")
    (['critic.strategy'], [])
    """
    prefix = f"{package}." if package else ""
    return [prefix + name for name in read("trees")["files"].get(path, {})]


def config_file(name: str) -> list[str]:
    """The overrides that replace one of verl's primary configurations.

    >>> config_file("ppo_megatron_trainer.yaml")
    ['++model_engine=megatron']
    """
    engine = read("trees")["primary"][name.removesuffix(".yaml")]
    return [] if engine == "dp" else [f"++model_engine={engine}"]


def group_override(group: str, package: str | None, value: Any) -> list[str] | None:
    """The overrides that replace verl's `actor@actor_rollout_ref.actor=megatron_actor` and the like; None: it
    is none of these.

    >>> group_override("critic", "critic", "megatron_critic")
    ['++critic.strategy=megatron']
    """
    match = re.fullmatch(r"(dp|megatron)_(actor|ref|critic)", str(value))
    if package is None or match is None or match[2] != group or package != _SECTIONS[group]:
        return None
    return [f"++{package}.strategy=megatron"] if match[1] == "megatron" else []


def engine_override(engine: Any) -> list[str] | None:
    """The overrides that replace `model_engine=...`, which Hydra reads as a choice of verl's files if the
    user's file names them; None: there is no such engine.

    >>> engine_override("megatron")
    ['++actor_rollout_ref.actor.strategy=megatron', '++critic.strategy=megatron']
    """
    if engine not in read("trees")["primary"].values():
        return None
    return [f"++{_SECTIONS[role]}.strategy={engine}" for role in ("actor", "critic") if engine != "dp"]
