"""Packed rows, padded rows and transformers' own forward pass agree to the last digits of float64."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hydraflow.errors import ConfigError
from hydraflow.models import attention, loading
from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.models.config import ModelConfig
from hydraflow.models.heads import PolicyModel, ValueModel
from hydraflow.models.packing import pack, pack_rows
from hydraflow.models.tiny import make_model
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

CPU = torch.device("cpu")
SIZES = dict(
    vocab_size=37,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1200,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "qwen3-window": lambda: Qwen3Config(
        **SIZES, head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "llama": lambda: LlamaConfig(**SIZES),
    "granite": lambda: GraniteConfig(
        **SIZES,
        logits_scaling=4.0,
        attention_multiplier=0.3,
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
    ),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.3),
    "gemma2": lambda: Gemma2Config(
        **SIZES, head_dim=8, sliding_window=6, final_logit_softcapping=3.0, attn_logit_softcapping=1.5
    ),
}


def rows_of(lengths: list[tuple[int, int]], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged prompts and responses of these (prompt, response) lengths."""
    draw = torch.Generator().manual_seed(seed)
    ids = [[torch.randint(2, SIZES["vocab_size"], (n,), generator=draw) for n in pair] for pair in lengths]
    return ragged.from_rows([p for p, _ in ids]), ragged.from_rows([r for _, r in ids])


def models_of(config: PretrainedConfig, chunk: int = 1000) -> tuple[PolicyModel, PolicyModel, bool]:
    """The model as we choose to run it, the same weights with padding, and whether the first one pads too."""
    from transformers import AutoModelForCausalLM

    options = ModelConfig(path=".")
    name, padded = loading.choose_attention(config, options, loading.causal_class(config, options))
    oracle = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    torch.manual_seed(3)
    # a copy each: transformers notes the attention in the configuration itself
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name).double().eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    theirs = (
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=oracle).double().eval()
    )
    theirs.load_state_dict(ours.state_dict())
    assert padded or ours.config._attn_implementation == attention.NAME
    return PolicyModel(ours, chunk_tokens=chunk), PolicyModel(theirs, chunk_tokens=chunk), padded


