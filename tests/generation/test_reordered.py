"""Copies of weights for decoding: which products use them, their bits, and how long they exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generation.test_native import SMALL, make, make_request, rows, weights
from models.onednn import noted_by_onednn
from torch import Tensor, nn
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

from hydraflow.device import cpu_has_bf16, mkl_has_avx512
from hydraflow.generation import decode, reordered
from hydraflow.generation.base import SamplingParams
from hydraflow.generation.native import NativeEngine
from hydraflow.generation.reordered import ReorderingLinear, joined, let_linears_reorder, reordering_linears
from hydraflow.generation.sampling import choose
from hydraflow.models import linear as linears
from hydraflow.models.decoding_sizes import LEAST_INNER, LEAST_ROWS
from hydraflow.models.linear import linear

WIDE = SMALL | dict(hidden_size=LEAST_INNER, intermediate_size=2 * LEAST_INNER)
CONFIGS: dict[str, PreTrainedConfig] = {
    "a step of our own": LlamaConfig(**WIDE),
    "the model's own forward": MixtralConfig(**WIDE, num_local_experts=4, sliding_window=None),
}
PARAMS = SamplingParams(max_tokens=8)
NO_BF16 = pytest.mark.skipif(not cpu_has_bf16(), reason="oneDNN multiplies bfloat16 only with AVX-512")
TYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NO_BF16)], ids=["fp32", "bf16"]
)


@pytest.fixture(autouse=True)
def on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """oneDNN multiplies, wherever this runs; gives the copies that it was given."""
    return noted_by_onednn(monkeypatch, reordered)


@pytest.fixture
def by_mkl(on_any_cpu: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """MKL multiplies float32, as on Intel's processors; gives the weights that were transposed."""
    if not mkl_has_avx512() or not torch.backends.mkl.is_available():
        pytest.skip("its products have these bits only with AVX-512")
    found: list[Tensor] = []
    real = reordered._transposed

    def transposed(weight: Tensor) -> Tensor:
        found.append(weight)
        return real(weight)

    monkeypatch.setattr(linears, "onednn_is_faster", lambda: False)
    monkeypatch.setattr(reordered, "_transposed", transposed)
    return found


def layer_of(inner: int, outer: int, dtype: torch.dtype, bias: bool = False) -> ReorderingLinear:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(inner, outer, bias=bias, dtype=dtype).requires_grad_(False))
    let_linears_reorder(layer)
    [found] = reordering_linears(layer)
    return found


def assert_same_bits(layer: ReorderingLinear, x: Tensor) -> Tensor:
    """With a copy, which it keeps, as without: the result for all rows of x (600, K)."""
    whole = linear(x, layer.weight, layer.bias)
    layer.keep_copy()
    for count in (LEAST_ROWS, 17, 64, 129, 300, 600):
        assert torch.equal(layer(x[:count]), whole[:count]), f"{count} rows"
    several = whole[:40].view(2, 20, -1)
    assert torch.equal(layer(x[:40].view(2, 20, -1)), several)
    return whole


@TYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(128, 384), (384, 128), (200, 514), (512, 17)])
@torch.inference_mode()
def test_a_copy_changes_no_bit_of_any_row(
    inner: int, outer: int, bias: bool, dtype: torch.dtype, on_any_cpu: list[Tensor]
) -> None:
    layer = layer_of(inner, outer, dtype, bias)
    x = torch.randn(600, inner, dtype=dtype)
    whole = assert_same_bits(layer, x)
    assert len({id(copy) for copy in on_any_cpu}) == 1, "it is made once"
    few = linear(x[: LEAST_ROWS - 1], layer.weight, layer.bias)
    assert torch.equal(layer(x[: LEAST_ROWS - 1]), few), "too few rows for it"
    layer.drop_copy()
    assert torch.equal(layer(x), whole) and len(on_any_cpu) == 7


