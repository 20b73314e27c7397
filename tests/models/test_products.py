"""Attention by matrix products, against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hydraflow.models import openblas, products
from hydraflow.models.attention import attend_rows, plan_rows

HEADS, DIM = 4, 8


@pytest.fixture(autouse=True)
def on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that is not Intel's, without OpenBLAS."""
    monkeypatch.setattr(openblas, "is_faster", lambda: False)
    monkeypatch.setattr(products, "mkl_has_avx512", lambda: False)


def leaves(rows: int, width: int, kv: int, wider: int = 2) -> list[torch.Tensor]:
    """Values are `wider` than keys."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(rows, width, heads, dim) for heads, dim in ((HEADS, DIM), (kv, DIM), (kv, DIM + wider))]
    made = [torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes]
    return [one.transpose(1, 2).requires_grad_() for one in made]


@pytest.mark.parametrize("block", [64, 9, 4, 1])
@pytest.mark.parametrize("at_a_time", [1, 2**22])
@pytest.mark.parametrize(("kv", "window"), [(4, None), (2, None), (1, None), (2, 3)])
@pytest.mark.parametrize(("by_torch", "wider"), [(False, 2), (True, 0), (True, 2)])
def test_results_and_gradients_are_those_of_torch(
    kv: int,
    window: int | None,
    at_a_time: int,
    block: int,
    by_torch: bool,
    wider: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where torch's kernel computes the forward pass, if it can."""
    monkeypatch.setattr(products, "ELSEWHERE", products.Measured({}, at_a_time, by_torch))
    monkeypatch.setattr(products, "_BLOCK", block)
    q, k, v = leaves(3, 9, kv, wider)
    seen = torch.ones(9, 9, dtype=torch.bool).tril().triu(1 - (window or 9))
    mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    found = products.AttendByProducts.apply(q, k, v, 0.3, mask, [9] * 3, window)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=kv < HEADS)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(wanted)
    for mine, other in zip(
        torch.autograd.grad(found, (q, k, v), grad), torch.autograd.grad(wanted, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("at_a_time", [1, 2**22])
def test_blocks_of_padding_are_left_out(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a row's own tokens have the results and gradients that they have without padding."""
    monkeypatch.setattr(products, "ELSEWHERE", products.Measured({}, at_a_time))
    monkeypatch.setattr(products, "_BLOCK", 4)
    lengths = (9, 8, 5, 1)
    computed = torch.zeros(4, 2, 2, 9)
    for rows, heads, block, _, _ in products._blocks(torch.empty(4, 2, 2, 9, DIM), lengths):
        computed[rows, heads, :, block] += 1
    for row, length in enumerate((9, 8, 8, 4)):
        assert (computed[row, ..., :length] == 1).all() and (computed[row, ..., length:] == 0).all()

    def found(rows: slice, width: int, lengths: tuple[int, ...]) -> list[torch.Tensor]:
        tensors = [one.detach()[rows, :, :width].requires_grad_() for one in leaves(4, 9, 2)]
        mask = torch.full((width, width), -torch.inf, dtype=torch.float64).triu(1)
        out = products.AttendByProducts.apply(*tensors, 0.3, mask, lengths, None)
        real = torch.zeros(out.shape[0], 1, width, 1, dtype=torch.bool)
        for row, length in enumerate(lengths):
            real[row, :, :length] = True
        return [out.detach(), *torch.autograd.grad(out, tensors, out.detach().cos() * real)]

    padded = found(slice(4), 9, lengths)
    for row, length in enumerate(lengths):
        alone = found(slice(row, row + 1), length, (length,))
        for mine, other in zip(padded, alone, strict=True):
            torch.testing.assert_close(mine[row : row + 1, :, :length], other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [64, 16, 1])
@pytest.mark.parametrize(("window", "size"), [(None, 1.0), (5, 1.0), (None, 3.0)])
@pytest.mark.parametrize("on_intel", [False, True])
def test_rows_in_bfloat16_are_as_exact_as_in_torchs_kernel(
    on_intel: bool, window: int | None, size: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of outputs and gradients against float64, packed rows of different lengths; also with large
    scores."""
    monkeypatch.setattr(products, "mkl_has_avx512", lambda: on_intel)
    monkeypatch.setattr(products, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(products, "_BLOCK", block)
    plan = plan_rows(torch.tensor([160, 7, 33, 1]).numpy(), torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    exact = [torch.randn(201, heads, 32, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)]
    exact = [exact[0] * size, exact[1] * size, exact[2]]
    grad = torch.randn(201, 4, 32, generator=draw, dtype=torch.float64)

    def errors(dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [one.to(dtype).requires_grad_() for one in exact]
        out = attend_rows(*tensors, plan, None, window)
        return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(dtype))]

    def relative(found: list[torch.Tensor]) -> list[float]:
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]

    wanted = errors(torch.float64)
    ours = relative(errors(torch.bfloat16))
    monkeypatch.setattr(products, "are_faster", lambda query: False)
    theirs = relative(errors(torch.bfloat16))
    assert max(theirs) < 0.02 and all(a < 1.3 * b for a, b in zip(ours, theirs, strict=True))
    assert ours[1:] != theirs[1:], "both were computed in the same way"
    assert (ours[0] == theirs[0]) == (on_intel and window is None)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("by_openblas", [False, True])
def test_rows_in_float32_are_as_exact_as_in_torchs_kernel(
    by_openblas: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the longest row of a group has the same bits alone."""
    monkeypatch.setattr(openblas, "is_faster", lambda: by_openblas)
    long = products.FASTER_BY_OPENBLAS[0] if by_openblas else products.ELSEWHERE.faster[torch.float32][0]
    lengths = [long, 5, long, long + 70, 40]
    draw = torch.Generator().manual_seed(1)
    exact = [torch.randn(sum(lengths), heads, 32, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)]
    grad = torch.randn(sum(lengths), 4, 32, generator=draw, dtype=torch.float64)

    def found(dtype: torch.dtype, first: int = 0, last: int = len(lengths)) -> list[torch.Tensor]:
        here = slice(sum(lengths[:first]), sum(lengths[:last]))
        tensors = [one[here].to(dtype).requires_grad_() for one in exact]
        plan = plan_rows(torch.tensor(lengths[first:last]).numpy(), torch.device("cpu"))
        out = attend_rows(*tensors, plan, None, window)
        return [out.detach(), *torch.autograd.grad(out, tensors, grad[here].to(dtype))]

    def errors(dtype: torch.dtype) -> list[float]:
        pairs = zip(found(dtype), found(torch.float64), strict=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    whole, alone = found(torch.float32), found(torch.float32, 3, 4)
    assert all(torch.equal(a[-long - 110 : -40], b) for a, b in zip(whole, alone, strict=True))
    ours = errors(torch.float32)
    monkeypatch.setattr(products, "are_faster", lambda query: False)
    theirs = errors(torch.float32)
    assert max(ours) < 1e-6 and all(a < 1.3 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    assert ours != theirs, "both were computed in the same way"


@pytest.mark.parametrize("scale", [None, 0.2])
def test_layers_of_several_windows_share_a_plan(scale: float | None) -> None:
    """By products in float32, and by torch's kernel in float64; values are wider than keys."""
    lengths = torch.tensor([products.ELSEWHERE.faster[torch.float32][0], 40, 9]).numpy()
    draw = torch.Generator().manual_seed(2)
    sizes = ((HEADS, DIM), (2, DIM), (2, DIM + 2))
    tensors = [torch.randn(lengths.sum(), *size, generator=draw, dtype=torch.float64) for size in sizes]
    plan = plan_rows(lengths, torch.device("cpu"))
    for window in (5, None, 3):
        wanted = []
        for q, k, v in zip(*(x.split(lengths.tolist()) for x in tensors), strict=True):
            seen = torch.ones(len(q), len(q), dtype=torch.bool).tril().triu(1 - (window or len(q)))
            k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or DIM**-0.5)
            p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            wanted.append(torch.einsum("hqk,khd->qhd", p, v))
        for dtype, atol in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
            found = attend_rows(*(x.to(dtype) for x in tensors), plan, scale, window)
            torch.testing.assert_close(found.double(), torch.cat(wanted), rtol=0, atol=atol)


def test_only_rows_in_bfloat16_on_a_cpu_that_multiplies_in_it_and_long_ones_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on(dtype: torch.dtype, width: int, device: str = "cpu") -> bool:
        return products.are_faster(torch.empty(1, 2, width, 1, dtype=dtype, device=device))

    monkeypatch.setattr(products, "cpu_has_bf16", lambda: True)
    assert on(torch.bfloat16, 1) and on(torch.bfloat16, 2048) and not on(torch.bfloat16, 2049)
    assert on(torch.float32, 192) and on(torch.float32, 1024)
    assert not on(torch.float32, 191) and not on(torch.float32, 1025)
    assert not on(torch.bfloat16, 8, "meta") and not on(torch.float64, 256)
    monkeypatch.setattr(products, "cpu_has_bf16", lambda: False)
    assert not on(torch.bfloat16, 8) and on(torch.float32, 256)
    monkeypatch.setattr(openblas, "is_faster", lambda: True)
    assert on(torch.float32, 16) and on(torch.float32, 2048) and not on(torch.bfloat16, 256)
    assert not on(torch.float32, 15) and not on(torch.float32, 2049)
    assert not on(torch.float64, 256) and not on(torch.float32, 256, "meta")


def test_only_short_rows_in_bfloat16_where_mkl_has_avx_512(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(dtype: torch.dtype, width: int) -> bool:
        return products.are_faster(torch.empty(1, 2, width, 1, dtype=dtype))

    monkeypatch.setattr(products, "mkl_has_avx512", lambda: True)
    monkeypatch.setattr(products, "cpu_has_bf16", lambda: True)
    assert on(torch.bfloat16, 1) and on(torch.bfloat16, 400) and not on(torch.bfloat16, 401)
    assert not on(torch.float32, 224) and not on(torch.float32, 1000)
