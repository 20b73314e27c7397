"""Rotations of queries and keys: transformers' bits, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hydraflow.models import rotary
from hydraflow.models.rotary import replace_rotations, rotate_both

Rotation = Callable[..., tuple[Tensor, Tensor]]


def inputs(dtype: torch.dtype, rows: int, batched: bool) -> list[Tensor]:
    """Queries of six heads, keys of two, (B, T, h, d); cos and sin whose halves differ; gradients."""
    draw = torch.Generator().manual_seed(0)
    angles = torch.randn(rows if batched else 1, 11, 8, generator=draw)
    shapes = [(rows, 11, heads, 8) for heads in (6, 2, 6, 2)]
    q, k, of_q, of_k = ((3 * torch.randn(shape, generator=draw)).to(dtype) for shape in shapes)
    return [q, k, angles.cos().to(dtype), angles.sin().to(dtype), of_q, of_k]


def results(rotate: Rotation, given: list[Tensor], heads_first: bool) -> tuple[Tensor, ...]:
    """Both rotated, and their gradients."""
    q, k = (one.detach().clone().requires_grad_() for one in given[:2])
    seen = (one.transpose(1, 2) if heads_first else one for one in (q, k))
    found = rotate(*seen, *given[2:4], unsqueeze_dim=1 if heads_first else 2)
    grads = [one.transpose(1, 2) if heads_first else one for one in given[4:]]
    return (*found, *torch.autograd.grad(found, (q, k), grads))


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("rows", "batched"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cached", [1, 100, 2**16])
def test_the_bits_are_those_of_transformers(
    dtype: torch.dtype,
    rows: int,
    batched: bool,
    heads_first: bool,
    cached: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rotary, "CACHED", cached)
    given = inputs(dtype, rows, batched)
    mine, theirs = (results(one, given, heads_first) for one in (rotate_both, apply_rotary_pos_emb))
    assert all(map(torch.equal, mine, theirs))
    assert [one.stride() for one in mine[:2]] == [one.stride() for one in theirs[:2]]


def test_cosines_that_are_trained_get_their_gradient() -> None:
    q, k, cos, sin, *grads = inputs(torch.float32, 1, True)
    cos.requires_grad_()
    mine, theirs = (
        torch.autograd.grad(rotate(q, k, cos, sin, 2), cos, grads)[0]
        for rotate in (rotate_both, apply_rotary_pos_emb)
    )
    assert theirs.any() and torch.equal(mine, theirs)


def test_wider_cosines_widen_the_result_as_in_transformers() -> None:
    q, k, cos, sin, *_ = inputs(torch.bfloat16, 1, True)
    mine, theirs = (
        rotate(q, k, cos.float(), sin.float(), 2) for rotate in (rotate_both, apply_rotary_pos_emb)
    )
    assert mine[0].dtype == torch.float32 and all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("heads_first", [True, False])
def test_what_was_rotated_may_be_changed_in_place(heads_first: bool) -> None:
    def doubled(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        q, k = rotate_both(*given, **options)
        return q.mul_(2), k.mul_(2)

    given = inputs(torch.float32, 3, True)
    once, twice = (results(one, given, heads_first) for one in (rotate_both, doubled))
    assert all(torch.equal(2 * one, other) for one, other in zip(once, twice, strict=True))


def test_a_method_of_that_name_is_left_alone() -> None:
    code = "def forward(self, x):\n    return self.apply_rotary_pos_emb(x)"
    elsewhere: dict[str, Any] = {}  # a module that knows no function of that name
    exec(code, elsewhere)
    layer = type("Layer", (torch.nn.Module,), {"forward": elsewhere["forward"]})()
    replace_rotations(layer)
    assert "forward" not in vars(layer)


def test_a_layer_whose_forward_was_replaced_keeps_it() -> None:
    sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=2, num_key_value_heads=2)
    lm = AutoModelForCausalLM.from_config(config)
    attention = lm.model.layers[0].self_attn
    attention.forward = usual = attention.forward
    replace_rotations(lm)
    assert attention.forward is usual


@pytest.mark.parametrize(
    ("model_type", "replaced"), [("llama", 2), ("qwen3", 2), ("gemma2", 2), ("cohere", 0), ("glm", 0)]
)
def test_only_layers_that_rotate_as_usual_are_changed(model_type: str, replaced: int) -> None:
    sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=2, pad_token_id=0)
    config = AutoConfig.for_model(
        model_type, **sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=8
    )
    lm = AutoModelForCausalLM.from_config(config)
    ids = torch.tensor([[1, 5, 3]])
    before = lm(ids).logits
    replace_rotations(lm)
    assert sum("forward" in vars(part) for part in lm.modules()) == replaced
    assert torch.equal(lm(ids).logits, before)
