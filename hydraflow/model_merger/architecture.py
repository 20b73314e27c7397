"""What a merged model must contain: names, shapes, tied weights, and how names in files differ from those of
modules.

In: the directory with config.json, names and shapes of a checkpoint. Out: an `Architecture` that they fill
exactly, so that no tensor is missing or newly initialised when the result is loaded. The most common decoders
are built in (`families.py`); for everything else transformers builds the model on the meta device, without
memory or values. Left out on purpose: reading weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hydraflow.engine.stored.checkpoint import read_json
from hydraflow.engine.stored.pieces import Shape
from hydraflow.errors import ConfigError, first_line
from hydraflow.model_merger import families

_SHOWN = 5
"""Number of names of a kind that a message shows."""


@dataclass(frozen=True)
class Conversion:
    """A group of tensors written under other names or in another form."""

    inputs: tuple[str, ...]
    """Names of modules."""
    outputs: dict[str, Shape]
    """Names in files and their shapes."""
    renamed: bool = False
    """One tensor that is not changed."""
    number_at: int | None = None
    """The rows of the single input are converted independently, and this part of an output's name, counted
    between dots, is the row's index. None: it is converted as a whole."""

    def output_of(self, name: str, row: int) -> str:
        """The name of an output whose rows are numbered from `row`, not from 0."""
        if self.number_at is None:
            return name
        parts = name.split(".")
        parts[self.number_at] = str(int(parts[self.number_at]) + row)
        return ".".join(parts)


