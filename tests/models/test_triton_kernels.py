"""Kernels for a GPU compute what float64 gives. On a machine without one they run in Triton's interpreter, if
Triton is installed; scripts/gpu_check.sh runs them on a GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton comes with torch for GPUs", allow_module_level=True)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it while it is imported

from models.test_compiled import arguments_of, assert_exact

from hydraflow.models import kernel_head, triton_kernels
from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.models.fused_head import FusedHead, HeadWork
from hydraflow.models.kernel_head import KernelHead
from hydraflow.models.rotary import Rotated

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = pytest.mark.parametrize(
    ("dtype", "relative"),
    [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.003)],
    ids=["fp32", "bf16", "fp16"],
)
KERNELS: dict[str, Callable[..., Tensor]] = {
    "rms_norm": lambda x, weight: triton_kernels.rms_norm(x, weight, 1e-3),
    "rotated": partial(Rotated.apply, triton_kernels.rotate),
    "swiglu": triton_kernels.swiglu,
}


@TYPES
@pytest.mark.parametrize("name", KERNELS)
def test_values_and_gradients_are_those_of_float64(name: str, dtype: torch.dtype, relative: float) -> None:
    given = [one.to(DEVICE) for one in arguments_of(name, 7, 12, dtype)]
    assert_exact(name, KERNELS[name], given, relative)


def test_heads_that_lie_before_rows_are_rotated_alike() -> None:
    x = torch.randn(1, 3, 5, 8, device=DEVICE)
    cos, sin = torch.randn(2, 5, 1, 8, device=DEVICE)
    turned = x.transpose(1, 2)
    mine, theirs = (
        triton_kernels.rotate(one, cos, sin, backward=False) for one in (turned, turned.contiguous())
    )
    assert torch.equal(mine, theirs)


@TYPES
@pytest.mark.parametrize(
    "ask",
    [
        LOG_PROBS,
        Ask(entropy=True),
        Ask(entropy=True, entropy_is_trained=False),
        Ask(temperature=0.7),
        Ask(temperature=0.7, entropy=True),
    ],
    ids=["log_probs", "entropy", "untrained_entropy", "temperature", "both"],
)
@pytest.mark.parametrize("chunk", [4, 64])
def test_the_head_is_the_fused_head(ask: Ask, chunk: int, dtype: torch.dtype, relative: float) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=draw).to(DEVICE, dtype) for shape in [(11, 16), (40, 16), (40,)]]
    targets = torch.randint(40, (11,), generator=draw).to(DEVICE)

    def results(function: type[torch.autograd.Function], dtype: torch.dtype) -> list[Tensor]:
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        log_probs, more = function.apply(*leaves, targets, HeadWork(ask, lambda logits: logits, chunk))
        total = log_probs.pow(2).sum()
        if ask.entropy and ask.entropy_is_trained:
            total = total + more.pow(2).sum()
        return [log_probs, *([] if more is None else [more]), *torch.autograd.grad(total, leaves)]

    with patch.object(kernel_head, "kernels_for", return_value=triton_kernels):
        mine = results(KernelHead, dtype)
    exact = results(FusedHead, torch.float64)
    for found, wanted in zip(mine, exact, strict=True):
        assert (found.double() - wanted).norm() < relative * wanted.norm()


def test_small_entropies_are_kept_and_impossible_tokens_do_no_harm() -> None:
    logits = torch.full((2, 9000), -torch.inf, device=DEVICE)
    logits[0, :3] = torch.tensor([100.0, 85.0, 84.0])
    logits[1, -2:] = torch.tensor([40.0, 30.0])  # all that a program reads first is impossible
    targets = torch.tensor([1, 8999], device=DEVICE)
    found = triton_kernels.score(logits, targets, 1.0)
    wide = logits.double().log_softmax(-1)
    exact = wide.gather(1, targets[:, None])[:, 0], torch.special.entr(wide.exp()).sum(-1)
    for mine, wanted in zip(found, exact, strict=False):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-6, atol=2e-7)


def test_a_frozen_norm_passes_the_same_gradient_on() -> None:
    x, weight = torch.randn(5, 12, device=DEVICE, requires_grad=True), torch.randn(12, device=DEVICE)
    of_x = [
        torch.autograd.grad(triton_kernels.rms_norm(x, one, 1e-3).sum(), x)[0]
        for one in (weight, weight.clone().requires_grad_())
    ]
    assert torch.equal(*of_x)


def test_the_head_takes_what_its_kernels_compute() -> None:
    hidden, targets = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)

    def taken(ask: Ask = LOG_PROBS, targets: Tensor = targets, factor: float | None = None) -> bool:
        process = (lambda logits: logits) if factor is None else (lambda logits: logits * factor)
        return kernel_head.suits(hidden, targets, HeadWork(ask, process, 2))

    assert not taken()  # on a CPU
    with patch.object(kernel_head, "kernels_for", return_value=triton_kernels):
        assert taken() and taken(Ask(entropy=True, temperature=2.0))
        others = (Ask(greedy_match=True), Ask(sum_pi_squared=True), Ask(likeliest=2, among=4))
        assert not any(taken(ask) for ask in others)
        assert not taken(targets=torch.zeros(3, 2, dtype=torch.int64)) and not taken(factor=2.0)


def test_a_kernel_can_be_tried_out() -> None:
    triton_kernels.try_out(DEVICE)
