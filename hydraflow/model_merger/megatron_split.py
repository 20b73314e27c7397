"""`split --backend megatron`: a Hugging Face directory becomes a checkpoint that Megatron-Core's
`dist_checkpointing.load` reads with any parallel sizes, laid out as Megatron-LM does.

In: a directory with safetensors files. Out: `release/` with the weights, the pointer to it, and
`huggingface/`; whole or not at all. No more than one block of one tensor is in memory. Left out on purpose:
value models, optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch

from hydraflow.engine.dcp_writer import CheckpointWriter
from hydraflow.engine.megatron.architecture import Architecture
from hydraflow.engine.megatron.names import Names
from hydraflow.engine.megatron.saved_names import BIAS, LAYERS, keys_of, parameters, rows_of, runs, shape_of
from hydraflow.engine.stored.megatron import BACKEND, COMMON, CONFIG, EXTRA, POINTER, RELEASE
from hydraflow.engine.stored.pieces import Shape, StoredTensor, block_rows
from hydraflow.engine.stored.regions import Region, assembled
from hydraflow.errors import ConfigError
from hydraflow.model_merger import architecture, target
from hydraflow.model_merger.outputs import DTYPES, cast
from hydraflow.model_merger.progress import bar
from hydraflow.model_merger.safetensors_files import read_directory
from hydraflow.model_merger.sizes import sizes_of

_MODULES = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_LATENT_MODULES = tuple(
    f"self_attention.{name}"
    for name in (
        *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
        *("linear_kv_down_proj", "linear_kv_up_proj", "kv_layernorm"),
    )
)
_SHARED_MODULES = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
_EXPERT_MODULES = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
"""All of these modules have an extra state in some version: Megatron-Core refuses checkpoints without it."""


def split(
    source: Path, target_dir: str, *, files: int, dtype: str, separate_layers: bool, overwrite: bool
) -> list[str]:
    """Splits into `files` files, and returns lines for the user. `separate_layers`: one tensor per layer, as
    Megatron-Core does for heterogeneous layers; otherwise layers are stacked. Raises ConfigError before
    anything is written."""
    shape = sizes_of(source)
    tensors, notes = _parameters_of(source, shape)
    mixed = shape.mixture is not None and not all(shape.mixture.layers)
    layout = _Layout(shape, DTYPES.get(dtype), separate_layers or mixed)
    nbytes = sum(layout.nbytes(name, tensor) for name, tensor in tensors.items())
    with (
        target.unfinished(Path(target_dir), source, nbytes=nbytes, overwrite=overwrite) as folder,
        bar("splitting", nbytes) as advance,
    ):
        (folder / RELEASE).mkdir()
        writer, ranks = CheckpointWriter(folder / RELEASE), cycle(range(files))
        for name, tensor in tensors.items():
            keys, whole = layout.keys(name), layout.whole(name, tensor)
            for start, block in layout.boxes(name, tensor):
                place = writer.write(block, next(ranks))
                for key in keys:
                    writer.add_box(key, whole, start, block, place)
                advance(block.nbytes)
        nothing = writer.write([None], 0)
        for key in layout.extra_states():
            writer.add_object(key, nothing)
        writer.finish({})
        _write_facts(folder / RELEASE, layout.separate)
        (folder / POINTER).write_text(RELEASE)
        target.copy_settings(target.settings(source), folder / "huggingface")
    sizes = f"{len(tensors)} parameters, {nbytes / 1e9:.3f} GB"
    return [f"{Path(target_dir).absolute()}: {sizes}, {files} files, layout megatron", *notes]


@dataclass(frozen=True)
class _Layout:
    """Names of a checkpoint's tensors, and how they are cut."""

    shape: Architecture
    dtype: torch.dtype | None
    """Dtype of the weights; None: unchanged."""
    separate: bool
    """Whether each layer has its own tensors."""

    def dtype_of(self, name: str, tensor: StoredTensor) -> torch.dtype:
        """A parameter's dtype in the checkpoint."""
        return tensor.dtype if self.dtype is None or name.endswith(BIAS) else self.dtype

    def nbytes(self, name: str, tensor: StoredTensor) -> int:
        """Bytes of a parameter in its final dtype."""
        return tensor.nbytes // tensor.dtype.itemsize * self.dtype_of(name, tensor).itemsize

    def keys(self, name: str) -> list[str]:
        """Names of a parameter in files; some norms have two."""
        layer = _layer(name)
        if layer is None:
            return [name]
        front = f"{LAYERS}{layer}."
        latent, experts = self.shape.latent is not None, self._has_experts(layer)
        found = keys_of(name.removeprefix(front), latent=latent, experts=experts)
        return [(front if self.separate else LAYERS) + key for key in found]

    def whole(self, name: str, tensor: StoredTensor) -> Shape:
        """Shape of the tensor that contains a parameter."""
        return (self.shape.layers, *tensor.shape) if self._is_stacked(name) else tensor.shape

    def boxes(self, name: str, tensor: StoredTensor) -> Iterator[tuple[Shape, torch.Tensor]]:
        """A parameter's blocks of rows in their final dtype, with their offsets in that tensor."""
        front = (_layer(name) or 0,) if self._is_stacked(name) else ()
        for first, last in block_rows(tensor.shape, tensor.dtype):
            block = cast(tensor.rows(first, last), self.dtype_of(name, tensor), name)
            yield (*front, first, *[0] * (len(tensor.shape) - 1)), block.view(*[1] * len(front), *block.shape)

    def extra_states(self) -> Iterator[str]:
        """Keys of extra states, as Megatron-Core names them: <module>/shard_<place>_<number of places>."""
        yield f"decoder.final_layernorm.{EXTRA}/shard_0_1"
        for layer in range(self.shape.layers):
            front = f"{LAYERS}{layer}." if self.separate else LAYERS
            at, stack = ([], []) if self.separate else ([layer], [self.shape.layers])
            mixture = self.shape.mixture if self._has_experts(layer) else None
            modules = [*_MODULES, *(_LATENT_MODULES if self.shape.latent else ())]
            if mixture is not None and mixture.shared is not None:
                modules += _SHARED_MODULES
            for module in modules:
                yield f"{front}{module}.{EXTRA}/shard_{_dotted(at or [0])}_{_dotted(stack or [1])}"
            if mixture is None:
                continue
            for module in _EXPERT_MODULES:
                for expert in range(mixture.count):
                    place = f"{_dotted([*at, expert])}_{_dotted([*stack, mixture.count])}"
                    yield f"{front}{module}.{EXTRA}/shard_{place}"

    def _has_experts(self, layer: int) -> bool:
        return self.shape.mixture is not None and self.shape.mixture.layers[layer]

    def _is_stacked(self, name: str) -> bool:
        return not self.separate and _layer(name) is not None


