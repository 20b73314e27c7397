"""Passes weights to an SGLang server as files in a folder, from which it loads them.

In: (Hugging Face name, full tensor) pairs, some at a time, or parts of a tensor, which are assembled because
files hold whole tensors. Out: safetensors files, which cannot contain code. Left out on purpose: SGLang's
updates from tensors, which it unpickles, and from a process group, which it would have to share with the
trainer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hydraflow.errors import EnvironmentFault
from hydraflow.generation.weights import Arrivals, Assembly
from hydraflow.weights.buckets import Weight, sent_dtype

SHARED_MEMORY = Path("/dev/shm")
FILE_BYTES = 2**30
"""Bytes after which a file is written."""


class WeightFiles:
    """The weights of one update, checked against the model that they are for."""

    def __init__(self, folder: Path, arrivals: Arrivals, dtype: torch.dtype):
        """dtype: of floating-point weights in the files."""
        self.folder, self.arrivals, self._dtype = folder, arrivals, dtype
        self._assembly = Assembly()
        self._pending: dict[str, Tensor] = {}
        self._file_of: dict[str, Path] = {}

    def write(self, stream: Iterable[Weight]) -> None:
        """Writes some of the weights, tied ones once. ValueError: an unknown name, a wrong shape, a missing
        part, or two different tensors for tied weights. EnvironmentFault: the folder has no room."""
        for name, sent in stream:
            earlier = self.arrivals.note(name, sent)
            if (tensor := self._assembly.add(sent)) is None:
                continue
            kept = tensor.to("cpu", sent_dtype(name, tensor, self._dtype))
            if earlier != name:
                if not torch.equal(self._read(self.arrivals.first_name(earlier)), kept):
                    self.arrivals.refuse_other(name, earlier)
                continue
            self._pending[self.arrivals.first_name(name)] = kept
            if sum(one.nbytes for one in self._pending.values()) >= FILE_BYTES:
                self._flush()
        self._flush()

    def remove(self) -> None:
        """Removes the files; the next weights are those of another update."""
        for file in set(self._file_of.values()):
            file.unlink()
        self._pending, self._file_of = {}, {}

    def _flush(self) -> None:
        if not self._pending:
            return
        needed = sum(one.nbytes for one in self._pending.values())
        if (free := shutil.disk_usage(self.folder).free) < 1.01 * needed + 2**20:
            raise EnvironmentFault(
                f"{self.folder} has {free / 2**30:.2f} GiB free, but the next {needed / 2**30:.2f} GiB of"
                " weights for SGLang do not fit; enlarge /dev/shm, or set TMPDIR=<a folder with room for"
                " all weights>"
            )
        file = self.folder / f"part-{len(set(self._file_of.values())):05d}.safetensors"
        save_file(self._pending, file)
        self._file_of |= dict.fromkeys(self._pending, file)
        self._pending = {}

    def _read(self, name: str) -> Tensor:
        if name in self._pending:
            return self._pending[name]
        with safe_open(self._file_of[name], "pt") as file:
            return file.get_tensor(name)


def private_folder(needed: int, replicas: int) -> Path:
    """A new folder for weights of that many bytes: in memory if those of all replicas of a machine fit there,
    else, or if TMPDIR is set, where temporary files are."""
    in_memory = (
        "TMPDIR" not in os.environ
        and SHARED_MEMORY.is_dir()
        and shutil.disk_usage(SHARED_MEMORY).free > 1.1 * needed * replicas
    )
    return Path(tempfile.mkdtemp(prefix="hydraflow-sglang-", dir=SHARED_MEMORY if in_memory else None))
