"""verl's keys with their defaults, and how those without the same name here are handled: renamed, accepted
without effect, or not supported yet.

In: `verl_data/`: `keys_*.yaml`, one for each of our configurations, `values.yaml`, and `defaults_*.yaml` from
verl's public files; and the other names that our fields declare (`option(verl=...)`). Out: tables from keys
or patterns to rows, and `defaults()`. In a pattern `{a,b}` matches either, `*` one name, `**` any names. Rows
for keys that `defaults` does not have are for other versions. Our keys need no row. Left out on purpose: how
rows are applied (`verl.py`), the defaults of main_generation and main_eval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydraflow.compose import yaml_values
from hydraflow.compose.patterns import expand
from hydraflow.options import walk
from hydraflow.schema import PPOConfig, SFTConfig

VERSION = "0.9.1"
"""The version of verl that the tables describe."""


@dataclass(frozen=True)
class Alias:
    """Another name for one of our keys."""

    new: str
    """The hydraflow key that gets the value."""
    why: str = ""
    """A remark for the user; empty: none."""
    over_all_ranks: bool = False
    """Whether the value counts rows over all data ranks, where ours counts those of one rank."""


@dataclass(frozen=True)
class Ignored:
    """A key that is accepted and has no effect."""

    why: str
    in_verl_too: bool
    """Whether verl itself ignores it."""


@dataclass(frozen=True)
class Unsupported:
    """A key that is rejected, unless its value is verl's default or another that switches it off."""

    would: str
    """What it does in verl, as in "it would ..."."""
    harmless: Sequence[object] = ()
    """Values besides verl's default that have no effect."""
    instead: str = ""
    """Our overrides that do something similar."""
    decided_by: str = ""
    """Our key for the same thing: the value is harmless if our key has the same one."""


@dataclass(frozen=True)
class KeyTables:
    """Rows for the keys of one of verl's commands that have no counterpart here, by pattern."""

    command: str
    """Name of the command in verl; empty: verl has no such command."""
    sections: dict[str, str]
    """verl's section -> the section where its keys are now."""
    rows: dict[str, Ignored | Unsupported]
    """In the order in which they are looked up."""
    other_defaults: dict[str, object]
    """Defaults in other versions of verl."""
    like: dict[str, str]
    """Section here -> the section of main_ppo whose rows apply to it, too."""
    unbuilt: dict[str, dict[str, str]]
    """Key -> an estimator or loss that does not exist here -> the one it is a variant of."""


MEGATRON_FOLLOWS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "moe_router_dtype",
    "moe_permute_fusion",
    "param_offload",
    "override_transformer_config",
)
ULYSSES = "fsdp_config.ulysses_sequence_parallel_size"
FOLLOWS: dict[str, str] = {
    **{
        f"actor_rollout_ref.ref.megatron.{name}": f"actor_rollout_ref.actor.megatron.{name}"
        for name in MEGATRON_FOLLOWS
    },
    f"actor_rollout_ref.ref.{ULYSSES}": f"actor_rollout_ref.actor.{ULYSSES}",
    **{
        f"{role}.checkpoint.load_contents": f"{role}.checkpoint.save_contents"
        for role in ("actor_rollout_ref.actor", "critic")
    },
    "checkpoint.load_contents": "checkpoint.save_contents",
    "critic.loss_agg_mode": "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.rollout.n_gpus_per_node": "trainer.n_gpus_per_node",
}
"""Our keys that, if unset, take the value of another, as in verl."""

_FILES = Path(__file__).with_name("verl_data")
_DEFAULTS: dict[type, tuple[str, ...]] = {
    PPOConfig: ("defaults_ppo", "defaults_ppo_megatron"),
    SFTConfig: ("defaults_sft",),
}


@cache
def aliases(schema: type) -> dict[str, Alias]:
    """verl's keys that have another name in a schema: those that our fields declare, and those that are in
    another section here.

    >>> aliases(PPOConfig)["critic.ppo_micro_batch_size"]
    Alias(new='critic.ppo_micro_batch_size_per_gpu', why='', over_all_ranks=True)
    """
    found: dict[str, Alias] = {}
    for leaf in walk(schema()):
        section = leaf.key.rpartition(".")[0]
        found |= {f"{section}.{old}": _alias(f"{section}.{old}", leaf.key) for old in leaf.option.verl}
    for row in _rows(schema).get("moved", ()):
        olds, news = expand(row["from"]), expand(row["to"])
        news *= len(olds) // len(news)
        found |= {old: _alias(old, new, row.get("why", "")) for old, new in zip(olds, news, strict=True)}
    return found


