"""The native engine tells which experts its tokens went to: those of transformers' own forward pass over the
whole row."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from hydraflow.generation.base import GenerationRequest, SamplingParams, TokenRequest
from hydraflow.generation.native import NativeEngine
from hydraflow.protocol import ragged

SIZES = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=3)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, eos_token_id=1, pad_token_id=0)
MODELS = {
    "a dense layer": Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=3,
        mlp_only_layers=[0],
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
PROMPTS = [torch.arange(2, 2 + n) for n in (1, 9, 4, 4)]


def make(config: object, most: int = 5) -> NativeEngine:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager")
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return NativeEngine(model, max_num_seqs=most)


def chosen_by(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """(tokens, L, K) of a plain forward pass."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, given, output: seen.append(output[2]))
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1)


@pytest.mark.parametrize("most", [5, 64])
@pytest.mark.parametrize("name", MODELS)
def test_of_whole_batches(name: str, most: int) -> None:
    """Rows of different lengths, which leave their waves one after the other; all in one wave."""
    engine = make(MODELS[name], most)
    request = GenerationRequest(PROMPTS, [4, 3, 1, 6], [(i,) for i in range(len(PROMPTS))])
    params = SamplingParams(max_tokens=12, stop_token_ids=(5, 7, 11))
    output = engine.generate(request, SamplingParams(max_tokens=12, stop_token_ids=(5, 7, 11), routes=True))
    assert output.routed_experts is not None and output.routed_experts.dtype == torch.uint8
    responses, routes = ragged.rows(output.responses), ragged.rows(output.routed_experts)
    assert len({len(one) for one in responses}) > 3
    prompts = [prompt for prompt, n in zip(PROMPTS, request.samples) for _ in range(n)]
    for prompt, response, found in zip(prompts, responses, routes, strict=True):
        assert torch.equal(found.long(), chosen_by(engine._model, torch.cat([prompt, response])[:-1]))
    free = engine.generate(request, params)
    assert free.routed_experts is None
    assert torch.equal(ragged.parts(free.responses)[0], ragged.parts(output.responses)[0])
    assert torch.equal(ragged.parts(free.log_probs)[0], ragged.parts(output.log_probs)[0])


def test_of_a_response_that_had_begun() -> None:
    engine = make(MODELS["mixtral"])
    params = SamplingParams(max_tokens=6, ignore_eos=True, routes=True)
    engine.submit([TokenRequest("a", PROMPTS[1], params, (0,), 0, sampled=(4, 6))])
    [done] = engine.advance()
    assert done.routed_experts is not None
    ids = torch.cat([PROMPTS[1], torch.tensor([4, 6]), done.tokens])
    assert torch.equal(done.routed_experts.long(), chosen_by(engine._model, ids[:-1]))


def test_a_dense_model_has_none() -> None:
    request = GenerationRequest(PROMPTS[:1], [1], [(0,)])
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no experts that can be recorded"):
        make(Qwen3Config(**SIZES, head_dim=8)).generate(request, SamplingParams(max_tokens=2, routes=True))
