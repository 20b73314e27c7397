"""Reading, comparing and making Hugging Face directories in tests of the merger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from hydraflow.model_merger.__main__ import main


def read(directory: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory, read by the safetensors library."""
    found = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})
    return found


def assert_same_bits(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same names, types, shapes and bits."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(
            got[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        ), name


def merge(checkpoint: str | Path, target: str | Path, *flags: str) -> dict[str, torch.Tensor]:
    """What `merge` writes."""
    assert main(["merge", "--local_dir", str(checkpoint), "--target_dir", str(target), *flags]) == 0
    assert not list(Path(target).parent.glob("*.unfinished"))
    return read(target)
