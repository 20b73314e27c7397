"""What torch.compile fuses: exact values and gradients, one kernel for any number of rows, and which layers
call it."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache
from transformers import AutoConfig, AutoModelForCausalLM

from hydraflow.errors import ConfigError
from hydraflow.models import compiled
from hydraflow.models.gated import replace_gates
from hydraflow.models.norms import replace_norms
from hydraflow.models.rotary import replace_rotations, rotate_both, rotate_half

EXACT: dict[str, Callable[..., Tensor]] = {
    "rms_norm": lambda x, weight: weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt(),
    "rotated": lambda x, cos, sin: (
        x * cos.view(2, -1, 1, x.shape[-1]) + rotate_half(x) * sin.view(2, -1, 1, x.shape[-1])
    ),
    "swiglu": lambda gate, up: gate * gate.sigmoid() * up,
}


def arguments_of(name: str, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Arguments of the function for two sequences of so many rows."""
    draw = torch.Generator().manual_seed(rows)
    shapes = {
        "rms_norm": [(2, rows, 5, width), (width,)],
        "rotated": [(2, rows, 3, width), (2 * rows, 1, width), (2 * rows, 1, width)],
        "swiglu": [(2, rows, width), (2, rows, width)],
    }[name]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def compiled_function(name: str) -> Callable[..., Tensor]:
    function = getattr(compiled, name)
    return (lambda *args: function(*args, 1e-3)) if name == "rms_norm" else function


def with_gradients(function: Callable[..., Tensor], arguments: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of its cubes' sum with respect to those that are trained."""
    trained = [x.detach().requires_grad_() for x in arguments[: 1 if len(arguments) == 3 else 2]]
    out = function(*trained, *arguments[len(trained) :])
    return [out, *torch.autograd.grad(out.pow(3).sum(), trained)]


def assert_exact(name: str, function: Callable[..., Tensor], given: list[Tensor], relative: float) -> None:
    mine = with_gradients(function, given)
    exact = with_gradients(EXACT[name], [x.double() for x in given])
    for found, wanted in zip(mine, exact, strict=True):
        assert found.dtype == given[0].dtype and found.shape == wanted.shape
        assert (found.double() - wanted).norm() < relative * wanted.norm()


@pytest.mark.slow(short=True)
@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("name", EXACT)
def test_values_and_gradients_are_those_of_float64_from_one_kernel(
    name: str, dtype: torch.dtype, relative: float
) -> None:
    dynamo.reset()
    counters.clear()
    for rows in (5, 9, 30, 1):
        assert_exact(name, compiled_function(name), arguments_of(name, rows, 8, dtype), relative)
        assert rows == 1 or counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow(short=True)
def test_what_was_rotated_may_be_changed_in_place() -> None:
    (x, cos, sin), rotated = arguments_of("rotated", 3, 8, torch.float32), compiled.rotated
    q, k = x.requires_grad_(), x[:, :, :2]
    cos, sin = cos.view(2, 3, 8), sin.view(2, 3, 8)
    once, _ = rotate_both(q, k, cos, sin, 2, rotated)
    (grad,) = torch.autograd.grad(once.sum(), q)
    twice = rotate_both(q, k, cos, sin, 2, rotated)[0].mul_(2)
    assert torch.equal(twice, 2 * once) and torch.equal(torch.autograd.grad(twice.sum(), q)[0], 2 * grad)


@pytest.mark.slow(short=True)
@pytest.mark.parametrize(
    ("model_type", "gates", "functions"),
    [
        ("llama", 2, {"rms_norm", "rotated", "swiglu"}),
        ("gemma", 0, {"rotated"}),
        ("gpt2", 0, set()),
    ],
)
def test_layers_of_the_usual_form_call_it(
    model_type: str, gates: int, functions: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = dict(vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    more = {} if model_type == "gpt2" else dict(intermediate_size=16, num_key_value_heads=2, pad_token_id=0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **more)).eval()
    ids = torch.tensor([[1, 5, 3]])
    before = lm(ids).logits
    mocks = {name: Mock(wraps=getattr(compiled, name)) for name in EXACT}
    for name, mock in mocks.items():
        monkeypatch.setattr(compiled, name, mock)
    replace_norms(lm, compile=True)
    replace_rotations(lm, compile=True)
    replace_gates(lm, compile=True)
    assert sum("forward" in vars(part) for part in lm.modules() if hasattr(part, "act_fn")) == gates
    torch.testing.assert_close(lm(ids).logits, before, rtol=1e-5, atol=1e-6)
    assert {name for name, mock in mocks.items() if mock.called} == functions


def test_without_a_compiler_the_key_is_named() -> None:
    dynamo.reset()
    broken = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    with fresh_cache(), broken, pytest.raises(ConfigError) as found:
        compiled.Kernel(F.silu, by_rows=1)(torch.ones(4, 8))
    assert "fsdp_config.use_torch_compile=true: torch.compile cannot compile silu: " in str(found.value)
    assert "-> fsdp_config.use_torch_compile=false" in str(found.value)
