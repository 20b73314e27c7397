"""Model FLOPs: against torch's own count of real models, and a share by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from hydraflow.memory.shape import shape_of
from hydraflow.models.config import ModelConfig
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.workers import utilization
from hydraflow.workers.utilization import ModelWork, Utilization

SIZES: dict[str, Any] = dict(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[0])
TOKENS = 11


@pytest.mark.parametrize(("name", "options"), [("Llama", {}), ("Qwen3", {}), ("Qwen3Moe", EXPERTS)])
def test_operations_are_those_that_torch_counts(name: str, options: dict[str, Any]) -> None:
    """But for scores of later tokens, which transformers computes and masks."""
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    lm = getattr(transformers, f"{name}ForCausalLM")(config)
    shape = shape_of(config.to_dict())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        lm(torch.randint(2, 49, (1, TOKENS)), use_cache=False)
    masked = shape.layers * 2 * shape.q_width * TOKENS * (TOKENS - 1)
    work = ModelWork(shape, shape.vocabulary, frozen=False)
    # the last of twelve tokens is not read, and here all others are asked for their next one
    prompts, responses = torch.tensor([1]), torch.tensor([TOKENS])
    assert work.forward(prompts, responses) == counter.get_total_flops() - masked
    assert work.update(prompts, responses) == 3 * work.forward(prompts, responses)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_update_takes_what_torch_counts_of_both_passes(frozen: bool) -> None:
    """Frozen weights get no gradient; queries, keys and values still do."""
    config = transformers.LlamaConfig(**SIZES)
    config._attn_implementation = "eager"
    lm = transformers.LlamaForCausalLM(config).requires_grad_(not frozen)
    shape = shape_of(config.to_dict())
    embedded = torch.randn(1, TOKENS, shape.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        lm(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    masked = shape.layers * 2 * shape.q_width * TOKENS * (TOKENS - 1)
    work = ModelWork(shape, shape.vocabulary, frozen=frozen)
    assert work.update(torch.tensor([1]), torch.tensor([TOKENS])) == counter.get_total_flops() - 3 * masked


def test_the_share_is_of_the_peak_of_all_devices_that_have_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "peak_flops", lambda device, dtype: 1e6)
    work = ModelWork(shape_of({**SIZES, "model_type": "llama"}), 50, frozen=False)
    rows = {"prompts": [3, 2], "responses": [4, 1]}
    batch = DataProto.from_dict(
        {
            name: ragged.from_rows([torch.ones(n, dtype=torch.int64) for n in each])
            for name, each in rows.items()
        }
    )
    lengths = torch.tensor([3, 2]), torch.tensor([4, 1])
    of = Utilization(work, torch.device("cpu"), torch.float32, devices=4)
    of.note("actor_infer", batch, 1.0)
    of.note("actor_infer", batch, 5.0)
    of.note("actor", batch, 2.0, updates=3)
    found = of.metrics()
    assert found["perf/mfu/actor"].value == pytest.approx(3 * work.update(*lengths) / (2.0 * 1e6 * 4))
    assert found["perf/mfu/actor_infer"].value == pytest.approx(work.forward(*lengths) / (5.0 * 1e6 * 4))
    assert of.metrics() == {}, "reported once"


def test_what_is_not_known_has_no_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=1, vocab_size=9)
    config.save_pretrained(tmp_path)
    assert ModelWork.of(ModelConfig(path=str(tmp_path)), "policy", "model") is None
    of_none = Utilization(None, torch.device("cpu"), torch.float32, devices=1)
    batch = DataProto.from_dict({"prompts": ragged.from_rows([torch.ones(2, dtype=torch.int64)])})
    of_none.note("actor_infer", batch, 1.0)
    of_none.note("actor", batch, 1.0, updates=1)
    assert of_none.metrics() == {}


def test_a_critic_has_one_output(tmp_path: Path) -> None:
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    critic = ModelWork.of(ModelConfig(path=str(tmp_path), lora_rank=2), "value", "critic.model")
    assert critic is not None and (critic.outputs, critic.frozen) == (1, True)
