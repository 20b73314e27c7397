"""Maps rows of the tensors that Megatron-Core saves to rows of Hugging Face's, and back.

In: tensors of one side. Out: those of the other, as pieces of the same files; nothing is read. The mapping is
that of `names.py` for a rank that holds everything, applied to row indices instead of parameters. Left out on
purpose: files (`engine/stored/megatron.py`, `model_merger/megatron_split.py`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch

from hydraflow.engine.megatron.architecture import Architecture, Mixture
from hydraflow.engine.megatron.names import EMBEDDING, HEAD, IN_MATRIX, LAYERS, SCORE, Holding, Names
from hydraflow.engine.stored.checkpoint import Checkpoint
from hydraflow.engine.stored.pieces import Shape, StoredTensor
from hydraflow.engine.stored.regions import Region, assembled
from hydraflow.errors import ConfigError, Problem

NORM = "decoder.final_layernorm.weight"
GATE_UP, DOWN = "mlp.experts.gate_up", "mlp.experts.down"
BIAS = "mlp.router.expert_bias"
"""The router's bias; float32 whatever the dtype of the weights."""
_MATRICES = {GATE_UP: "mlp.experts.experts.linear_fc1.weight", DOWN: "mlp.experts.experts.linear_fc2.weight"}
"""Names of the experts' matrices."""
_ATTENTION = "self_attention."
_WITH_LATENT = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("pre_mlp_layernorm.weight", IN_MATRIX["pre_mlp_layernorm.weight"]),
    **{
        f"{_ATTENTION}{ours}.weight": tuple(_ATTENTION + one for one in theirs)
        for ours, theirs in {
            "q_proj": ("linear_q_proj.weight",),
            "q_a_proj": ("linear_q_down_proj.weight",),
            "q_a_layernorm": ("linear_q_up_proj.layer_norm_weight", "q_layernorm.weight"),
            "q_b_proj": ("linear_q_up_proj.weight",),
            "kv_a_proj_with_mqa": ("linear_kv_down_proj.weight",),
            "kv_a_layernorm": ("linear_kv_up_proj.layer_norm_weight", "kv_layernorm.weight"),
            "kv_b_proj": ("linear_kv_up_proj.weight",),
            "o_proj": ("linear_proj.weight",),
        }.items()
    },
}
"""Names of latent attention: the norms before it are separate; with Transformer Engine's layers some are
fused into the next matrix."""
_PLACES = {saved: place for place, saved in (IN_MATRIX | _MATRICES).items()}
_LATENT_PLACES = _PLACES | {saved: place for place, keys in _WITH_LATENT.items() for saved in keys}
"""A tensor's name in files -> its name in `engine/megatron/`. NeMo prepends `module.`."""
_KEY = re.compile(rf"(?:module\.|model\.)*(?:{re.escape(LAYERS)}(?:(?P<layer>\d+)\.)?)?(?P<place>.+)")
_EXPERT = re.compile(r"(?P<front>mlp\.experts\.experts\.)(?:(?P<expert>\d+)\.)(?P<rest>.+)")
_HALF = re.compile(r"(?P<whole>.+linear_fc1\.weight)_(?P<half>[wv])")
_SHOWN = 8
"""Maximum number of names in a message."""


@dataclass(frozen=True)
class Rows:
    """A run of rows that is contiguous in a parameter and in one of its parts."""

    of_parameter: int
    of_part: int
    count: int