@pytest.mark.parametrize(
    ("inner", "dtype"), [(LEAST_INNER - 1, torch.float32), (128, torch.float64), (128, torch.float16)]
)
@torch.inference_mode()
def test_products_that_are_not_onednns_need_no_copy(
    inner: int, dtype: torch.dtype, on_any_cpu: list[Tensor]
) -> None:
    layer = layer_of(inner, 64, dtype)
    layer.keep_copy()
    layer(torch.randn(LEAST_ROWS, inner, dtype=dtype))
    assert not on_any_cpu


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("inner", "outer"), [(128, 384), (384, 128), (200, 514), (512, 17), (768, 2), (1152, 1000), (3072, 64)]
)
@torch.inference_mode()
def test_a_transposed_copy_changes_no_bit_of_any_row(
    inner: int, outer: int, bias: bool, by_mkl: list[Tensor]
) -> None:
    layer = layer_of(inner, outer, torch.float32, bias)
    x = torch.randn(600, inner)
    whole = assert_same_bits(layer, x)
    assert len(by_mkl) == 1, "it is made once"
    layer.drop_copy()
    assert torch.equal(layer(x), whole) and len(by_mkl) == 1


@pytest.mark.parametrize(
    ("inner", "dtype"), [(784, torch.float32), (1024, torch.float32), (128, torch.float64)]
)
@torch.inference_mode()
def test_products_with_other_bits_when_transposed_need_no_copy(
    inner: int, dtype: torch.dtype, by_mkl: list[Tensor]
) -> None:
    layer = layer_of(inner, 64, dtype)
    layer.keep_copy()
    layer(torch.randn(LEAST_ROWS, inner, dtype=dtype))
    assert not by_mkl


def test_a_joined_layer_follows_what_is_written_into_its_parts() -> None:
    parts = [nn.Linear(8, size, dtype=torch.float64) for size in (3, 5)]
    whole, x = joined(parts), torch.randn(4, 8, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(whole(x), torch.cat([part(x) for part in parts], -1))
        with torch.no_grad():
            for part in parts:
                part.weight.normal_()
                part.bias.normal_()
    assert joined([nn.Linear(8, 3, bias=False), nn.Linear(8, 5, bias=False)]).bias is None


@TYPES
@pytest.mark.parametrize("name", CONFIGS)
def test_samples_are_the_same_and_no_copy_outlives_them(
    name: str, dtype: torch.dtype, on_any_cpu: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = make(CONFIGS[name], dtype), make(CONFIGS[name], dtype)
    for parameter in other.parameters():
        parameter.data *= 0.5
    request = make_request([3, 9, 4], samples=6)
    engine = NativeEngine(model, max_num_seqs=6)  # three waves
    found = rows(engine.generate(request, PARAMS))
    assert on_any_cpu
    layers = [*reordering_linears(model), *getattr(engine._forward._lean, "linears", ())]
    assert all(layer._copy is None for layer in layers)
    engine.update_weights(weights(other).items())
    updated = rows(engine.generate(request, PARAMS))
    monkeypatch.setattr(ReorderingLinear, "keep_copy", lambda self: None)
    on_any_cpu.clear()
    assert updated == rows(NativeEngine(other).generate(request, PARAMS)) != found
    assert found == rows(NativeEngine(make(CONFIGS[name], dtype)).generate(request, PARAMS))
    assert not on_any_cpu


@pytest.mark.parametrize("name", CONFIGS)
def test_samples_are_the_same_with_transposed_copies(
    name: str, by_mkl: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request([3, 9, 4], samples=6)
    engine = NativeEngine(make(CONFIGS[name]), max_num_seqs=6)
    found = rows(engine.generate(request, PARAMS))
    assert by_mkl and engine._forward._keepers is None
    monkeypatch.setattr(ReorderingLinear, "keep_copy", lambda self: None)
    assert found == rows(NativeEngine(make(CONFIGS[name])).generate(request, PARAMS))


def test_an_error_while_sampling_leaves_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NativeEngine(make(CONFIGS["the model's own forward"]))
    copied_then: list[bool] = []

    def fail_later(*given: Any) -> Any:
        copied_then.append(any(layer._copy is not None for layer in engine._forward._keepers or ()))
        if len(copied_then) == 3:
            raise MemoryError
        return choose(*given)

    monkeypatch.setattr(decode, "choose", fail_later)
    with pytest.raises(MemoryError):
        engine.generate(make_request([5]), PARAMS)
    assert copied_then == [False, True, True] and engine._forward._keepers is None
