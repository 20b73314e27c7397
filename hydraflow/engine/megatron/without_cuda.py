"""Runs Megatron-Core without CUDA: its sources are rewritten as text while they are imported.

Megatron-Core names torch.cuda and the device "cuda" in some 500 lines, and has no option for another device.
Only modules below `megatron.core` are changed, never torch; with CUDA nothing is. The rules are for
Megatron-Core 0.16, which `setup.py` requires. In: an import. Out: the module, on a CPU. Left out on purpose:
what Megatron-Core takes from Transformer Engine (`layers.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from hydraflow.device import gpu_count

STAND_IN = "hydraflow.engine.megatron.no_cuda"
"""The module that replaces torch.cuda."""
PRODUCTS = "hydraflow.models.linear"
"""The module that computes the matrix products of Megatron-Core's linear layers."""

_EXCHANGE = rf"__import__('sys').modules['{STAND_IN}'].\1(\2, group)"
_LINEAR = f"__import__('sys').modules['{PRODUCTS}'].linear"
_ADD_PRODUCT = f"__import__('sys').modules['{PRODUCTS}'].add_product"
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\bdevice_ids=\[[^\]]*\]", "device_ids=None"),
        # an all-to-all's splits must become plain numbers on a CPU as well
        (r"torch\.is_tensor\(tensor\) and tensor\.is_cuda", "torch.is_tensor(tensor)"),
        # gloo requires tensors of equal length
        (r"torch\.distributed\.(all_gather|reduce_scatter)\((output\w*, input\w*), group=group\)", _EXCHANGE),
        # linear layers, forward and both gradients
        (r"torch\.matmul\((\w*input), weight\.t\(\)\)", rf"{_LINEAR}(\1, weight)"),
        (r"\bgrad_output\.matmul\(weight\)", f"{_LINEAR}(grad_output.contiguous(), weight.t())"),
        (r"\bgrad_output\.t\(\)\.matmul\(total_input\)", f"{_ADD_PRODUCT}(None, grad_output, total_input)"),
        (r"tensor\.record_stream\([^)]*\)+", "pass"),
        (r"(['\"])torch\.cuda\.(\w*Tensor)", r"\1torch.\2"),
        (r"\.cuda\((torch\.cuda\.current_device\(\)|non_blocking=\w+|)\)", ".cpu()"),
        (r"from torch\.cuda import", f"from {STAND_IN} import"),
        (r"(?<!import )(?<!from )\btorch\.cuda\.", f"__import__('sys').modules['{STAND_IN}']."),
        (r"f?(['\"])cuda(:0)?\1", "'cpu'"),
        (r"torch\.device\('cpu', *[^()]*\)", "torch.device('cpu')"),
        (r"f'cuda:\{[^}]*\}'", "'cpu'"),
        (r"pin_memory=True", "pin_memory=False"),
        # nothing here logs to it, and its import takes a second
        (r"\bimport wandb\b( as \w+)?", "raise ImportError"),
    )
]


def rewritten(source: str) -> str:
    """The source of a module of Megatron-Core for a machine without CUDA.

    >>> rewritten('x = torch.zeros(2, device="cuda").cuda()')
    "x = torch.zeros(2, device='cpu').cpu()"
    """
    for pattern, replacement in _RULES:
        source = pattern.sub(replacement, source)
    return source


def install() -> None:
    """Must be called before Megatron-Core is imported; does nothing with CUDA."""
    if gpu_count() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    assert "megatron.core" not in sys.modules, "Megatron-Core has already been imported"
    for name in (STAND_IN, PRODUCTS):
        importlib.import_module(name)
    sys.meta_path.insert(0, _Finder())
    # it warns once per layer that CPU and GPU share a random state, which is true here
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        return compile(rewritten(source), path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not f"{fullname}.".startswith("megatron.core."):
            return None
        spec = PathFinder.find_spec(fullname, path)
        loader: Any = spec and spec.loader
        if spec is not None and isinstance(loader, SourceFileLoader):
            spec.loader = _Loader(loader.name, loader.path)
        return spec