def oracle(
    lm: torch.nn.Module, prompts: torch.Tensor, responses: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of all response tokens from transformers' logits, one row at a time."""
    logp, entropy = [], []
    for p, r in zip(ragged.rows(prompts), ragged.rows(responses), strict=True):
        ids = torch.cat([p, r])[None]
        full = (lm(input_ids=ids, use_cache=False).logits[0, len(p) - 1 : -1] / temperature).log_softmax(-1)
        logp.append(full.gather(-1, r[:, None])[:, 0])
        entropy.append(-(full.exp() * full).sum(-1))
    return torch.cat(logp), torch.cat(entropy)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_padded_and_transformers_agree(name: str) -> None:
    ours, theirs, pads = models_of(CONFIGS[name](), chunk=7)
    assert pads == (name == "gemma2")
    prompts, responses = rows_of([(3, 4), (1, 9), (6, 1), (2, 0), (5, 14), (3, 4)])
    expected = oracle(theirs.lm, prompts, responses, 0.7)
    atol = 1e-6 if pads else 1e-10  # transformers' own soft-capped attention takes its softmax in float32
    for model, padded in [(ours, pads), (theirs, True)]:
        got = model(pack(prompts, responses, device=CPU, padded=padded), Ask(0.7, entropy=True))
        torch.testing.assert_close(got[0], expected[0], rtol=0, atol=atol)
        torch.testing.assert_close(got[1], expected[1], rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-window", "granite"])
def test_gradients_of_packed_rows_are_those_of_transformers(name: str) -> None:
    ours, theirs, _ = models_of(CONFIGS[name](), chunk=5)
    prompts, responses = rows_of([(3, 4), (1, 9), (6, 1), (2, 7)])
    weight = torch.linspace(-1, 1, 21, dtype=torch.float64)
    (ours(pack(prompts, responses, device=CPU), LOG_PROBS)[0] * weight).sum().backward()
    (oracle(theirs.lm, prompts, responses, 1.0)[0] * weight).sum().backward()
    for (key, mine), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, wanted.grad, rtol=0, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_rows_of_very_different_lengths_form_several_groups() -> None:
    ours, theirs, _ = models_of(CONFIGS["qwen3-window"]())
    prompts, responses = rows_of([(3, 4), (600, 500), (2, 5), (300, 20), (4, 4)])
    batch = pack(prompts, responses, device=CPU)
    assert batch.plan is not None
    assert [(g.rows, g.width) for g in batch.plan.groups] == [(1, 1099), (1, 319), (3, 7)]
    torch.testing.assert_close(
        ours(batch, LOG_PROBS)[0], oracle(theirs.lm, prompts, responses, 1.0)[0], rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("more", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}], ids=["cap", "sinks"])
def test_scores_that_are_capped_or_have_sinks_are_refused(more: dict[str, Any]) -> None:
    x, plan = torch.zeros(1, 4, 3, 8), attention.plan_rows(np.array([3]), CPU)
    with pytest.raises(ValueError, match="its attention scores are capped, or have sinks"):
        attention.packed_attention(torch.nn.Module(), x, x, x, None, row_plan=plan, **more)


def test_short_rows_are_one_group_and_equal_rows_are_not_moved() -> None:
    lengths = np.tile([7, 12, 9, 11], 64)
    plan = attention.plan_rows(lengths, CPU)
    assert [(g.rows, g.width) for g in plan.groups] == [(256, 12)]
    assert attention.plan_rows(np.full(256, 12), CPU).to_padded is None


@pytest.mark.parametrize("seed", range(5))
def test_padding_of_a_group_is_bounded(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 3000, 200)
    plan = attention.plan_rows(lengths, CPU)
    assert sum(group.rows for group in plan.groups) == 200
    falling = np.sort(lengths)[::-1]
    for group in plan.groups:
        rows, falling = falling[: group.rows], falling[group.rows :]
        assert group.rows * group.width - rows.sum() <= rows.sum() // 4 + (512 if group.width <= 64 else 0)
    assert plan.to_padded is not None and plan.to_packed is not None
    np.testing.assert_array_equal(plan.to_padded[plan.to_packed].numpy(), np.arange(lengths.sum()))


def test_layout_by_hand() -> None:
    prompts = ragged.from_rows([torch.tensor([5, 6]), torch.tensor([7])])
    responses = ragged.from_rows([torch.tensor([8]), torch.tensor([9, 10, 11])])
    packed = pack(prompts, responses, device=CPU)
    assert packed.input_ids.tolist() == [[5, 6, 7, 9, 10]], "the last token of a response predicts nothing"
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert packed.predicts_at.tolist() == [1, 2, 3, 4]
    assert packed.plan is not None and packed.plan.shared is None
    assert packed.targets.tolist() == [8, 9, 10, 11]
    assert packed.dense(torch.tensor([1.0, 2, 3, 4])).tolist() == [[1, 0, 0], [2, 3, 4]]
    padded = pack(prompts, responses, device=CPU, padded=True)
    assert padded.input_ids.tolist() == [[5, 6, 8, 0], [7, 9, 10, 11]]
    assert padded.predicts_at.tolist() == [1, 4, 5, 6]


def test_a_shared_prompt_stands_in_the_line_once() -> None:
    """Three samples of prompt 5 6, then one of prompt 5 7: seven tokens instead of fourteen."""
    prompts = ragged.from_rows([torch.tensor(p) for p in ([5, 6], [5, 6], [5, 6], [5, 7])])
    responses = ragged.from_rows([torch.tensor(r) for r in ([8, 9], [9], [9, 8, 9], [8])])
    packed = pack(prompts, responses, device=CPU)
    assert packed.input_ids.tolist() == [[5, 6, 8, 9, 8, 5, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 2, 3, 0, 1]]
    assert packed.predicts_at.tolist() == [1, 2, 1, 1, 3, 4, 6]
    assert packed.plan is not None and packed.plan.shared is not None
    assert packed.plan.shared.to_rows.tolist() == [0, 1, 2, 0, 1, 0, 1, 3, 4, 5, 6]


def test_neighbours_share_a_prompt_only_if_all_of_it_is_equal() -> None:
    same_length = ragged.from_rows(
        [torch.tensor(p) for p in ([1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 2], [1, 2, 3])]
    )
    packed = pack(same_length, ragged.from_rows([torch.tensor([9])] * 5), device=CPU)
    assert packed.input_ids.tolist() == [[1, 2, 3, 1, 2, 4, 1, 2, 1, 2, 3]]
    ends = ragged.from_rows([torch.tensor(p) for p in ([1, 2, 3], [2, 3], [3], [3])])
    packed = pack(ends, ragged.from_rows([torch.tensor([9])] * 4), device=CPU)
    assert packed.input_ids.tolist() == [[1, 2, 3, 2, 3, 3]], "the end of a prompt is another prompt"


def test_neighbours_share_a_prompt_only_if_all_of_it_goes_to_the_same_experts() -> None:
    """In all layers; another prompt may go to the same ones."""
    experts = [[1, 2], [1, 2], [1, 3], [1, 2], [4, 2], [4, 2]]  # of the prompt's tokens in each row
    batch = pack(
        ragged.from_rows([torch.tensor([5, 6])] * 5 + [torch.tensor([5, 8])]),
        ragged.from_rows([torch.tensor([7])] * 6),
        device=CPU,
        routes=ragged.from_rows([torch.tensor([[[9], [one]] for one in row]) for row in experts]),
    )
    assert batch.input_ids.tolist() == [[5, 6] * 4 + [5, 8]]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-window", "llama"])
def test_shared_prompts_change_neither_numbers_nor_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers' norms round to float32 in between; in float64 throughout, the sum of the samples'
    # gradients is exact
    for norm in (LlamaRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(
            norm, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)
        )
    ours, theirs, _ = models_of(CONFIGS[name](), chunk=5)
    prompts, responses = rows_of([(3, 4), (1, 9), (6, 1), (2, 7), (4, 3), (2, 0)])
    samples = torch.tensor([0, 0, 0, 1, 2, 2, 3, 0, 4, 4, 4, 4, 5, 5])
    prompts = ragged.take(prompts, samples)
    responses = ragged.take(
        responses, samples[torch.randperm(len(samples), generator=torch.Generator().manual_seed(1))]
    )
    weight = torch.linspace(-1, 1, int(ragged.lengths(responses).sum()), dtype=torch.float64)
    got, expected = (
        ours(pack(prompts, responses, device=CPU), Ask(0.7, entropy=True)),
        oracle(theirs.lm, prompts, responses, 0.7),
    )
    for mine, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)
    (got[0] * weight + 0.1 * got[1]).sum().backward()
    (expected[0] * weight + 0.1 * expected[1]).sum().backward()
    for (key, mine), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, wanted.grad, rtol=0, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_a_line_that_is_filled_up_by_hand() -> None:
    """The filling is a row of its own behind the others, also where rows share a prompt."""
    prompts = ragged.from_rows([torch.tensor(p) for p in ([5, 6], [5, 6], [7])])
    responses = ragged.from_rows([torch.tensor(r) for r in ([8, 9], [9, 8, 9], [8])])
    packed = pack(prompts, responses, device=CPU, multiple_of=4)
    assert packed.input_ids.tolist() == [[5, 6, 8, 9, 8, 7, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 2, 3, 0, 0, 1]]
    assert packed.predicts_at.tolist() == [1, 2, 1, 3, 4, 5]
    assert packed.shape == (3, 3)
    assert packed.plan is not None and packed.plan.shared is not None
    assert packed.plan.shared.to_rows.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 7]
    assert packed.places.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    full = pack(prompts, responses, device=CPU, multiple_of=3)
    assert full.input_ids.tolist() == pack(prompts, responses, device=CPU).input_ids.tolist()


