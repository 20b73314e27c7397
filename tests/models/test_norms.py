"""RMSNorm: transformers' bits, and gradients no further from exact ones than transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hydraflow.models.norms import RMSNorm, replace_norms

WIDTH = 48
TYPES = (torch.float32, torch.bfloat16, torch.float64)


def inputs(dtype: torch.dtype) -> tuple[Tensor, LlamaRMSNorm, Tensor]:
    """Hidden states, a norm, and a gradient of its output."""
    draw = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(2, 7, WIDTH, generator=draw)).to(dtype)
    x[0, 0] = 0  # of such a row only epsilon is left
    norm = LlamaRMSNorm(WIDTH, eps=1e-3).to(dtype)
    norm.weight.data += torch.randn(WIDTH, generator=draw).to(dtype)
    return x, norm, torch.randn(2, 7, WIDTH, generator=draw).to(dtype)


def gradients(norm: torch.nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(norm(x), (x, norm.weight), grad)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_bits_are_those_of_transformers(dtype: torch.dtype) -> None:
    x, norm, grad = inputs(dtype)
    own = RMSNorm(norm.weight, norm.variance_epsilon)
    assert torch.equal(own(x), norm(x))
    if dtype == torch.float64:
        assert all(map(torch.equal, gradients(own, x, grad), gradients(norm, x, grad)))


@pytest.mark.parametrize("dtype", TYPES[:2])
def test_gradients_are_as_exact_as_those_of_transformers(dtype: torch.dtype) -> None:
    x, norm, grad = inputs(dtype)
    wide, weight = x.double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    out = weight * wide / (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    exact = torch.autograd.grad(out, (wide, weight), grad.double())
    mine = gradients(RMSNorm(norm.weight, norm.variance_epsilon), x, grad)
    for found, theirs, wanted in zip(mine, gradients(norm, x, grad), exact, strict=True):
        assert found.dtype == dtype
        error, their_error = ((one.double() - wanted).norm() / wanted.norm() for one in (found, theirs))
        assert error < 1.25 * their_error + 1e-7, (error, their_error)


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    x, norm, grad = inputs(torch.float32)
    x.requires_grad_()
    (first,) = torch.autograd.grad(RMSNorm(norm.weight, 1e-3)(x), x, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, norm, grad = inputs(torch.float32)
    own = RMSNorm(norm.weight.requires_grad_(False), norm.variance_epsilon)
    x.requires_grad_()
    own(x).backward(grad)
    assert x.grad is not None and norm.weight.grad is None


@pytest.mark.parametrize(
    ("model_type", "replaced"), [("llama", 2 * 2 + 1), ("qwen3", 4 * 2 + 1), ("gemma", 0), ("olmo2", 0)]
)
def test_only_norms_that_compute_the_same_are_replaced(model_type: str, replaced: int) -> None:
    sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=2)
    config = AutoConfig.for_model(model_type, **sizes, num_attention_heads=2, num_key_value_heads=2)
    lm = AutoModelForCausalLM.from_config(config)
    ids = torch.tensor([[1, 5, 3]])
    before, weights = lm(ids).logits, dict(lm.named_parameters())
    replace_norms(lm)
    assert sum(isinstance(part, RMSNorm) for part in lm.modules()) == replaced
    assert {name: id(one) for name, one in lm.named_parameters()} == {n: id(w) for n, w in weights.items()}
    assert torch.equal(lm(ids).logits, before)