@dataclass(frozen=True)
class _Saved:
    """A tensor in a checkpoint as a part of a parameter."""

    tensor: StoredTensor
    layer: int | None
    """Its index in a stack of layers."""
    expert: int | None
    half: str | None
    """w: the gate projection, v: the up projection alone."""

    @property
    def front(self) -> Shape:
        """Leading indices that select its layer in the stack."""
        return () if self.layer is None else (self.layer,)

    def rows_in(self, shape: Shape) -> Shape:
        """The shape that it must have, without the stack's dimension, in a parameter of `shape`."""
        rows = shape if self.expert is None else shape[1:]
        return rows if self.half is None else (rows[0] // 2, *rows[1:])


def parameters(shape: Architecture) -> list[str]:
    """Names of every parameter of a policy, as in `names.py`."""
    found = [EMBEDDING]
    for layer in range(shape.layers):
        places = ["input_layernorm.weight"]
        places += [f"{_ATTENTION}{name}" for name in _attention(shape)]
        places += ["pre_mlp_layernorm.weight"]
        if shape.mixture and shape.mixture.layers[layer]:
            places += _experts(shape.mixture)
        else:
            places += ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
        found += [f"{LAYERS}{layer}.{place}" for place in places]
    return [*found, NORM, *([] if shape.tied else [HEAD])]


def _attention(shape: Architecture) -> list[str]:
    if shape.latent is not None:
        compressed = shape.latent.q_lora_rank is not None
        found = ["q_a_proj", "q_a_layernorm", "q_b_proj"] if compressed else ["q_proj"]
        found += ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
        return [f"{name}.weight" for name in found]
    found = ["linear_qkv.weight", *["linear_qkv.bias"] * shape.qkv_bias]
    found += ["q_layernorm.weight", "k_layernorm.weight"] if shape.norm_of_heads else []
    return [*found, "linear_proj.weight"]


def _experts(mixture: Mixture) -> list[str]:
    found = ["mlp.router.weight", *[BIAS] * mixture.by_sigmoid, GATE_UP, DOWN]
    if mixture.shared is not None:
        names = ["linear_fc1.weight", "linear_fc2.weight", *["gate_weight"] * mixture.shared_gate]
        found += [f"mlp.shared_experts.{name}" for name in names]
    return found


def keys_of(place: str, *, latent: bool, experts: bool) -> tuple[str, ...]:
    """Names of a layer's parameter in files: with Transformer Engine's layers and, where they differ, with
    local ones. latent: whether attention is latent; experts: whether the layer has experts."""
    if place in _MATRICES:
        return (_MATRICES[place],)
    if latent and place in _WITH_LATENT:
        return _WITH_LATENT[place]
    if place == "pre_mlp_layernorm.weight" and experts:
        return place, IN_MATRIX[place]
    return (IN_MATRIX.get(place, place),)


def shape_of(holding: Holding) -> Shape:
    """Shape of a parameter, whose parts are stacked."""
    return sum(part.shape[0] for part in holding.parts), *holding.parts[0].shape[1:]


def rows_of(names: Names, name: str, count: int) -> Iterator[list[Rows]]:
    """For each part of a parameter of `count` rows: the indices of its rows."""
    # with a hidden size of 1, a column of row indices has the shape of the parameter, and `cut` splits it
    narrow = replace(names, shape=replace(names.shape, hidden=1)).holding(name)
    if narrow.parts[0].slice is not None:  # experts are in the order of transformers
        yield [Rows(0, 0, count)]
        return
    numbers = torch.arange(count).view(count, *[1] * (len(narrow.parts[0].shape) - 1))
    for piece in narrow.cut(numbers):
        yield runs(piece)


def runs(numbers: torch.Tensor) -> list[Rows]:
    """Groups row indices of the parameter into contiguous runs.

    >>> runs(torch.tensor([4, 5, 9]))
    [Rows(of_parameter=4, of_part=0, count=2), Rows(of_parameter=9, of_part=2, count=1)]
    """
    found = numbers.flatten()
    starts = [0, *((found.diff() != 1).nonzero().flatten() + 1).tolist()]
    ends = [*starts[1:], len(found)]
    return [Rows(int(found[at]), at, end - at) for at, end in zip(starts, ends, strict=True)]


def hugging_face(checkpoint: Checkpoint, shape: Architecture) -> dict[str, StoredTensor]:
    """The tensors of a Megatron-Core checkpoint, by transformers' names. `shape`: of the model in its
    config.json. Raises ConfigError when the tensors are not that model's."""
    names, found = Names(replace(shape, tied=False), 0, 1), {}
    for name, tensor in _parameters_of(checkpoint, names).items():
        holding = names.holding(name)
        for part, rows in zip(holding.parts, rows_of(names, name, tensor.shape[0]), strict=True):
            rest = (0,) * (len(part.shape) - 1)
            regions = [
                Region((run.of_part, *rest), (run.count, *part.shape[1:]), tensor, (run.of_parameter, *rest))
                for run in rows
            ]
            found[part.name] = assembled(part.name, part.shape, regions)
    return found


def _parameters_of(checkpoint: Checkpoint, names: Names) -> dict[str, StoredTensor]:
    """One tensor per parameter, assembled from the tensors that contain it."""
    wanted = set(parameters(names.shape))
    sources, unknown = _by_parameter(checkpoint, names.shape, wanted | {SCORE})
    whole, misshapen = {}, []
    for name, parts in sources.items():
        shape = shape_of(names.holding(name))
        if name in (EMBEDDING, HEAD):  # may have padding rows, so that all ranks have the same number
            shape = (max(shape[0], *parts[0].tensor.shape[:1]), *shape[1:])
        regions = [_region(saved, shape) for saved in parts]
        misshapen += [
            f"{_shown(saved.tensor)}, not {[*saved.tensor.shape[: len(saved.front)], *saved.rows_in(shape)]}"
            for saved, region in zip(parts, regions)
            if region is None
        ]
        if fitting := [region for region in regions if region is not None]:
            whole[name] = assembled(name, shape, fitting)
    missing = sorted(wanted - sources.keys() - {HEAD})  # a value model has none; callers check it
    missing += [name for name, tensor in whole.items() if tensor.holes()]
    _require_none(checkpoint, missing, unknown, list(dict.fromkeys(misshapen)))
    return whole


def _by_parameter(
    checkpoint: Checkpoint, shape: Architecture, known: Collection[str]
) -> tuple[dict[str, list[_Saved]], list[str]]:
    """The tensors by parameter, and those that belong to none."""
    sources: dict[str, dict[object, _Saved]] = defaultdict(dict)
    unknown = []
    for tensor in checkpoint.tensors.values():
        here = dict(_sources(tensor, shape))
        if not all(name in known for name in here):
            other = _is_stack(tensor.name) and tensor.shape[:1] != (shape.layers,)
            unknown.append(_shown(tensor) + (f", not {shape.layers} layers" if other else ""))
            continue
        for name, saved in here.items():
            sources[name].setdefault((saved.expert, saved.half), saved)  # a norm may have two names
    return {name: list(found.values()) for name, found in sources.items()}, unknown


def _is_stack(name: str) -> bool:
    """Whether a tensor holds all layers."""
    found = _KEY.fullmatch(name)
    return LAYERS in name and found is not None and found["layer"] is None


def _shown(tensor: StoredTensor) -> str:
    return f"{tensor.name} {list(tensor.shape)}"


def _require_none(checkpoint: Checkpoint, missing: list[str], unknown: list[str], shapes: list[str]) -> None:
    model = f"the model of {checkpoint.huggingface / 'config.json'}"
    problems = []
    for what, names in (
        (f"lacks tensors of {model}", missing),
        (f"holds tensors that {model} does not have, or with unknown names", unknown),
        (f"holds tensors of another shape than {model}", shapes),
    ):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            problems.append(Problem(str(checkpoint.directory), None, f"{what} ({len(names)}): {shown}"))
    if problems:
        raise ConfigError(problems)


def _sources(tensor: StoredTensor, shape: Architecture) -> Iterator[tuple[str, _Saved]]:
    """The parameters that a tensor contains: one per layer of a stack, or one; or the tensor's own name."""
    found = _KEY.fullmatch(tensor.name)
    assert found is not None, "every name matches"
    place, expert, half = found["place"], None, None
    if one := _HALF.fullmatch(place):
        place, half = one["whole"], one["half"]
    if one := _EXPERT.fullmatch(place):
        place, expert = one["front"] + one["rest"], int(one["expert"])
    place = (_PLACES if shape.latent is None else _LATENT_PLACES).get(place, place)
    stacked = _is_stack(tensor.name)
    if LAYERS not in tensor.name or (stacked and tensor.shape[:1] != (shape.layers,)):
        is_value = place == HEAD and tensor.shape[:1] == (1,) and shape.vocabulary > 1
        yield SCORE if is_value else place, _Saved(tensor, None, expert, half)
    elif not stacked:
        yield f"{LAYERS}{found['layer']}.{place}", _Saved(tensor, None, expert, half)
    else:
        for layer in range(tensor.shape[0]):
            yield f"{LAYERS}{layer}.{place}", _Saved(tensor, layer, expert, half)


def _region(saved: _Saved, shape: Shape) -> Region | None:
    """The region of a tensor in a parameter of that shape; None when it does not fit."""
    held, rows = saved.tensor.shape[len(saved.front) :], saved.rows_in(shape)
    if held != rows:
        return None
    start = [0] * len(shape)
    if saved.expert is not None:
        start[0] = saved.expert
    if saved.half == "v":
        start[-2] = rows[0]
    box = rows if saved.expert is None else (1, *rows)
    return Region(tuple(start), box, saved.tensor, (*saved.front, *[0] * len(held)))