def _alias(old: str, new: str, why: str = "") -> Alias:
    """A row; micro-batch sizes without `_per_gpu` count rows over all ranks."""
    over_all_ranks = old.endswith("micro_batch_size") and new.endswith("micro_batch_size_per_gpu")
    return Alias(new, why, over_all_ranks)


@dataclass(frozen=True)
class ValueTables:
    """verl's values that have another name here, or that do not exist here."""

    renamed: dict[str, dict[str, str]]
    """Pattern of keys -> verl's value -> ours."""
    suggested: dict[str, dict[str, str]]
    """Key -> a value that neither verl nor we have -> what is probably meant."""
    rollout_engines: list[str]
    """verl's rollout engines that do not exist here."""
    training_engines: list[str]
    """verl's training engines that do not exist here."""
    trackers: list[str]
    """verl's trackers that do not exist here."""


@cache
def value_tables() -> ValueTables:
    """The tables of `verl_data/values.yaml`."""
    return ValueTables(**read("values"))


@cache
def tables(schema: type) -> KeyTables:
    """The tables of a configuration's `verl_data/keys_*.yaml`.

    >>> tables(PPOConfig).rows["trainer.esi_redundant_time"]
    Ignored(why="verl's trainer never reads it", in_verl_too=True)
    """
    content = _rows(schema)
    names, others = content.get("names", {}), content.get("other_defaults", {}).items()
    kinds: dict[str, Callable[..., Ignored | Unsupported]] = {
        "ignored": partial(Ignored, in_verl_too=True),
        "not_needed": partial(Ignored, in_verl_too=False),
        "unsupported": Unsupported,
    }
    rows: dict[str, Ignored | Unsupported] = {}
    for name, kind in kinds.items():
        for given in content.get(name, ()):
            row = kind(**{field: value for field, value in given.items() if field != "keys"})
            patterns = [_pattern(pattern, names) for pattern in given["keys"]]
            assert rows.keys().isdisjoint(patterns), f"a pattern of {patterns} is in two rows"
            rows |= dict.fromkeys(patterns, row)
    return KeyTables(
        command=content["command"],
        sections=content.get("sections", {}),
        rows=rows,
        other_defaults={_pattern(pattern, names): default for pattern, default in others},
        like=content.get("like", {}),
        unbuilt=content.get("unbuilt", {}),
    )


@cache
def accepted(schema: type) -> list[str]:
    """The accepted keys without a counterpart, except those of patterns that contain `*`."""
    ignored = [pattern for pattern, row in tables(schema).rows.items() if isinstance(row, Ignored)]
    forms = [form for pattern in ignored for form in expand(pattern)]
    return [form for form in forms if "*" not in form]


def _rows(schema: type) -> dict[str, Any]:
    """The content of a configuration's `keys_*.yaml`; a command that verl does not have needs no file."""
    name = schema.__name__.removesuffix("Config").lower()
    has_rows = (_FILES / f"keys_{name}.yaml").is_file()
    return read(f"keys_{name}") if has_rows else {"command": ""}


@cache
def read(file: str) -> Any:
    """The content of a file in `verl_data`; `file`: its name without the suffix."""
    return yaml_values.load((_FILES / f"{file}.yaml").read_text(encoding="utf-8"))


def _pattern(text: str, names: dict[str, str]) -> str:
    """A pattern with its `<name>`s replaced and the spaces of line breaks removed."""
    whole = re.sub(r"<(\w+)>", lambda name: names[name[1]], text)
    return re.sub(r"\s", "", whole)


@cache
def defaults(schema: type, *, megatron: bool = True) -> dict[str, Any]:
    """Key -> default of verl's command, `...` if it follows another key; `megatron` adds the keys of
    `model_engine=megatron`.

    >>> ppo = defaults(PPOConfig)
    >>> ppo["trainer.total_epochs"], ppo["actor_rollout_ref.ref.strategy"]
    (30, Ellipsis)
    """
    files = _DEFAULTS.get(schema, ())
    return {key: value for file in (files if megatron else files[:1]) for key, value in _defaults_in(file)}


def _defaults_in(file: str) -> Iterator[tuple[str, Any]]:
    for paragraph in read(file):
        found = paragraph["defaults"]
        if "like" in paragraph:
            whole, like = defaults(PPOConfig, megatron=False), f"{paragraph['like']}."
            shared = {key.removeprefix(like): whole[key] for key in whole if key.startswith(like)}
            found = shared | found
        for name, default in found.items():
            value = ... if default == "..." else default
            yield from ((f"{section}.{name}", value) for section in paragraph["sections"])
