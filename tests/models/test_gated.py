"""Gated activations in parts against the plain operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from hydraflow.models import gated
from hydraflow.models.gated import replace_gates, swiglu
from scripts.tiny_types import tiny_config

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def results(function: object, gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [one.detach().requires_grad_() for one in (gate, up)]
    out = function(*leaves)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (2, 9, 35), (1, 0, 5), (3, 7_001)])
def test_parts_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=draw).mul(3).to(dtype) for _ in range(3)]
    wanted = results(lambda gate, up: F.silu(gate) * up, *given)
    for numbers in (gated.CACHED, 640):
        monkeypatch.setattr(gated, "CACHED", numbers)
        assert all(map(torch.equal, results(swiglu, *given), wanted))
    turned = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in given]
    assert all(map(torch.equal, results(swiglu, *turned), wanted))


def test_gradients_are_those_of_the_formula() -> None:
    gate, up = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu, (gate, up))


@pytest.mark.parametrize(("model_type", "saved"), [("llama", 3), ("gemma", 4)])
def test_the_activation_is_not_saved(model_type: str, saved: int) -> None:
    """Tensors as wide as the layer that it saves: gate, up and product; of another activation that, too."""
    config = tiny_config(model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    replace_gates(model)
    mlp, kept = model.model.layers[0].mlp, set()
    width = mlp.gate_proj.out_features

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == width and tensor.untyped_storage().nbytes() == 4 * 3 * width:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = mlp(torch.randn(1, 3, config.hidden_size, requires_grad=True))
    assert out.requires_grad and len(kept) == saved
