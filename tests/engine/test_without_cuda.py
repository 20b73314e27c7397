"""Megatron-Core without CUDA: which sources are rewritten, and when."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import torch
from megatron import core
from megatron.core.tensor_parallel import layers

from hydraflow.device import gpu_count
from hydraflow.engine.megatron import no_cuda, without_cuda
from hydraflow.engine.megatron.without_cuda import PRODUCTS, STAND_IN, rewritten
from hydraflow.models import linear, openblas

HERE = f"__import__('sys').modules['{STAND_IN}']."
OURS = f"__import__('sys').modules['{PRODUCTS}']."
pytestmark = pytest.mark.skipif(gpu_count() > 0, reason="nothing is rewritten where there is CUDA")


def has_finder() -> bool:
    return any(isinstance(finder, without_cuda._Finder) for finder in sys.meta_path)


@pytest.fixture
def no_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before `install`."""
    others = [finder for finder in sys.meta_path if not isinstance(finder, without_cuda._Finder)]
    monkeypatch.setattr(sys, "meta_path", others)


REWRITTEN = {
    "torch.cuda.synchronize()": f"{HERE}synchronize()",
    "x.to(torch.cuda.current_device())": f"x.to({HERE}current_device())",
    "x.cuda(torch.cuda.current_device())": "x.cpu()",
    "x.cuda(non_blocking=True)": "x.cpu()",
    "from torch.cuda import Stream": f"from {STAND_IN} import Stream",
    "import torch.cuda.nvtx": "import torch.cuda.nvtx",
    "torch.zeros(1, device='cuda:0')": "torch.zeros(1, device='cpu')",
    "torch.device('cuda', index)": "torch.device('cpu')",
    "f'cuda:{rank}'": "'cpu'",
    "DDP(model, device_ids=[rank])": "DDP(model, device_ids=None)",
    "'torch.cuda.FloatTensor'": "'torch.FloatTensor'",
    "tensor.record_stream(torch.cuda.current_stream())": "pass",
    "try:\n    import wandb  # optional": "try:\n    raise ImportError  # optional",
    "torch.empty(1, pin_memory=True)": "torch.empty(1, pin_memory=False)",
    "torch.distributed.all_gather(output_list, input_, group=group)": (
        f"{HERE}all_gather(output_list, input_, group)"
    ),
    "torch.distributed.reduce_scatter(output, input_list, group=group)": (
        f"{HERE}reduce_scatter(output, input_list, group)"
    ),
    "y = torch.matmul(total_input, weight.t())": f"y = {OURS}linear(total_input, weight)",
    "grad_output.matmul(weight)": f"{OURS}linear(grad_output.contiguous(), weight.t())",
    "grad_output.t().matmul(total_input)": f"{OURS}add_product(None, grad_output, total_input)",
    "torch.matmul(x, self.weight.t())": "torch.matmul(x, self.weight.t())",
    "config.use_cuda_graph": "config.use_cuda_graph",
}


@pytest.mark.parametrize("source", REWRITTEN)
def test_what_a_line_becomes(source: str) -> None:
    assert rewritten(source) == REWRITTEN[source]


def test_the_rules_are_for_the_installed_version() -> None:
    assert importlib.metadata.version("megatron-core").startswith("0.16.")


def sources() -> list[Path]:
    assert core.__file__ is not None
    return sorted(Path(core.__file__).parent.rglob("*.py"))


def test_every_source_compiles_and_names_no_device_of_cuda() -> None:
    """Names in f-strings and in text that is not a device's name are left."""
    wrong, count = [], 0
    for path in sources():
        count += 1
        source = rewritten(path.read_text(encoding="utf-8"))
        compile(source, str(path), "exec", dont_inherit=True)
        for node in ast.walk(ast.parse(source, str(path))):
            is_attribute = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
            is_device = isinstance(node, ast.Constant) and node.value in ("cuda", "cuda:0")
            if is_attribute or is_device:
                wrong.append(f"{path}: {ast.unparse(node)}")
    assert not wrong
    assert count > 200


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("trained", [True, False])
def test_linear_layers_multiply_with_the_faster_library(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their outputs and gradients are those of float64, also of a gradient with strides of 0."""
    monkeypatch.setattr(openblas, "is_faster", lambda: False)
    multiply, products = linear.onednn_product, []
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(linear, "onednn_product", lambda *given: products.append(given) or multiply(*given))
    draw = torch.Generator().manual_seed(0)
    x, weight, sent = (
        torch.randn(*shape, generator=draw) for shape in ((40, 1, 128), (192, 128), (1, 1, 192))
    )
    results = []
    for dtype in (torch.float64, torch.float32):
        given = [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(trained)]
        if trained:
            plain = layers.LinearWithGradAccumulationAndAsyncCommunication
            found = plain.apply(*given, None, False, False, False, None, None, None)
        else:
            found = layers.LinearWithFrozenWeight.apply(*given, None, False, None)
        found.backward(sent.to(dtype).expand_as(found))
        results.append([found.detach(), *(one.grad for one in given if one.requires_grad)])
    assert len(products) == len(results[0])
    for exact, mine in zip(*results, strict=True):
        assert float((mine - exact).abs().max() / exact.abs().max()) < 1e-6


def test_modules_of_the_core_are_rewritten_and_no_others() -> None:
    assert has_finder()
    finder = without_cuda._Finder()
    spec = finder.find_spec("megatron.core.parallel_state", core.__path__)
    assert spec is not None and isinstance(spec.loader, without_cuda._Loader)
    code = spec.loader.get_code("megatron.core.parallel_state")
    assert code is not None and code.co_filename.endswith("parallel_state.py")
    assert isinstance(core.parallel_state.__spec__.loader, without_cuda._Loader)
    for name in ("torch.cuda", "megatron", "megatron.core_of_others", "transformers"):
        assert finder.find_spec(name, None) is None
    assert torch.cuda.is_available.__module__ == "torch.cuda"


def test_nothing_is_rewritten_where_there_is_cuda(no_finder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_cuda, "gpu_count", lambda: 1)
    without_cuda.install()
    assert not has_finder()


def test_installed_twice_is_once() -> None:
    before = list(sys.meta_path)
    without_cuda.install()
    assert sys.meta_path == before


def test_too_late_is_an_error(no_finder: None) -> None:
    with pytest.raises(AssertionError, match="Megatron-Core has already been imported"):
        without_cuda.install()


def test_the_stand_in_says_that_there_is_no_cuda() -> None:
    assert not no_cuda.is_available() and no_cuda.current_device() == torch.device("cpu")
    with no_cuda.Stream() as stream:
        assert isinstance(stream.record_event(), no_cuda.Event)
    assert no_cuda.CUDAGraph is torch.cuda.CUDAGraph, "what it lacks is torch's own"
    state = no_cuda.get_rng_state()
    first = torch.rand(3)
    no_cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_all_of_the_stand_in_is_called() -> None:
    """By a name that Megatron-Core has after torch.cuda or torch.distributed, or on its streams."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in sources())
    assert no_cuda.__file__ is not None
    for node in ast.parse(Path(no_cuda.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith(("_", "nothing")):
            assert re.search(rf"torch\.(cuda|distributed)(\.| import .*){node.name}\b", source), node.name
