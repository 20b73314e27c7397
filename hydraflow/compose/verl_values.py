"""Translates verl's values that have another name here or depend on other keys, with a note on each.

Left out on purpose: names of keys (`verl.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any

from hydraflow.batch_plan.settings import COMMAND_LINE, DEFAULT
from hydraflow.batch_plan.topology import ACTOR, ROLLOUT
from hydraflow.compose.patterns import fits
from hydraflow.compose.verl_table import tables, value_tables
from hydraflow.device import planned_devices
from hydraflow.errors import Problem, shown


def our_value(key: str, value: Any) -> tuple[Any, str | None]:
    """Our form of a verl value, and a note on it.

    >>> our_value("critic.strategy", "fsdp")
    ('fsdp2', 'critic.strategy=fsdp: taken as fsdp2')
    """
    name = key.rpartition(".")[2]
    new, why = value, ""
    names = _other_names(key)
    if names:
        new = names.get(str(value).lower(), value)
    elif name == "save_contents" and value == ["hf_model"]:
        new, why = ["model", "hf_model"], ", since a run resumes from model"
    elif (name, value) in (("lr_warmup_steps", None), ("test_freq", 0), ("save_freq", 0)):
        new = -1
    elif key == "trainer.logger":
        return _loggers(value)
    if new is value or new == value:
        return new, None
    return new, f"{key}={shown(value)}: taken as {shown(new)}{why}"


def _other_names(key: str) -> dict[str, str]:
    """verl's values of a key, in lower case -> ours."""
    return next((names for pattern, names in value_tables().renamed.items() if fits(pattern, key)), {})


def meant_choice(key: str, name: str) -> str | None:
    """Our choice that a name in lower case stands for.

    >>> meant_choice("algorithm.adv_estimator", "ppo"), meant_choice("trainer.device", "gpu")
    ('gae', 'cuda')
    """
    return (_other_names(key) | value_tables().suggested.get(key, {})).get(name)


def _loggers(value: Any) -> tuple[Any, str | None]:
    names = [value] if isinstance(value, str) and not value.startswith("[") else value
    if not isinstance(names, list):
        return value, None
    names = ["wandb" if name == "tracking" else name for name in names]
    absent = [name for name in names if name in value_tables().trackers]
    kept = [name for name in names if name not in absent]
    if not absent:
        return kept, None
    kept += [name for name in ("file", "tensorboard") if name not in kept]
    return kept, f"trainer.logger: no {' and no '.join(absent)} here yet; metrics go to {', '.join(kept)}"


def adjust_dependent(
    leaves: dict[str, Any], origins: dict[str, str], foreign: Collection[str]
) -> Iterator[str]:
    """Changes values whose meaning in verl depends on other keys, foreign ones included; yields a note on
    each."""
    yield from _divided_by_vllm(leaves, origins, foreign)
    yield from _counted_by_rows(leaves, origins, foreign)
    yield from _bypassed(leaves, origins)
    tool = leaves.get("global_profiler.tool")
    if tool is not None and not leaves.get("global_profiler.steps"):
        leaves["global_profiler.tool"] = None
        yield (
            f"global_profiler.tool={shown(tool)}: profiles nothing without global_profiler.steps, such as"
            " global_profiler.steps=[2]"
        )
    for loaded, origin in origins.items():
        # hf_model is for other programs; a run does not load it
        if loaded.endswith("checkpoint.load_contents") and origin.startswith("follows "):
            leaves[loaded] = [part for part in leaves[loaded] if part != "hf_model"]