def _layer(name: str) -> int | None:
    """The layer of a parameter; None: it belongs to none."""
    return int(name.removeprefix(LAYERS).split(".", 1)[0]) if name.startswith(LAYERS) else None


def _dotted(numbers: list[int]) -> str:
    return ".".join(map(str, numbers))


def _parameters_of(source: Path, shape: Architecture) -> tuple[dict[str, StoredTensor], list[str]]:
    """Every parameter as pieces of the directory's files, and notes for the user."""
    names = Names(shape, 0, 1)
    holdings = {name: names.holding(name) for name in parameters(shape)}
    parts = {part.name: part.shape for holding in holdings.values() for part in holding.parts}
    files = read_directory(source, field="--hf_dir")
    modules = _modules(source, files, parts)
    found = {}
    for name, holding in holdings.items():
        whole = shape_of(holding)
        rest, regions = (0,) * (len(whole) - 1), []
        for part, rows in zip(holding.parts, rows_of(names, name, whole[0]), strict=True):
            module = modules[part.name]
            regions += [
                Region((run.of_parameter, *rest), (run.count, *whole[1:]), module, (run.of_part, *rest))
                for run in rows
            ]
        found[name] = assembled(name, whole, regions)
    used = {piece.byte_range for tensor in found.values() for piece in tensor.pieces}
    left = sorted(name for name, tensor in files.items() if not used & {p.byte_range for p in tensor.pieces})
    return found, [f"  left out, because the model has no such tensor: {', '.join(left)}"] if left else []


def _modules(
    source: Path, files: Mapping[str, StoredTensor], wanted: Mapping[str, Shape]
) -> dict[str, StoredTensor]:
    """The tensors of transformers' modules, which stack a layer's experts, while files have one tensor per
    expert."""
    known = architecture.describe(source, wanted, head="policy")
    conversions = known.conversions(wanted)
    names = {name: shape for conversion in conversions for name, shape in conversion.outputs.items()}
    if missing := [name for name, shape in names.items() if name not in files or files[name].shape != shape]:
        rule = f"{len(missing)} tensors are missing or of another shape: {', '.join(missing[:5])}"
        raise ConfigError.one("--hf_dir", str(source), rule)
    found = {}
    for conversion in conversions:
        name = conversion.inputs[0]
        if conversion.renamed:
            found[name] = files[next(iter(conversion.outputs))]
            continue
        assert conversion.number_at is not None, "experts are converted one at a time"
        shape = wanted[name]
        # rows that hold their own index: reverted, they show which rows each written tensor is made of
        numbers = torch.arange(shape[1]).view(1, shape[1], 1).expand(1, *shape[1:])
        regions = [
            Region((expert, run.of_parameter, 0), (1, run.count, shape[2]), files[written], (run.of_part, 0))
            for first, rows in known.revert({name: numbers}).items()
            for expert in range(shape[0])
            for written in [conversion.output_of(first, expert)]
            for run in runs(rows[:, 0])
        ]
        found[name] = assembled(name, shape, regions)
    return found


def _write_facts(folder: Path, separate: bool) -> None:
    facts = {"sharded_backend": BACKEND, "common_backend": "torch"}
    target.write_json(folder / CONFIG, facts | {f"{name}_version": 1 for name in facts})
    content = {"non_homogeneous_layers": separate, "singleton_local_shards": False}
    torch.save({"content_metadata": content, "checkpoint_version": 3.0, "iteration": 0}, folder / COMMON)
