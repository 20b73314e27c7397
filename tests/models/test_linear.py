"""Products by oneDNN, and gradients by OpenBLAS: right to float32's rounding, with the bits that sampling
relies on, and only where they suit."""

from __future__ import annotations

import pytest
import torch
from models.onednn import noted_by_onednn
from torch import Tensor, nn

from hydraflow.models import decoding_sizes, openblas
from hydraflow.models import linear as products
from hydraflow.models.adapters import is_linear
from hydraflow.models.linear import (
    Linear,
    add_product,
    linear,
    multiply,
    multiply_back,
    speed_up_linears,
)

SIZES = [(128, 128), (128, 384), (512, 300), (300, 512)]
"""(K, N)."""


@pytest.fixture(autouse=True)
def on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """oneDNN multiplies, wherever this runs, and OpenBLAS does not; gives the matrices that oneDNN was
    given."""
    monkeypatch.setattr(openblas, "is_faster", lambda: False)
    return noted_by_onednn(monkeypatch, products)


@pytest.fixture(params=["oneDNN", "OpenBLAS"])
def gradients_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that computes gradients."""
    monkeypatch.setattr(openblas, "is_faster", lambda: request.param == "OpenBLAS")
    return request.param


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), SIZES)
def test_values_and_gradients_are_those_of_float64(
    inner: int, outer: int, with_bias: bool, on_any_cpu: list[Tensor], gradients_by: str
) -> None:
    given = [drawn(3, 40, inner), drawn(outer, inner, seed=1)]
    given += [drawn(outer, seed=2)] if with_bias else []
    found = [one.clone().requires_grad_() for one in given]
    exact = [one.double().requires_grad_() for one in given]
    # a gradient with strides of 0, as that of a sum
    for layer, one in ((linear, found), (nn.functional.linear, exact)):
        (layer(*one) * one[0].mean() + layer(*one)[:, :1].expand(-1, 40, -1)).sum().backward()
    two_forward_passes, with_gradients = 2, 4
    if gradients_by == "OpenBLAS":
        assert len(on_any_cpu) == two_forward_passes
    else:
        assert len(on_any_cpu) >= with_gradients
    for mine, wanted in zip(found, exact, strict=True):
        assert mine.grad is not None and wanted.grad is not None
        apart = (mine.grad - wanted.grad).abs().max() / wanted.grad.abs().max()
        assert apart < 3e-6, apart
    torch.testing.assert_close(linear(*given), nn.functional.linear(*given), rtol=0, atol=2e-4)


@pytest.mark.parametrize("added", [2**20, 1])
def test_products_into_memory_and_sums_of_products(
    added: int, gradients_by: str, on_any_cpu: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "ADDED", added)  # 1: in parts of LEAST_INNER rows
    x, weight, bias = drawn(64, 128), drawn(256, 128, seed=1), drawn(256, seed=2)
    out = torch.empty(64, 256)
    assert multiply(x, weight, bias, out=out) is out
    torch.testing.assert_close(out, x @ weight.t() + bias, rtol=0, atol=1e-4)
    torch.testing.assert_close(multiply(x, weight, out=out), x @ weight.t(), rtol=0, atol=1e-4)
    by_onednn = len(on_any_cpu)
    back = torch.empty(64, 128)
    assert multiply_back(out, weight, out=back) is back
    torch.testing.assert_close(back, out @ weight, rtol=1e-5, atol=1e-3)
    first = add_product(None, out, x)
    total = add_product(first, out, x)
    assert total is first
    torch.testing.assert_close(total, 2 * out.t() @ x, rtol=1e-5, atol=1e-2)
    assert (len(on_any_cpu) == by_onednn) == (gradients_by == "OpenBLAS")


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_matrix_too_large_for_onednn_is_multiplied_by_openblas(
    with_bias: bool, on_any_cpu: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, out = drawn(64, 128), drawn(256, 128, seed=1), torch.empty(64, 256)
    bias = drawn(256, seed=2) if with_bias else None
    monkeypatch.setattr(products, "MOST_WEIGHTS", weight.numel() - 1)
    monkeypatch.setattr(decoding_sizes, "MOST_WEIGHTS", weight.numel() - 1)
    real, multiplied = openblas.product, []
    monkeypatch.setattr(
        openblas, "product", lambda *given, **named: multiplied.append(given) or real(*given, **named)
    )
    wanted = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(multiply(x, weight, bias, out=out), wanted, rtol=0, atol=1e-4)
    assert not multiplied
    monkeypatch.setattr(openblas, "is_faster", lambda: True)
    torch.testing.assert_close(multiply(x, weight, bias, out=out), wanted, rtol=0, atol=1e-4)
    multiply(x[:15], weight, bias, out=out[:15])
    assert len(multiplied) == 1 and not on_any_cpu, "a few rows are multiplied by torch"


@pytest.mark.parametrize(("inner", "outer"), [*SIZES, (896, 1200), (128, 136)])
def test_a_row_has_the_same_bits_beside_any_others(inner: int, outer: int) -> None:
    """From 16 rows on, and with any columns: the law of `generation/decode.py` and `lean.py`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weight = drawn(400, inner), drawn(outer, inner, seed=1)
        whole = linear(x, weight)
        for rows in (16, 17, 31, 48, 100, 256):
            assert torch.equal(linear(x[:rows], weight), whole[:rows])
        for cut in (outer // 4 // 8 * 8, 64):  # what is beside it changes nothing
            assert torch.equal(linear(x, weight[:cut]), whole[:, :cut])
            assert torch.equal(linear(x, weight[cut:]), whole[:, cut:])
    finally:
        torch.set_num_threads(before)


def test_only_products_that_gain_are_given_away(on_any_cpu: list[Tensor]) -> None:
    x, weight = drawn(64, 128), drawn(128, 128, seed=1)
    linear(x[:15], weight), linear(x[:, :127], weight[:, :127])
    linear(x.double(), weight.double()), linear(x.bfloat16(), weight.bfloat16())
    assert not on_any_cpu
    linear(x, weight), linear(x.view(4, 16, 128), weight)
    assert len(on_any_cpu) == 2


def test_plain_layers_are_replaced_and_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Router(nn.Linear):
        """Has a forward of its own."""

    model = nn.ModuleDict({"plain": nn.Linear(128, 128), "other": Router(128, 128)})
    weight, x = model["plain"].weight, drawn(32, 128)
    wanted = model["plain"](x)
    speed_up_linears(model)
    assert type(model["plain"]) is Linear and type(model["other"]) is Router
    assert model["plain"].weight is weight and is_linear(model["plain"])
    torch.testing.assert_close(model["plain"](x), wanted, rtol=0, atol=1e-5)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    untouched = nn.ModuleDict({"plain": nn.Linear(128, 128)})
    speed_up_linears(untouched)
    assert type(untouched["plain"]) is nn.Linear
