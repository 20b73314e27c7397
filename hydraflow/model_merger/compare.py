"""`test`: a checkpoint against a Hugging Face directory, tensor by tensor, bit by bit.

In: a checkpoint, a directory. Out: a `Comparison`. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hydraflow.engine.stored.pieces import StoredTensor
from hydraflow.errors import ConfigError
from hydraflow.model_merger.opening import open_checkpoint
from hydraflow.model_merger.outputs import MergeOptions, cast, outputs_of
from hydraflow.model_merger.progress import bar
from hydraflow.model_merger.safetensors_files import read_directory


@dataclass
class Comparison:
    """How a checkpoint and a directory differ."""

    equal: int = 0
    """Tensors that hold the same bits."""
    missing: list[str] = field(default_factory=list)
    """Tensors that only the directory has."""
    extra: list[str] = field(default_factory=list)
    """Tensors that only the checkpoint has."""
    different: dict[str, str] = field(default_factory=dict)
    """Name -> what differs."""
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.extra or self.different)

    def lines(self) -> list[str]:
        """The report for the user, line by line."""
        head = f"{'same' if self.same else 'DIFFERENT'}: {self.equal} tensors are equal bit by bit"
        lines = [f"  only in the directory: {name}" for name in self.missing]
        lines += [f"  only in the checkpoint: {name}" for name in self.extra]
        lines += [f"  {name}: {what}" for name, what in self.different.items()]
        return [head, *lines, *(f"  {note}" for note in self.notes)]


def compare(
    local_dir: str, test_hf_dir: str, *, backend: str, hf_model_path: str | None, merge_options: MergeOptions
) -> Comparison:
    """Compares what `merge` would write with the directory; tensors whose dtypes differ are compared in the
    directory's. Raises ConfigError when either cannot be read."""
    directory = Path(test_hf_dir)
    if not directory.is_dir():
        raise ConfigError.one("--test_hf_dir", test_hf_dir, "there is no such directory")
    reference = read_directory(directory, field="--test_hf_dir")
    outputs = outputs_of(open_checkpoint(local_dir, backend, hf_model_path), merge_options)
    found = Comparison(notes=list(outputs.notes))
    specs = outputs.specs
    for target, source in outputs.architecture.tied.items():
        if target in reference and source in reference:
            copy, original = reference.pop(target), reference[source]  # must hold the same numbers
            if _difference(target, copy.shape, copy.blocks(), original, keep_type=True):
                tied = f"the checkpoint ties it to {source}"
                found.different[target] = f"{tied}, but the directory holds other numbers"
    found.missing = sorted(reference.keys() - specs.keys())
    found.extra = sorted(specs.keys() - reference.keys())
    both = [(specs[name].dtype, reference[name].dtype) for name in reference.keys() & specs.keys()]
    cast_from = ", ".join(sorted({str(mine) for mine, theirs in both if mine != theirs}))
    keep = merge_options.dtype != "auto"
    if cast_from and not keep:
        found.notes.append(f"compared in the directory's type; the checkpoint holds {cast_from}")
    with bar("comparing", sum(spec.nbytes for spec in specs.values())) as advance:
        for name, blocks in outputs.tensors():
            if name in reference:
                what = _difference(name, specs[name].shape, blocks, reference[name], keep_type=keep)
                if what is None:
                    found.equal += 1
                else:
                    found.different[name] = what
            advance(specs[name].nbytes)
    return found


def _difference(
    name: str, shape: tuple[int, ...], blocks: Iterator[torch.Tensor], other: StoredTensor, *, keep_type: bool
) -> str | None:
    """How two tensors differ, in words; None if they are equal."""
    if shape != other.shape:
        return f"shape {list(shape)}, {list(other.shape)} in the directory"
    at, wrong, largest = 0, 0, 0.0
    for block in blocks:
        if keep_type and block.dtype != other.dtype:
            return f"{block.dtype}, {other.dtype} in the directory"
        theirs = other.rows(at, at + len(block))
        mine = cast(block, other.dtype, name)
        at += len(block)
        unequal = _unequal(mine, theirs)
        if count := int(unequal.sum()):
            wrong += count
            ours, others = (block.reshape(-1)[unequal].double() for block in (mine, theirs))
            largest = max(largest, (ours - others).abs().max().item())
    return f"{wrong} numbers differ, by up to {largest:.3g}" if wrong else None


def _unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(numbers,) true where the bits differ."""
    ours, theirs = (x.contiguous().reshape(-1).view(torch.uint8).view(-1, x.element_size()) for x in (a, b))
    return (ours != theirs).any(-1)
