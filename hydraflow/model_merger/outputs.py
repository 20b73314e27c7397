"""Plans a merged checkpoint tensor by tensor: names in files, dtypes, shapes, and sources.

In: a `Checkpoint` and what the user asked for. Out: an `Outputs`, checked against the architecture before
anything is written. Left out on purpose: writing (`merge.py`), comparing (`compare.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hydraflow.engine.stored.checkpoint import Checkpoint
from hydraflow.engine.stored.pieces import StoredTensor, block_rows, same, whole
from hydraflow.errors import ConfigError
from hydraflow.model_merger import architecture, lora, names
from hydraflow.model_merger.architecture import Architecture, Conversion
from hydraflow.model_merger.safetensors_files import TensorSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of --dtype besides auto."""


@dataclass(frozen=True)
class MergeOptions:
    """Options of merging and comparing a checkpoint."""

    dtype: str = "auto"
    """fp32, bf16, fp16; auto keeps every tensor as it is."""
    is_value_model: bool = False
    tie_word_embedding: bool = False
    trust_remote_code: bool = False
    lora: str = "merged"
    """merged: adapters are added to the weights; adapter: exported beside the weights as they are."""
    lora_alpha: float | None = None
    """lora_alpha for checkpoints that do not record it."""


@dataclass
class Outputs:
    """A checkpoint's tensors as they will be written."""

    checkpoint: Checkpoint
    architecture: Architecture
    sources: dict[str, StoredTensor]
    """By module names; tied tensors once."""
    conversions: list[Conversion]
    dtype: torch.dtype | None
    """Dtype of floating-point tensors; None: unchanged."""
    adapted: dict[str, lora.MergedTensor]
    """Merged tensors of the weights that have adapters."""
    lora_alpha: float | None
    notes: list[str]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Dtype and shape of each tensor, by name in files."""
        return {
            name: TensorSpec(self.dtype_of(c.inputs[0]), shape)
            for c in self.conversions
            for name, shape in c.outputs.items()
        }

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most numbers."""
        counts: Counter[torch.dtype] = Counter()
        for spec in self.specs.values():
            counts[spec.dtype] += math.prod(spec.shape) if spec.dtype.is_floating_point else 0
        return counts.most_common(1)[0][0]

    def tensors(self) -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
        """(name in files, blocks of rows in the final dtype) of every tensor. Use a block before reading
        the next."""
        for conversion in self.conversions:
            target = self.dtype_of(conversion.inputs[0])
            for name, blocks in self._converted(conversion):
                yield name, (cast(block, target, name) for block in blocks)

    def _converted(self, conversion: Conversion) -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
        inputs = [self.sources[name] for name in conversion.inputs]
        if conversion.renamed:
            yield next(iter(conversion.outputs)), inputs[0].blocks()
            return
        row = 0
        for part in inputs[0].blocks() if conversion.number_at is not None else [None]:
            tensors = {source.name: whole(source) if part is None else part for source in inputs}
            for name, tensor in self.architecture.revert(tensors).items():
                yield conversion.output_of(name, row), _split(tensor)
            row += 0 if part is None else len(part)

    def final_dtype(self, own: torch.dtype) -> torch.dtype:
        """Final dtype of a tensor of dtype `own`."""
        return self.dtype if self.dtype is not None and own.is_floating_point else own

    def dtype_of(self, name: str) -> torch.dtype:
        """Final dtype of a source."""
        own = self.sources[name].dtype
        return own if name in self.architecture.unrounded else self.final_dtype(own)


def outputs_of(checkpoint: Checkpoint, merge_options: MergeOptions) -> Outputs:
    """The checkpoint's tensors as merging with these options writes them. Raises ConfigError for a broken
    checkpoint and for options that do not fit it."""
    weights = names.weights_of(checkpoint, is_value_model=merge_options.is_value_model)
    sources: dict[str, StoredTensor] = dict(weights.plain)
    found = _architecture(checkpoint, weights.head, sources, merge_options, weights.notes)
    _drop_unsaved_buffers(sources, found, weights.notes)
    adapted: dict[str, lora.MergedTensor] = {}
    alpha = checkpoint.lora_alpha if merge_options.lora_alpha is None else merge_options.lora_alpha
    if weights.adapters:
        scale = lora.require_alpha(alpha, str(checkpoint.directory))
        adapted = lora.merged(weights.plain, weights.adapters, scale, found.transposed())
    if merge_options.lora == "merged":
        if both := sorted(found.tied.keys() & adapted.keys()):
            tied = f"{both[0]} has an adapter and is tied to {found.tied[both[0]]}"
            rule = f"{tied}: merged, it would no longer be the same"
            raise ConfigError.one("--lora", "merged", rule, "--lora adapter")
        sources.update(adapted)
    elif not adapted:
        raise ConfigError.one("--lora", "adapter", f"{checkpoint.directory} has no adapters", "--lora merged")
    conversions = found.conversions({name: source.shape for name, source in sources.items()})
    dtype = DTYPES.get(merge_options.dtype)
    return Outputs(checkpoint, found, sources, conversions, dtype, adapted, alpha, weights.notes)


def cast(block: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """A block in another dtype. Raises ConfigError for numbers that are too large for it."""
    if block.dtype == dtype:
        return block
    changed = block.to(dtype)
    if dtype == torch.float16 and not torch.equal(changed.isfinite(), block.isfinite()):
        largest = block.abs().nan_to_num(posinf=0.0).max().item()
        rule = f"{name} holds {largest:.6g}, but float16 ends at 65504"
        raise ConfigError.one("--dtype", "fp16", rule, "--dtype bf16 or --dtype fp32")
    return changed


def _architecture(
    checkpoint: Checkpoint,
    head: str,
    plain: dict[str, StoredTensor],
    merge_options: MergeOptions,
    notes: list[str],
) -> Architecture:
    """The architecture; removes tied tensors from `plain` if they really are the same."""
    shapes = {name: tensor.shape for name, tensor in plain.items()}
    tie, trust = merge_options.tie_word_embedding, merge_options.trust_remote_code
    found = architecture.describe(checkpoint.huggingface, shapes, head=head, tie=tie, trust_remote_code=trust)
    stored = {name: source for name, source in found.tied.items() if name in plain}
    differing = [name for name, source in stored.items() if not same(plain[name], plain[source])]
    if differing and tie:
        rule = f"{differing[0]} and {found.tied[differing[0]]} hold different numbers"
        raise ConfigError.one("--tie-word-embedding", None, rule, "merge without --tie-word-embedding")
    if differing:
        tied = f"config.json ties {differing[0]} to {found.tied[differing[0]]}"
        notes.append(f"{tied}, but they differ: both are written, untied")
        found = replace(found, tied={}, retied=False)
    for name in found.tied:
        plain.pop(name, None)
    return found


def _drop_unsaved_buffers(plain: dict[str, StoredTensor], found: Architecture, notes: list[str]) -> None:
    extra = sorted(found.buffers & plain.keys())
    for name in extra:
        del plain[name]
    if extra:
        notes.append(f"{len(extra)} tables that the model computes itself are left out, such as {extra[0]}")


def _split(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in memory as blocks of rows."""
    rows = tensor if tensor.dim() else tensor.view(1)
    for first, last in block_rows(tuple(rows.shape), rows.dtype):
        yield rows[first:last]