def _divided_by_vllm(
    leaves: dict[str, Any], origins: dict[str, str], foreign: Collection[str]
) -> Iterator[str]:
    """A verl command line or file that shards a replica but names no engine (`name: ???`) means vLLM, the
    default in earlier versions; our native engine holds whole models."""
    name = f"{ROLLOUT}.name"
    unnamed = name not in origins or name not in leaves
    for size in (f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.pipeline_model_parallel_size"):
        if foreign and unnamed and isinstance(leaves.get(size), int) and leaves[size] > 1:
            leaves[name], origins[name], unnamed = "vllm", f"follows {size}", False
            yield f"{name}: not set, and {size}={leaves[size]}; taken as vllm, as in earlier versions of verl"


def shard_over_all(leaves: dict[str, Any]) -> Iterator[str]:
    """A shard size above the number of devices means full sharding; yields a note. The devices are those of
    the configuration or the allocation, whichever has more, else this machine's."""
    per_node = max(leaves.get(key) or 0 for key in ("trainer.n_gpus_per_node", "cluster.devices_per_node"))
    nodes = max(leaves.get(key) or 1 for key in ("trainer.nnodes", "cluster.nodes"))
    devices = nodes * (per_node or planned_devices(leaves.get("trainer.device", "auto")))
    for key, size in leaves.items():
        if key.endswith("fsdp_config.fsdp_size") and isinstance(size, int) and size > devices:
            leaves[key] = -1
            yield f"{key}={size}: more than the {devices} devices, so the model is sharded over all of them"


def _counted_by_rows(
    leaves: dict[str, Any], origins: dict[str, str], foreign: Container[str]
) -> Iterator[str]:
    """verl's fsdp_sft_trainer fills micro-batches by rows only; its successor has use_dynamic_bsz."""
    rows, by_tokens = "data.micro_batch_size_per_gpu", "data.use_dynamic_bsz"
    if "model.partial_pretrain" in foreign and rows in origins and by_tokens not in origins:
        leaves[by_tokens], origins[by_tokens] = False, f"follows {rows}"
        yield f"{by_tokens}: taken as false: fsdp_sft_trainer takes {rows}={leaves[rows]} rows at a time"


def _bypassed(leaves: dict[str, Any], origins: dict[str, str]) -> Iterator[str]:
    """verl's loss `bypass_mode` is PPO's, or with loss_type=reinforce the policy gradient, with the
    generation engine's probabilities as the old ones."""
    loss, bypass = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction.bypass_mode"
    if leaves.get(loss) == "bypass_mode" and (leaves.get(bypass) or origins.get(bypass, DEFAULT) == DEFAULT):
        leaves[loss], leaves[bypass] = "vanilla", True
        origins[bypass] = origins.get(bypass, f"follows {loss}")
        yield f"{loss}=bypass_mode: taken as vanilla with {bypass}=true"


def unbuilt_algorithms(schema: type, leaves: dict[str, Any]) -> Iterator[Problem]:
    """Problems of verl's estimators and losses that do not exist here. Replaces them in `leaves`."""
    for key, names in tables(schema).unbuilt.items():
        if leaves.get(key) in names:
            yield Problem(key, leaves[key], "is verl's and not implemented here yet", f"leave out {key}")
            leaves[key] = names[leaves[key]]


def unbuilt_engines(
    leaves: dict[str, Any], origins: Mapping[str, str], foreign: dict[str, Any]
) -> Iterator[Problem]:
    """Problems of verl's engines that do not exist here; one remedy covers every key that names them.
    Replaces them by our nearest engine in `leaves`, and removes the keys from `foreign`."""
    name = f"{ROLLOUT}.name"
    if leaves.get(name) in value_tables().rollout_engines and origins.get(name, DEFAULT) != DEFAULT:
        yield Problem(name, leaves[name], "there is no such engine here yet", f"{name}=vllm")
        leaves[name] = "vllm"
    for roles in ((f"{ACTOR}.", "actor_rollout_ref.ref."), ("critic.",)):
        found = {
            key: value
            for key, value in {**leaves, **foreign}.items()
            if key.endswith(".strategy")
            and key.startswith(roles)
            and value in value_tables().training_engines
        }
        if not found:
            continue
        first, value = next(iter(found.items()))
        remedy = " ".join(f"{key}=fsdp2" for key in found)
        yield Problem(first, value, "there is no such training engine here", remedy)
        for key in found:
            if foreign.pop(key, None) is None:
                leaves[key] = "fsdp2"


def _parts_of_overrides(leaves: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """For each `override_config` with a mapping `name`: its key, that mapping, and the rest."""
    for key, given in list(leaves.items()):
        part = given.get(name) if isinstance(given, Mapping) else None
        if key.endswith("model.override_config") and isinstance(part, Mapping):
            yield key, part, {other: value for other, value in given.items() if other != name}


def model_overrides(leaves: dict[str, Any], notes: list[str]) -> Iterator[Problem]:
    """Moves `override_config.model_config`, where verl's Megatron engine has overrides of config.json, to
    `override_config`, where its other engines have them. Adds notes; yields problems of names in both."""
    for key, moved, rest in _parts_of_overrides(leaves, "model_config"):
        for name in moved:
            if name in rest and rest[name] != moved[name]:
                field = f"{key}.model_config.{name}"
                rule = f"is another name for {key}.{name}, which is set to {shown(rest[name])}"
                yield Problem(field, shown(moved[name]), rule, f"leave out {field}")
        leaves[key] = {**moved, **rest}
        notes.append(f"{key}.model_config: taken as {key}, with {', '.join(map(str, moved)) or 'nothing'}")


def frozen_routers(leaves: dict[str, Any]) -> Iterator[Problem]:
    """Problems of `override_config.moe_config`, which verl's Megatron engine reads; removes that section."""
    for key, frozen, rest in _parts_of_overrides(leaves, "moe_config"):
        leaves[key] = rest
        for name, value in frozen.items():
            if value:
                rule = "is not supported yet; in verl it would freeze the routers of a mixture of experts"
                field = f"{key}.moe_config.{name}"
                yield Problem(field, shown(value), rule, f"leave out {field}")


def teachers(
    leaves: dict[str, Any], origins: dict[str, str], foreign: dict[str, Any], found: Mapping[str, str]
) -> Iterator[str]:
    """Sets `distillation.teachers` from verl's teachers, with a note; removes their keys from `foreign`.
    `found`: the origins of those keys. A teacher without a `key` is for all data sources."""
    ours, section = "distillation.teachers", "distillation.teacher_models."
    paths = {key: path for key, path in foreign.items() if fits(f"{section}*.model_path", key)}
    named = {key: path for key, path in paths.items() if path is not None}
    if not named or ours in origins:
        return
    taken = {}
    for key, path in named.items():
        source = foreign.pop(f"{key.removesuffix('model_path')}key", None)
        taken["default" if source is None else str(source)] = path
        del foreign[key]
    leaves[ours], origins[ours] = taken, found.get(next(iter(named)), COMMAND_LINE)
    yield f"{', '.join(named)}: taken as {ours}={shown(taken)}"
