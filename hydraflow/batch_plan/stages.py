"""The number of layers of each pipeline stage, as Megatron-Core divides them.

In: a model's number of layers, and the overrides that divide it unevenly. Out: the layers of each part of
each stage, or a ConfigError with legal numbers. Also used before a run starts, so Megatron-Core is not
imported. Left out on purpose: equal shares that do not divide (`device_rules.py`), and which layers a stage
gets (Megatron-Core numbers them itself).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from hydraflow.batch_plan.roles import megatron_sections
from hydraflow.engine.config import LAYERS_OF_STAGES, MegatronConfig
from hydraflow.errors import ConfigError, Faults, Problem, shown
from hydraflow.schema import PPOConfig

FIRST, LAST, WITH_EMBEDDING, WITH_LOSS, LAYOUT = LAYERS_OF_STAGES
_LETTERS = {"E": "embedding", "t": "decoder", "L": "loss"}
_MOST_DIGITS = 4
"""Maximum digits of a number in a layout; a longer number means more layers than any model has."""
Parts = list[list[int]]
"""Number of layers of each part of each stage; several parts are virtual pipeline stages."""


def layers_of_parts(layers: int, settings: MegatronConfig) -> Parts:
    """Layers of each part of each stage, for a legal division.

    >>> over = {"num_layers_in_first_pipeline_stage": 2}
    >>> sizes = dict(pipeline_model_parallel_size=3, override_transformer_config=over)
    >>> layers_of_parts(8, MegatronConfig(**sizes))
    [[2], [3], [3]]
    """
    stages, chunks = settings.pipeline_model_parallel_size, settings.chunks
    given = _given(settings)
    if (layout := given.get(LAYOUT)) is not None:
        counts = [part.count("decoder") for part in _parsed(layout)]
        return [counts[stage::stages] for stage in range(stages)]
    if FIRST in given or LAST in given:
        return [[size // chunks] * chunks for size in _uneven(layers, stages, given)]
    ends = [bool(given.get(WITH_EMBEDDING)), bool(given.get(WITH_LOSS))]
    parts = [[(layers + sum(ends)) // stages // chunks] * chunks for _ in range(stages)]
    parts[0][0] -= ends[0]
    parts[-1][-1] -= ends[1]
    return parts


def require_layers(layers: int, settings: MegatronConfig, *, section: str) -> None:
    """ConfigError for an explicit split that does not divide, or leaves a part without layers; `section`: the
    role's."""
    if problems := list(_problems(layers, settings, f"{section}.megatron")):
        raise ConfigError(problems)


def stage_problems(config: PPOConfig, *, policy: int | None, critic: int | None) -> list[Problem]:
    """Problems of all roles. `policy`, `critic`: the models' numbers of layers; None: not known. A reference
    that follows the actor is reported once."""
    faults, seen = Faults(), list[tuple[int, int, dict[str, Any]]]()
    for section, settings in megatron_sections(config):
        layers = critic if section == "critic" else policy
        split = (settings.pipeline_model_parallel_size, settings.chunks, _given(settings))
        if layers is not None and (section == "critic" or split not in seen):
            faults.passes(partial(require_layers, layers, settings, section=section))
        seen.append(split)
    return faults.problems


def _problems(layers: int, settings: MegatronConfig, engine: str) -> Iterator[Problem]:
    given, key = _given(settings), f"{engine}.override_transformer_config"
    if not given:
        return
    ways = [names for names in ((LAYOUT,), (FIRST, LAST), (WITH_EMBEDDING, WITH_LOSS)) if {*names} & {*given}]
    if len(ways) > 1:
        for name in (name for names in ways[1:] for name in names if name in given):
            rule = f"{', '.join(one for one in ways[0] if one in given)} already divides the layers"
            yield Problem(f"{key}.{name}", shown(given[name]), rule, f"leave out {key}.{name}")
    elif LAYOUT in given:
        yield from _of_layout(layers, settings, given[LAYOUT], engine)
    elif ways[0] == (FIRST, LAST):
        yield from _of_ends(layers, settings, given, key)
    else:
        yield from _of_counted_ends(layers, settings, given, engine)