@pytest.mark.parametrize("samples", [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 2, 4, 0]], ids=["apart", "shared"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-window", "llama"])
def test_filling_changes_neither_numbers_nor_gradients(name: str, samples: list[int]) -> None:
    ours, _, _ = models_of(CONFIGS[name](), chunk=5)
    prompts, responses = rows_of([(3, 4), (1, 9), (6, 1), (2, 7), (30, 2)])
    chosen = torch.tensor(samples)
    rows = ragged.take(prompts, chosen), ragged.take(responses, chosen.flip(0))
    found, lengths = [], []
    for multiple in (1, 7, 11, 64):
        batch = pack(*rows, device=CPU, multiple_of=multiple)
        lengths.append(batch.input_ids.shape[1])
        assert lengths[-1] == -(-lengths[0] // multiple) * multiple
        log_probs, entropy = ours(batch, Ask(0.7, entropy=True))
        weight = torch.linspace(-1, 1, len(log_probs), dtype=torch.float64)
        gradients = torch.autograd.grad((log_probs * weight + 0.1 * entropy).sum(), list(ours.parameters()))
        found.append([log_probs.detach(), entropy.detach(), *gradients])
    assert len(set(lengths)) > 2
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-10)


def test_only_wanted_tokens_are_asked() -> None:
    ours, _, _ = models_of(CONFIGS["llama"]())
    prompts, responses = rows_of([(3, 4), (2, 3)])
    wanted = torch.tensor([1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    some = pack(prompts, responses, device=CPU, wanted=wanted)
    everything = pack(prompts, responses, device=CPU)
    full = ours(everything, LOG_PROBS)[0]
    torch.testing.assert_close(ours(some, LOG_PROBS)[0], full[wanted], rtol=0, atol=1e-12)
    dense = some.dense(full[wanted])
    assert dense.shape == (2, 4)
    assert (dense != 0).tolist() == [[True, False, False, True], [False, True, True, False]]


def test_empty_prompt_is_refused() -> None:
    prompts = ragged.from_rows([torch.tensor([], dtype=torch.int64), torch.tensor([7])])
    with pytest.raises(ValueError, match="empty prompt"):
        pack(prompts, ragged.from_rows([torch.tensor([1]), torch.tensor([1])]), device=CPU)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([[2, 2], [3, 4, 5]], "row 0: target_tokens has length 2, responses has length 1"),
        ([[2], [3, 4, 5, 6]], "row 1: target_tokens has length 4, responses has length 3"),
        ([[2], [3, 9, 5]], "target_tokens has id 9: ids must be from 0 to 8"),
        ([[2], [3, 4, -1]], "target_tokens has id -1: ids must be from 0 to 8"),
    ],
)
def test_targets_that_do_not_match_are_refused(targets: list[list[int]], message: str) -> None:
    columns = {"prompts": [[1], [1]], "responses": [[1], [1, 1, 1]], "response_mask": [[1], [1, 1, 1]]}

    def packed(targets: list[list[Any]]) -> list[int]:
        given = columns | {"target_tokens": targets}
        rows = {name: ragged.from_rows(list(map(torch.tensor, column))) for name, column in given.items()}
        found = pack_rows(DataProto.from_dict(rows), device=CPU, trained=False, vocabulary=9)
        return found.targets.tolist()

    assert packed([[0], [3, 4, 8]]) == [0, 3, 4, 8]
    for wrong in (0.5, True):
        with pytest.raises(ValueError, match="target_tokens has numbers of type .*: ids are integers"):
            packed([[wrong], [wrong] * 3])
    with pytest.raises(ValueError, match=message):
        packed(targets)


def test_chunks_change_nothing() -> None:
    whole, _, _ = models_of(CONFIGS["qwen3"](), chunk=1000)
    split, _, _ = models_of(CONFIGS["qwen3"](), chunk=4)
    prompts, responses = rows_of([(3, 4), (1, 9), (6, 1)])
    results = []
    for model in (whole, split):
        logp, entropy = model(pack(prompts, responses, device=CPU), Ask(1.3, entropy=True))
        (logp.sum() + 0.1 * entropy.sum()).backward()
        results.append((logp.detach(), entropy.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_value_is_predicted_from_the_token_before() -> None:
    from transformers import AutoModel

    torch.manual_seed(0)
    attention.register_attention()
    backbone = AutoModel.from_config(CONFIGS["llama"](), attn_implementation=attention.NAME).double()
    model = ValueModel(backbone)
    prompts, responses = rows_of([(3, 4), (2, 3)])
    values, nothing = model(pack(prompts, responses, device=CPU))
    assert nothing is None
    plain = AutoModel.from_config(CONFIGS["llama"](), attn_implementation="sdpa").double()
    plain.load_state_dict(backbone.state_dict())
    expected = []
    for p, r in zip(ragged.rows(prompts), ragged.rows(responses), strict=True):
        hidden = plain(input_ids=torch.cat([p, r])[None], use_cache=False).last_hidden_state[0]
        expected.append(hidden[len(p) - 1 : -1] @ model.score.weight[0])
    torch.testing.assert_close(values, torch.cat(expected), rtol=0, atol=1e-10)
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"model", "score"}


def test_full_logits_never_stay(tmp_path: Path) -> None:
    """With chunks, the graph keeps no tensor of (tokens, vocabulary)."""
    ours, _, _ = models_of(CONFIGS["qwen3"](), chunk=8)
    prompts, responses = rows_of([(3, 40), (1, 40)])
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        ours(pack(prompts, responses, device=CPU), LOG_PROBS)
    assert not [shape for shape in kept if shape and shape[-1] == SIZES["vocab_size"]]


def test_temperatures_are_above_zero() -> None:
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temperature={wrong}: .* above 0"):
            Ask(temperature=wrong)


def test_more_tokens_than_there_are_are_refused() -> None:
    for wrong in (dict(likeliest=2), dict(likeliest=3, among=2), dict(likeliest=-1, among=2)):
        with pytest.raises(ValueError, match=f"likeliest={wrong['likeliest']} must be from 0 to among="):
            Ask(**wrong)  # type: ignore[arg-type]
    Ask(likeliest=3, among=5).require_vocabulary(3)
    with pytest.raises(ValueError, match="likeliest=3 is more than the 2 tokens"):
        Ask(likeliest=3, among=5).require_vocabulary(2)


def test_dynamic_model_mapping_names_no_causal_model() -> None:
    from transformers import ViTConfig

    with pytest.raises(ConfigError, match="not a causal language model"):
        loading.causal_class(ViTConfig(), ModelConfig(path="x"))


def test_reads_every_weight(tmp_path: Path) -> None:
    options = ModelConfig(path=str(make_model(tmp_path, hidden=32, layers=2, heads=2, kv_heads=1)))
    config = loading.load_config(options)
    weights = loading.read_weights(config, options, head="policy", dtype=torch.float32, tables=True)
    shape = loading.empty_model(
        config, options, head="policy", dtype=torch.float32, attention="sdpa", chunk_tokens=8
    )
    assert {name.removeprefix("lm.") for name, _ in shape.named_parameters()} <= set(weights)
    assert {name.removeprefix("lm.") for name, _ in shape.named_buffers()} <= set(weights)
    assert next(shape.parameters()).is_meta
    in_files = loading.read_weights(config, options, head="policy", dtype=torch.float32)
    assert set(weights) - set(in_files) == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}


def test_padded_rows_in_a_line() -> None:
    """Prompts [5] and [6, 7], responses [8, 9] and [10]: rows of three, and one token more to divide by 7."""
    prompts, responses = (
        ragged.from_rows([torch.tensor(row) for row in rows]) for rows in ([[5], [6, 7]], [[8, 9], [10]])
    )
    padded = pack(prompts, responses, device=CPU, padded=True)
    line = padded.in_a_line(7)
    assert line.input_ids.tolist() == [[5, 8, 9, 6, 7, 10, 0]]
    assert line.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0]]
    assert line.plan is not None and line.plan.boundaries.tolist() == [0, 3, 6, 7]
    assert torch.equal(line.predicts_at, padded.predicts_at) and line.predicts_at.tolist() == [0, 1, 4]
    assert line.places.tolist() == [0, 1, 3, 4] and line.targets.tolist() == [8, 9, 10]
    whole = padded.in_a_line()
    assert whole.input_ids.tolist() == [[5, 8, 9, 6, 7, 10]]
    assert whole.plan is not None and whole.plan.boundaries.tolist() == [0, 3, 6]


def test_of_a_padded_row_without_a_response_all_of_the_prompt_is_read() -> None:
    prompts, responses = (
        ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])
        for rows in ([[5, 6], [7]], [[], [8, 9]])
    )
    padded = pack(prompts, responses, device=CPU, padded=True)
    assert padded.input_ids.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert padded.places.tolist() == [0, 1, 3, 4]
