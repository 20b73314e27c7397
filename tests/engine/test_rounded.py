"""`fsdp_config.dtype=bf32`: products of the layers' matrices in bfloat16, all else in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine import rank_jobs as jobs
from engine.pool import Ranks
from engine.test_fsdp import DOUBLE
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hydraflow.errors import ConfigError, Faults
from hydraflow.jobs.inputs import require_rounded_roles
from hydraflow.models.ask import Ask
from hydraflow.models.rounded import RoundedLinear, round_products
from hydraflow.protocol import ragged
from hydraflow.schema import PPOConfig
from hydraflow.trainer.phases import rollout_is_exact

BF32: dict[str, Any] = {"fsdp": {"dtype": "bf32"}}


def bf16(x: Tensor) -> Tensor:
    """Rounded to bfloat16, in float64."""
    return x.to(torch.bfloat16).double()


@pytest.mark.parametrize("bias", [True, False])
def test_products_of_rounded_factors(bias: bool) -> None:
    """Against float64's products of the same rounded factors, in the forward and the backward pass; one more
    rounding, to bfloat16, is the result's own."""
    torch.manual_seed(0)
    layer = nn.Linear(48, 64, bias=bias)
    round_products([layer])
    x, above = torch.randn(2, 9, 48, requires_grad=True), torch.randn(2, 9, 64)
    y = layer(x)
    y.backward(above)
    assert {one.dtype for one in (y, x.grad, *layer.parameters()) if one is not None} == {torch.float32}
    rows, grad, weight = bf16(x).flatten(0, 1), bf16(above).flatten(0, 1), bf16(layer.weight)
    product = rows @ weight.t() + (layer.bias.double() if bias else 0)
    for ours, right in (
        (y.flatten(0, 1), product),
        (x.grad.flatten(0, 1), grad @ weight),
        (layer.weight.grad, grad.t() @ rows),
    ):
        torch.testing.assert_close(ours.double(), right, rtol=2**-8, atol=2e-3)
    if bias:
        torch.testing.assert_close(layer.bias.grad, above.sum((0, 1)))


def test_which_products_are_rounded(tiny: str) -> None:
    """Those of the layers, not the output matrix; weights and gradients stay float32."""
    engine = jobs.make_engine(tiny, BF32)
    named = dict(engine.module.named_modules())
    rounded = {name for name, part in named.items() if isinstance(part, RoundedLinear)}
    plain = {name for name, part in named.items() if isinstance(part, nn.Linear)} - rounded
    assert rounded and plain == {"lm.lm_head"}
    engine.forward_backward([jobs.make_batch()], jobs.loss_of, Ask(0.8))
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in engine.module.parameters() if p.grad is not None} == {torch.float32}


def test_between_float32_and_bfloat16(tiny: str) -> None:
    """Errors of a forward pass and of gradients, against float64."""

    def found(fsdp: dict[str, Any]) -> tuple[Tensor, Tensor]:
        engine = jobs.make_engine(tiny, {"fsdp": fsdp})
        seen = engine.forward([jobs.make_batch()], Ask(0.8)).get("log_probs")
        engine.forward_backward([jobs.make_batch()], jobs.loss_of, Ask(0.8))
        gradient = torch.cat([one.double().flatten() for one in jobs.gradients(engine).values()])
        return ragged.parts(seen)[0].double(), gradient

    exact = found(DOUBLE)
    errors = [
        [float((mine - right).norm() / right.norm()) for mine, right in zip(found(fsdp), exact, strict=True)]
        for fsdp in ({"dtype": "fp32"}, {"dtype": "bf32"}, {"dtype": "bf16"})
    ]
    for fp32, bf32, half in zip(*errors, strict=True):
        assert 30 * fp32 < bf32 < half < 0.1


def test_one_rank_and_two(tiny: str, ranks: Ranks) -> None:
    alone = jobs.train(tiny, BF32)
    for found in ranks.run(jobs.train, tiny, BF32):
        norms = [[one["grad_norm"] for one in result["reported"]] for result in (alone, found)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-2)


def test_its_log_probabilities_are_not_the_generators() -> None:
    config = PPOConfig()
    fsdp, bytes_of = config.actor_rollout_ref.actor.fsdp_config, {"fp32": 4, "bf16": 2}.__getitem__
    fsdp.dtype = "fp32"
    assert rollout_is_exact(config, bytes_of)
    fsdp.dtype = "bf32"
    assert not rollout_is_exact(config, bytes_of)


@pytest.mark.parametrize("shape", [(0, 3), (3,), (2, 0, 3)])
def test_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    """As nn.Linear takes them; some models change a result in place."""
    layer = nn.Linear(3, 4)
    round_products([layer])
    x = torch.ones(shape, requires_grad=True)
    y = layer(x)
    y += 1
    y.sum().backward()
    assert y.shape == (*shape[:-1], 4) and x.grad is not None and x.grad.shape == shape


def test_adapters_are_not_rounded(tmp_path: Path) -> None:
    """Nor is an output matrix that has one."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1)
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    model = {"lora_rank": 2, "target_modules": ["q_proj", "lm_head"]}
    engine = jobs.make_engine(str(tmp_path), {**BF32, "model": model})
    named = dict(engine.module.named_modules())
    rounded = {name for name, part in named.items() if isinstance(part, RoundedLinear)}
    assert "lm.model.layers.0.self_attn.q_proj.base_layer" in rounded and "lm.lm_head.base_layer" in named
    assert any("lora_A" in name for name in named)
    assert not any("lora_" in name or "lm_head" in name for name in rounded)


def of_gpt2(folder: Path) -> str:
    """Its layers are Conv1D."""
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("model", [{}, {"lora_rank": 2}], ids=["", "lora"])
def test_a_model_without_linear_layers_is_refused(tmp_path: Path, model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has none\n.*fsdp_config.dtype=bf16"):
        jobs.make_engine(of_gpt2(tmp_path), {**BF32, "model": model})


@pytest.mark.parametrize(
    ("role", "refused"),
    [("actor", ["actor_rollout_ref.actor"]), ("ref", ["actor_rollout_ref.ref"]), ("critic", ["critic"])],
)
def test_before_anything_is_started(tmp_path: Path, role: str, refused: list[str]) -> None:
    config, faults = PPOConfig(), Faults()
    policy = config.actor_rollout_ref
    policy.model.path, policy.actor.use_kl_loss = of_gpt2(tmp_path), True
    roles: dict[str, Any] = {"actor": policy.actor, "ref": policy.ref, "critic": config.critic}
    config.critic.enable, roles[role].fsdp_config.dtype = True, "bf32"
    require_rounded_roles(config, faults)
    assert [problem.field for problem in faults.problems] == [f"{one}.fsdp_config.dtype" for one in refused]