def _of_ends(layers: int, settings: MegatronConfig, given: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Problems of layer counts given for the first or last stage, each with counts that fit the other one."""
    stages, chunks = settings.pipeline_model_parallel_size, settings.chunks

    def are_numbers(ends: Mapping[str, Any]) -> bool:
        return all(type(value) is int for value in ends.values())

    def is_legal(ends: Mapping[str, Any]) -> bool:
        sizes = _uneven(layers, stages, ends) if are_numbers(ends) else []
        is_even = all(size >= chunks and size % chunks == 0 for size in sizes)
        return is_even and len(sizes) == stages and sum(sizes) == layers

    if is_legal(given):
        return
    sizes = ", ".join(map(str, _uneven(layers, stages, given))) if are_numbers(given) else "non-integers"
    rule = f"gives the {stages} stages {sizes} of the model's {layers} layers"
    if chunks > 1:
        rule += f", each of which must be divisible by the {chunks} parts of a stage"
    for name, value in given.items():
        legal = [one for one in range(1, layers + 1) if is_legal({**given, name: one})]
        near = sorted(legal, key=lambda one: abs(one - value) if type(value) is int else one)[:2]
        others = f"leave out {', '.join(f'{key}.{one}' for one in given)}"
        remedy = " or ".join(f"{key}.{name}={one}" for one in near) or others
        yield Problem(f"{key}.{name}", shown(value), rule, remedy)


def _of_counted_ends(
    layers: int, settings: MegatronConfig, given: Mapping[str, Any], engine: str
) -> Iterator[Problem]:
    """Problems when the embedding or the loss counts as a layer."""
    stages, chunks = settings.pipeline_model_parallel_size, settings.chunks
    parts, counted = stages * chunks, layers + len(given)
    if counted % parts == 0 and min(map(min, layers_of_parts(layers, settings))) > 0:
        return
    names = ", ".join(f"{engine}.override_transformer_config.{name}" for name in given)
    rule = f"with it {counted} layers must divide evenly into {stages} stages"
    rule += f" of {chunks} parts" if chunks > 1 else ""
    rule += ", and every part must have a layer"
    legal = [one for one in range(1, counted // 2 + 1) if counted % (one * chunks) == 0]
    near = sorted(legal, key=lambda one: abs(one - stages))[:2]
    sizes = [f"{engine}.pipeline_model_parallel_size={one}" for one in near]
    yield Problem(names, True, rule, " or ".join([*sizes, f"leave out {names}"]))


def _of_layout(layers: int, settings: MegatronConfig, layout: Any, engine: str) -> Iterator[Problem]:
    stages, chunks = settings.pipeline_model_parallel_size, settings.chunks
    key = f"{engine}.override_transformer_config.{LAYOUT}"
    parts = _parsed(layout)
    flat = [one for part in parts for one in part]
    rules = []
    if unknown := sorted({one for one in flat if one not in _LETTERS.values()}):
        rules.append(
            f"has {', '.join(unknown)}; only E, t and L (embedding, decoder, loss) are implemented here"
        )
    if len(parts) != stages * chunks:
        wanted = f"{stages} stages" + (f" of {chunks} parts" if chunks > 1 else "")
        rules.append(f"has {len(parts)} parts for {wanted}")
    ends = [one for one in flat if one in ("embedding", "loss")]
    if ends != ["embedding", "loss"] or [flat[0], flat[-1]] != ends:
        rules.append("must begin with its one embedding and end with its one loss")
    if flat.count("decoder") != layers or not all("decoder" in part for part in parts):
        counts = ", ".join(str(part.count("decoder")) for part in parts)
        rules.append(f"gives its parts {counts} of the model's {layers} layers, and each needs at least one")
    is_possible = layers >= stages * chunks
    remedy = f"{key}='{even_layout(layers, stages * chunks)}'" if is_possible else f"leave out {key}"
    for rule in rules:
        yield Problem(key, shown(layout), rule, remedy)


def even_layout(layers: int, parts: int) -> str:
    """A layout with shares as equal as possible.

    >>> even_layout(7, 3)
    'Et*3|t*2|t*2L'
    """
    sizes = [layers // parts + (number < layers % parts) for number in range(parts)]
    return f"E{'|'.join(f't*{size}' for size in sizes)}L"


def _given(settings: MegatronConfig) -> dict[str, Any]:
    """The overrides that split layers; those at their default values do not count."""
    overrides = settings.override_transformer_config
    found = {name: overrides.get(name) for name in LAYERS_OF_STAGES}
    return {name: value for name, value in found.items() if value is not None and value is not False}


def _uneven(layers: int, stages: int, ends: Mapping[str, Any]) -> list[int]:
    """Layers of each stage; those between the ends get equal shares, rounded down as in Megatron-Core."""
    first, last = ends.get(FIRST), ends.get(LAST)
    between = stages - (first is not None) - (last is not None)
    rest = (layers - (first or 0) - (last or 0)) // max(between, 1)
    head, tail = [] if first is None else [first], [] if last is None else [last]
    return [*head, *[rest] * between, *tail]


def _parsed(layout: Any) -> list[list[str]]:
    """The contents of each part of a layout, in Megatron-Core's terms; unknown letters are kept.

    >>> _parsed("Et*2|(t|)*2L")
    [['embedding', 'decoder', 'decoder'], ['decoder'], ['decoder'], ['loss']]
    """
    if not isinstance(layout, str):
        rows = layout if isinstance(layout, list) else []
        listed = [row if isinstance(row, list) else [row] for row in rows]
        return [[str(one).strip().lower() for one in row] for row in listed]
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2][:_MOST_DIGITS]), text)
    return [[_LETTERS.get(letter, letter) for letter in part] for part in text.split("|")]
