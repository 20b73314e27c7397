"""Checks keys of open mappings that name another library's arguments, without importing that library.

In: values of open mappings. Out: a problem for each name that the library does not have, with the nearest; or
a note that the names were not checked. The known names are parsed from the library's source, because
importing vLLM takes seconds and needs a GPU driver.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydraflow.compose.nearest import nearest
from hydraflow.errors import Problem, shown


@dataclass(frozen=True)
class ArgumentLibrary:
    """Where a library declares its arguments."""

    name: str
    package: str
    files: tuple[str, ...]
    """Source files, relative to the package."""
    classes: tuple[str, ...]
    """Classes in them whose annotated fields are the arguments."""


VLLM = ArgumentLibrary("vLLM", "vllm", ("engine/arg_utils.py",), ("EngineArgs", "AsyncEngineArgs"))
SGLANG = ArgumentLibrary(
    "SGLang",
    "sglang",
    tuple(
        f"srt/arg_groups/fields/{name}.py"
        for name in (
            *("device", "disagg", "exec_", "lora", "memory", "mm"),
            *("model", "observability", "parallel", "schedule", "serving", "spec"),
        )
    ),
    (
        *("Device", "Disagg", "Lora", "Memory", "Mm"),
        *("Model", "Observability", "Parallel", "Schedule", "Serving", "Spec"),
        *("ExecComm", "ExecDeterministic", "ExecDllm", "ExecFeatures", "ExecGraph", "ExecKernel"),
        *("ExecMamba", "ExecMoe", "ExecOffload", "ExecOverlap"),
    ),
)
MEGATRON = ArgumentLibrary(
    "Megatron-Core",
    "megatron",
    ("core/model_parallel_config.py", "core/transformer/transformer_config.py"),
    ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig"),
)
MEGATRON_DDP = ArgumentLibrary(
    "Megatron-Core",
    "megatron",
    ("core/distributed/distributed_data_parallel_config.py",),
    ("DistributedDataParallelConfig",),
)
OPEN_TO: dict[str, ArgumentLibrary] = {
    "actor_rollout_ref.rollout.engine_kwargs.vllm": VLLM,
    "rollout.engine_kwargs.vllm": VLLM,
    "actor_rollout_ref.rollout.engine_kwargs.sglang": SGLANG,
    "rollout.engine_kwargs.sglang": SGLANG,
    "actor_rollout_ref.actor.megatron.override_transformer_config": MEGATRON,
    "actor_rollout_ref.ref.megatron.override_transformer_config": MEGATRON,
    "critic.megatron.override_transformer_config": MEGATRON,
    "actor_rollout_ref.actor.megatron.override_ddp_config": MEGATRON_DDP,
    "critic.megatron.override_ddp_config": MEGATRON_DDP,
}
"""Open mapping -> the library that reads it. Others, such as reward_kwargs, are read by user code."""


def check_names(leaves: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
    """Problems and notes about the open mappings among `leaves`."""
    problems: list[Problem] = []
    notes: list[str] = []
    for key, library in OPEN_TO.items():
        content = leaves.get(key)
        if not isinstance(content, Mapping) or not content:
            continue
        known = argument_names(library)
        if known is None:
            notes.append(
                f"{key}: {', '.join(map(str, content))} not checked, {library.name} is not installed here"
            )
        else:
            problems += _unknown_names(key, content, library, known)
    return problems, notes


def _unknown_names(
    key: str, content: Mapping[str, Any], library: ArgumentLibrary, known: frozenset[str]
) -> Iterator[Problem]:
    for name, value in content.items():
        if name not in known:
            near = nearest(str(name), sorted(known))
            suggested = [f"{key}.{one}={shown(value, f'{key}.{name}')}" for one in near]
            remedy = " or ".join(suggested) or f"leave out {key}.{name}"
            yield Problem(f"{key}.{name}", shown(value), f"{library.name} has no such argument", remedy)


@cache
def argument_names(library: ArgumentLibrary) -> frozenset[str] | None:
    """The names of a library's arguments; None: it is not installed, or the classes are not found."""
    spec = importlib.util.find_spec(library.package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [folder / file for folder in folders for file in library.files if (folder / file).is_file()]
    names = frozenset(
        field.target.id
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in library.classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
    return names or None
