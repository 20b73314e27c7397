"""Which of transformers' routers are known, and what a column of experts is on a packed line."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from hydraflow.models.packing import pack
from hydraflow.models.routers import HFRouters
from hydraflow.models.routing import OWN_CHOICE, LineRoutes, of_rows, on_line
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

SIZES = dict(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)
KNOWN: list[PreTrainedConfig] = [
    MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    Qwen2MoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=8),
    OlmoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2),
    GptOssConfig(**SIZES, head_dim=8, num_local_experts=5, num_experts_per_tok=2),
]
UNKNOWN: list[PreTrainedConfig] = [PhimoeConfig(**SIZES, num_local_experts=4), Qwen3Config(**SIZES)]


@pytest.mark.parametrize("config", KNOWN, ids=lambda config: config.model_type)
def test_given_experts_are_taken(config: PreTrainedConfig) -> None:
    """The recorded ones change nothing; others change the output and are what the experts see."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for parameter in lm.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    ids = torch.arange(6)[None]
    plain = lm(input_ids=ids, use_cache=False).logits
    routers, line = HFRouters(lm), LineRoutes()
    assert (routers.experts, routers.chosen, len(routers.replays)) == (5, 2, 2)
    routers.begin(line)
    assert torch.equal(lm(input_ids=ids, use_cache=False).logits, plain)
    assert {layer: chosen.shape for layer, chosen in line.chosen.items()} == {0: (6, 2), 1: (6, 2)}
    routers.begin(LineRoutes(given=line.chosen))
    assert torch.equal(lm(input_ids=ids, use_cache=False).logits, plain)
    other = {layer: (chosen + 1) % 5 for layer, chosen in line.chosen.items()}
    routers.begin(LineRoutes(given=other))
    seen: list[torch.Tensor] = []
    for layer in lm.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda module, given: seen.append(given[1]))
    assert not torch.allclose(lm(input_ids=ids, use_cache=False).logits, plain)
    assert all(torch.equal(found, other[layer]) for layer, found in enumerate(seen)) and len(seen) == 2
    routers.begin(None)
    assert torch.equal(lm(input_ids=ids, use_cache=False).logits, plain)


@pytest.mark.parametrize("config", UNKNOWN, ids=lambda config: config.model_type)
def test_other_models_have_none(config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    assert HFRouters(lm).replays == []


def rows_with(routes: list[list[int]]) -> DataProto:
    """Two samples of one prompt, and a row without a response."""
    prompts = [torch.tensor([5, 6])] * 2 + [torch.tensor([7])]
    responses = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([], dtype=torch.int64)]
    experts = [torch.tensor(row, dtype=torch.uint8)[:, None, None] for row in routes]
    return DataProto.from_dict(
        {
            "prompts": ragged.from_rows(prompts),
            "responses": ragged.from_rows(responses),
            "routed_experts": ragged.from_rows(experts),
        }
    )


@pytest.mark.parametrize(
    ("routes", "line"),
    [
        ([[9, 8, 4], [9, 8], [3]], [9, 8, 4, 3]),  # the prompt is shared: it goes to the same experts
        ([[9, 8, 4], [9, 7], [3]], [9, 8, 4, 9, 7, 3]),
    ],
)
def test_a_column_on_a_line_and_back(routes: list[list[int]], line: list[int]) -> None:
    rows = rows_with(routes)
    given = rows.get("routed_experts")
    batch = pack(
        rows.get("prompts"), rows.get("responses"), device=torch.device("cpu"), multiple_of=7, routes=given
    )
    found = on_line(given, batch)
    filling = [OWN_CHOICE] * (7 - len(line))
    assert found.flatten().tolist() == line + filling
    back = of_rows([rows], [(found.to(torch.uint8), batch)])
    assert [row.flatten().tolist() for row in ragged.rows(back)] == routes