@dataclass
class Architecture:
    """A model's class and its tensors."""

    class_name: str | None
    """Its name in config.json; None for a value model without a transformers class."""
    shapes: dict[str, Shape]
    """Shapes of all tensors by module names, tied ones under each name."""
    tied: dict[str, str]
    """Names that are not in files -> the name stored instead."""
    head: str
    """policy or value."""
    buffers: frozenset[str] = frozenset()
    """Buffers that are not saved to files."""
    unrounded: frozenset[str] = frozenset()
    """Buffers that are saved, such as router biases; they keep their dtype."""
    model: Any = None
    """transformers' model on the meta device; None: names in files are those of modules."""
    retied: bool | None = None
    """Value that tie_word_embeddings must be set to; None: config.json is right."""

    def differences(self, shapes: Mapping[str, Shape]) -> Differences:
        """Missing, unexpected and misshapen tensors of a checkpoint, compared by their names in files."""
        wanted = self._in_files({name: shape for name, shape in self.shapes.items() if name not in self.tied})
        got = self._in_files({name: shape for name, shape in shapes.items() if name not in self.tied})
        got = {name: shape for name, shape in got.items() if name not in self.buffers}
        other = [name for name in sorted(wanted) if name in got and got[name] != wanted[name]]
        names = {
            "missing": sorted(wanted.keys() - got.keys()),
            "not part of the model": sorted(got.keys() - wanted.keys()),
            "of another shape": [f"{name} {list(got[name])}, not {list(wanted[name])}" for name in other],
        }
        return Differences(names)

    def transposed(self) -> frozenset[str] | None:
        """Weights that are (in, out): those of transformers' Conv1D. None: there is no class that tells."""
        if self.model is None:  # the built-in families have nn.Linear
            return None if self.class_name is None else frozenset()
        from transformers.pytorch_utils import Conv1D

        named = self.model.named_modules()
        return frozenset(f"{name}.weight" for name, module in named if isinstance(module, Conv1D))

    def revert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors as stored in files: transformers' own conversions reversed."""
        if self.model is None:
            return dict(tensors)
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, dict(tensors))

    def conversions(self, shapes: Mapping[str, Shape]) -> list[Conversion]:
        """How these tensors are written, in the smallest groups that can be converted together."""
        if self.model is None:
            return [Conversion((name,), {name: shape}, renamed=True) for name, shape in shapes.items()]
        metas = _metas(shapes)
        full = self.revert(metas)  # tensors that come back as the same object are only renamed
        names = {id(tensor): name for name, tensor in metas.items()}
        plain = {names[id(tensor)]: written for written, tensor in full.items() if id(tensor) in names}
        kept = [name for name in metas if name in plain]
        changed = [name for name in metas if name not in plain]
        written = _shapes({name: tensor for name, tensor in full.items() if id(tensor) not in names})
        found = [Conversion((name,), {plain[name]: shapes[name]}, renamed=True) for name in kept]
        return found + self._groups(changed, metas, written)

    def _by_rows(self, conversion: Conversion, metas: Mapping[str, torch.Tensor]) -> Conversion:
        """The same conversion one row (one expert) at a time, if that gives the same tensors."""
        if len(conversion.inputs) > 1:
            return conversion
        (name,) = conversion.inputs
        firsts = _shapes(self.revert({name: metas[name][:1]}))
        depth = min(first.count(".") for first in firsts) + 1
        for at in range(depth):
            if any(first.split(".")[at] != "0" for first in firsts):
                continue
            found = replace(conversion, number_at=at)
            outputs = {
                found.output_of(first, row): shape
                for row in range(len(metas[name]))
                for first, shape in firsts.items()
            }
            if outputs == conversion.outputs:
                return found
        return conversion

    def _in_files(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        if self.model is None:
            return dict(shapes)
        return _shapes(self.revert(_metas(shapes)))

    def _groups(
        self, changed: list[str], metas: Mapping[str, torch.Tensor], written: Mapping[str, Shape]
    ) -> list[Conversion]:
        if not changed:
            return []
        ways: list[Callable[[str], str]] = [lambda name: name, _layer, lambda name: ""]
        for way in ways:
            groups: dict[str, list[str]] = {}
            for name in changed:
                groups.setdefault(way(name), []).append(name)
            made: list[Conversion] = []
            together: dict[str, Shape] = {}
            for group in groups.values():
                outputs = _shapes(self.revert({name: metas[name] for name in group}))
                made.append(Conversion(tuple(group), outputs))
                together.update(outputs)
            if together == written:
                return [self._by_rows(conversion, metas) for conversion in made]
        raise AssertionError("all tensors together always form a group")


@dataclass(frozen=True)
class Differences:
    """Between a checkpoint and what its config.json describes."""

    names: dict[str, list[str]]
    """What is wrong with tensors, in words -> their names."""

    def __len__(self) -> int:
        return sum(map(len, self.names.values()))

    def __str__(self) -> str:
        parts = []
        for what, names in self.names.items():
            if names:
                shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
                parts.append(f"{len(names)} tensors {what}: {shown}")
        return "; ".join(parts)


def describe(
    directory: Path,
    shapes: Mapping[str, Shape],
    *,
    head: str,
    tie: bool = False,
    trust_remote_code: bool = False,
) -> Architecture:
    """The architecture that config.json describes and these tensors fill. `tie`: tie the embeddings whatever
    config.json says. Raises ConfigError when tensors are missing, unknown or misshapen."""
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError.one(str(file), None, "the model's configuration is missing")
    found = _built_in(read_json(file), shapes, head, tie)
    if found is None or found.differences(shapes):
        found = _ask_transformers(directory, shapes, head, tie, trust_remote_code)
    found.retied = True if tie else None
    return found


def _built_in(
    config: Mapping[str, Any], shapes: Mapping[str, Shape], head: str, tie: bool
) -> Architecture | None:
    name = families.class_name(config, head)
    if name is None:
        return None
    known = dict(families.tensors(config, head, score_bias="score.bias" in shapes))
    is_tied = head == "policy" and (tie or config["tie_word_embeddings"])
    tied = {families.OUTPUT: families.EMBEDDING} if is_tied else {}
    return Architecture(name, known, tied, head)


def _ask_transformers(
    directory: Path, shapes: Mapping[str, Shape], head: str, tie: bool, trust: bool
) -> Architecture:
    config = read_config(directory, trust)
    if tie:
        config.tie_word_embeddings = True
    if head == "value":
        config.num_labels = 1
        config.token_classification_bias = "score.bias" in shapes
    tried = []
    for found in _candidates(config, head, trust):
        differences = found.differences(shapes)
        if not differences:
            return found
        tried.append((found, differences))
    if not tried:
        rule = f"transformers has no {head} model for {config.model_type}"
        raise ConfigError.one(str(directory / "config.json"), None, rule)
    found, differences = min(tried, key=lambda one: len(one[1]))
    untied, name = differences.names["missing"] == ["lm_head.weight"], found.class_name or config.model_type
    rule = f"the checkpoint does not hold the {name} that config.json describes: {differences}"
    remedy = "--tie-word-embedding, if the embeddings are tied" if untied else ""
    raise ConfigError.one(str(directory), None, rule, remedy)


def read_config(directory: Path, trust_remote_code: bool) -> Any:
    """config.json as transformers reads it. Raises ConfigError if it cannot be read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        own_code, rule = "trust_remote_code" in str(error), f"cannot be read: {first_line(error)}"
        remedy = "--trust-remote-code, if you trust its Python code" if own_code else ""
        raise ConfigError.one(str(directory / "config.json"), None, rule, remedy) from error


def _candidates(config: Any, head: str, trust: bool) -> Iterable[Architecture]:
    """Candidate architectures for the tensors, the most likely first."""
    import transformers

    tasks = {"policy": ("CausalLM", "ImageTextToText")}
    tasks["value"] = ("TokenClassification", "SequenceClassification")
    autos = [getattr(transformers, f"AutoModelFor{task}") for task in tasks[head]]
    builders: list[Any] = [partial(auto.from_config, trust_remote_code=trust) for auto in autos]
    if head == "policy":
        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        builders = [*(cls._from_config for cls in named if cls is not None), *builders]
    seen = set()
    for build in builders:
        model = _on_meta(build, config)
        if model is not None and type(model) not in seen:
            seen.add(type(model))
            yield _architecture(model, head)
    if head == "value":
        causal = partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=trust)
        if (backbone := _on_meta(causal, config)) is not None:
            yield _headless(backbone, config)


def _on_meta(build: Callable[[Any], Any], config: Any) -> Any:
    """The model, or None when transformers has no such class for the configuration."""
    try:
        with torch.device("meta"):
            return build(config)
    except (ValueError, KeyError, OSError):
        return None


def _architecture(model: Any, head: str) -> Architecture:
    named = _shapes(model.state_dict())
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {target: source for target, source in ties.items() if target in named and source in named}
    buffers = frozenset(name for name, _ in model.named_buffers())
    outside, inside = buffers - named.keys(), buffers & named.keys()
    return Architecture(type(model).__name__, named, tied, head, outside, inside, model)


def _headless(lm: Any, config: Any) -> Architecture:
    """A value model that transformers has no class for: the causal model's backbone and a score head."""
    prefix = f"{lm.base_model_prefix}."
    named = {name: shape for name, shape in _shapes(lm.state_dict()).items() if name.startswith(prefix)}
    named["score.weight"] = (1, config.get_text_config().hidden_size)
    buffers = frozenset(name for name, _ in lm.named_buffers())
    return Architecture(None, named, {}, "value", buffers - named.keys(), buffers & named.keys())


def _metas(shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _layer(name: str) -> str:
    """The part of a name up to the first number."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
    return found[0] if found else ""
