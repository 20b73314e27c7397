"""When a model is loaded, its rows turn out to be packed, padded, or refused. Where they are not refused,
log-probabilities and gradients are those of transformers' own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.pool import Ranks
from engine.rank_jobs import make_engine, padding_of
from torch.distributed.tensor import DTensor

from hydraflow import metrics
from hydraflow.engine.fsdp import parity
from hydraflow.engine.fsdp.build import hf_name
from hydraflow.errors import ConfigError
from hydraflow.models.loading import context_of
from hydraflow.models.probe import (
    ROUNDED,
    deviation,
    is_exact,
    is_rounding,
    probe_rows,
    within_tolerance,
)
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from scripts.tiny_types import save_tiny, tiny_config

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=0)
GROUPED = SIZES | dict(num_key_value_heads=2, head_dim=8)
RECURRENT = GROUPED | dict(num_hidden_layers=3, num_key_value_heads=1, lru_width=32, attention_window_size=64)
HYBRID = dict(mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_n_groups=1)
PACKED = {
    "qwen3": transformers.Qwen3Config(**GROUPED),
    "hyperclovax": transformers.HyperCLOVAXConfig(**GROUPED, logits_scaling=0.1),  # multiplies
    "granite": transformers.GraniteConfig(**GROUPED, logits_scaling=8.0),  # divides
    "llama": transformers.LlamaConfig(**GROUPED, logit_scale=0.5),  # which this type ignores
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=12),
    "mixtral": transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "phimoe": transformers.PhimoeConfig(**GROUPED, num_local_experts=4, router_jitter_noise=0.1),  # trained
}
PADDED = {
    "falcon_h1": transformers.FalconH1Config(**GROUPED, **HYBRID, lm_head_multiplier=0.3),
    "doge": transformers.DogeConfig(**GROUPED),  # its attention has a mask of its own
    "nemotron": transformers.NemotronConfig(**GROUPED),  # its layers pass nothing on to attention
    "gemma2": transformers.Gemma2Config(**GROUPED, attn_logit_softcapping=0.5),
    "recurrent_gemma": transformers.RecurrentGemmaConfig(**RECURRENT, logits_soft_cap=0.5),
    "llama4_text": transformers.Llama4TextConfig(
        **GROUPED, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=64
    ),  # what transformers calls its base model is all of it
}
WINDOWS = {  # their layers tell attention of the window only by the mask
    "phimoe": transformers.PhimoeConfig(**GROUPED, num_local_experts=4, sliding_window=32),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **GROUPED, num_experts=4, use_sliding_window=True, sliding_window=32, max_window_layers=1
    ),
}
REFUSED = {
    "modernbert-decoder": transformers.ModernBertDecoderConfig(**SIZES, cls_token_id=0, sep_token_id=1),
    "xlnet": transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48),
    # fillers of shorter rows change them, and the longest is right: half of all tokens
    "cpmant": transformers.CpmAntConfig(
        vocab_size=64, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48, num_hidden_layers=2
    ),
}


def saved(config: transformers.PreTrainedConfig, folder: Path) -> transformers.PreTrainedModel:
    """A model all of whose weights matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in lm.parameters():
            wide = parameter.ndim > 1
            parameter.data = torch.randn_like(parameter) * 0.2 + (0 if wide else parameter.data)
    lm.save_pretrained(folder)
    return lm.eval()


def response_log_probs(lm: transformers.PreTrainedModel, rows: DataProto) -> list[torch.Tensor]:
    found = []
    for prompt, response in zip(ragged.rows(rows.get("prompts")), ragged.rows(rows.get("responses"))):
        ids = torch.cat([prompt, response])[None]
        logits = lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, response[:, None])[:, 0])
    return found


@pytest.mark.parametrize("kind", [*PACKED, *PADDED])
def test_numbers_and_gradients_are_the_models_own(kind: str, one_rank: None, tmp_path: Path) -> None:
    lm = saved((PACKED | PADDED)[kind], tmp_path)
    engine = make_engine(str(tmp_path), {"model": {"enable_gradient_checkpointing": False}})
    assert engine._padded == (kind in PADDED)
    context = context_of(lm.config)
    prompts, responses = probe_rows(SIZES["vocab_size"], context.tokens if context else None)
    mask = torch.ones(len(ragged.parts(responses)[0]), dtype=torch.int64)
    columns = {"prompts": prompts, "responses": responses}
    rows = DataProto.from_dict(
        {**columns, "response_mask": ragged.from_parts(mask, ragged.lengths(responses))}
    )
    if lm.config.model_type == "gemma2":
        lm.set_attn_implementation("eager")
    expected = torch.cat(response_log_probs(lm, rows))
    found = ragged.parts(engine.forward([rows]).get("log_probs"))[0]
    torch.testing.assert_close(found, expected.detach(), atol=2e-4, rtol=1e-4)

    engine.forward_backward(
        [rows],
        lambda output, _: (output.log_probs.sum(), {"n": metrics.summed(1)}),  # type: ignore[union-attr]
    )
    expected.sum().backward()
    own = dict(lm.named_parameters())
    for name, parameter in engine.module.named_parameters():
        gradient, wanted = parameter.grad, own[hf_name(engine.module, name)].grad
        assert isinstance(gradient, DTensor) and wanted is not None, name
        torch.testing.assert_close(gradient.to_local(), wanted, atol=2e-3, rtol=2e-3, msg=name)


@pytest.mark.parametrize(
    "config",
    [
        transformers.PhimoeConfig(**GROUPED, num_local_experts=4, sliding_window=128),  # all positions
        transformers.LlamaConfig(**GROUPED, sliding_window=32),  # which Llama ignores
    ],
)
def test_windows_that_hide_no_key_do_not_matter(
    config: transformers.PretrainedConfig, one_rank: None, tmp_path: Path
) -> None:
    saved(config, tmp_path)
    assert not make_engine(str(tmp_path), {})._padded


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_of_masks_are_kept(kind: str, one_rank: None, tmp_path: Path) -> None:
    """In rows that are longer than the window, which those of the comparison are not."""
    lm = saved(WINDOWS[kind], tmp_path)
    engine = make_engine(str(tmp_path), {})
    assert engine._padded
    draw = torch.Generator().manual_seed(0)
    prompts, responses = (
        ragged.from_rows([torch.randint(64, (n,), generator=draw) for n in lengths])
        for lengths in ((20, 3), (50, 7))
    )
    rows = DataProto.from_dict({"prompts": prompts, "responses": responses})
    found = ragged.parts(engine.forward([rows]).get("log_probs"))[0]
    expected = torch.cat(response_log_probs(lm, rows)).detach()
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_computed_wrong_is_refused(
    kind: str, dtype: str, one_rank: None, tmp_path: Path
) -> None:
    saved(REFUSED[kind], tmp_path)
    with pytest.raises(ConfigError, match=f"models of type {kind} are not supported: ") as raised:
        make_engine(str(tmp_path), {"fsdp": {"dtype": dtype}})
    assert raised.value.problems[0].field == "actor_rollout_ref.model.path"


def test_wrong_numbers_are_distinguished_from_rounding_by_medians_and_means() -> None:
    """phimoe's on a CPU without bfloat16: by the medians they could be rounding."""
    config, theirs, rounded = transformers.Qwen3Config(**GROUPED), torch.zeros(5), torch.full((5,), 0.1)
    config._attn_implementation = "sdpa"

    def again(numbers: torch.Tensor) -> torch.Tensor:
        assert config._attn_implementation == "eager"
        return numbers

    def rounds(ours: list[float], numbers: torch.Tensor = rounded) -> bool:
        found = is_rounding(torch.tensor(ours), theirs, config, lambda: again(numbers))
        assert config._attn_implementation == "sdpa"
        return found

    assert rounds([0.24] * 5) and not rounds([0.26] * 5)
    assert rounds([0.2, 0.2, 0.2, 0.2, 0.4]) and not rounds([0.2, 0.2, 0.2, 1.0, 1.4]), "by the means"
    assert not rounds([0.1] * 5, theirs), "there is no rounding"
    for broken in (float("nan"), float("inf")):
        assert not rounds([0.1] * 5, torch.tensor([0.1, 0.1, 0.1, 0.1, broken]))


def test_every_token_counts_where_rounding_cannot_be_that_large() -> None:
    """In bf16, and where it may route a token to another expert, it can."""
    tiny = {
        kind: transformers.AutoModelForCausalLM.from_config(PACKED[kind]) for kind in ("qwen3", "mixtral")
    }
    assert is_exact(tiny["qwen3"], torch.float32) and not is_exact(tiny["qwen3"], torch.bfloat16)
    assert not is_exact(tiny["mixtral"], torch.float32)


def test_one_wrong_token_is_noticed(one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of packed rows; medians would hide it."""
    saved(PACKED["qwen3"], tmp_path)
    known = parity._as_trained

    def off(module: Any, batch: Any, ulysses: Any) -> torch.Tensor:
        found = known(module, batch, ulysses)
        return found + (torch.arange(len(found)) == len(found) - 1) * (batch.plan is not None) * 0.01

    monkeypatch.setattr(parity, "_as_trained", off)
    assert make_engine(str(tmp_path), {})._padded


def test_how_far_numbers_are_off_is_said_of_the_worst_row_or_token() -> None:
    lengths = torch.tensor([3, 2])
    ours = torch.tensor([0.1, 0.2, 0.9, 0.5, 0.7])
    states = torch.full((5, 2), 2.0)
    for exact, row in ((False, 0.6), (True, 0.9)):
        worst, middle = deviation(ours, torch.zeros(5), lengths, exact=exact)
        assert (worst, middle) == (pytest.approx(row), pytest.approx(0.5))
        found = deviation(states + 0.5, states, lengths, exact=exact)
        assert found == (0.25, 0.25), "relative to their size"
        broken = ours.clone().index_fill_(0, torch.tensor(4), torch.nan)
        assert deviation(broken, torch.zeros(5), lengths, exact=exact) == (float("inf"), float("inf"))
    assert within_tolerance(float("inf"), float("inf"), torch.bfloat16) is False
    assert (
        within_tolerance(0.3, ROUNDED + 0.01, torch.bfloat16) is False
        and within_tolerance(0.3, 0.2, torch.bfloat16) is None
    )


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "phimoe", "doge", "recurrent_gemma"])
def test_rounding_to_bfloat16_hides_no_wrong_numbers(kind: str, one_rank: None, tmp_path: Path) -> None:
    """Tiny models of `scripts/tiny_types.py`; packed rows of the last three are off by 0.06 to 0.24."""
    save_tiny(tiny_config(kind), tmp_path)
    padded = padding_of(str(tmp_path), {"fsdp": {"dtype": "bf16"}})
    assert padded == (kind in ("phimoe", "doge", "recurrent_gemma"))


def test_a_critic_whose_tokens_see_later_ones_is_refused(one_rank: None, tmp_path: Path) -> None:
    """BERT as it is published: the end of a row changes its start, and so do fillers."""
    saved(transformers.BertConfig(**SIZES), tmp_path)
    with pytest.raises(ConfigError, match="models of type bert are not supported: "):
        make_engine(str(tmp_path), {"head": "value"})


def test_a_critic_of_rows_that_cannot_be_packed_pads_them(one_rank: None, tmp_path: Path) -> None:
    saved(PADDED["doge"], tmp_path)
    assert make_engine(str(tmp_path), {"head": "value"})._padded


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_a_mixture_of_experts_gets_adapters_where_it_has_linear_layers(
    targets: object, one_rank: None, tmp_path: Path
) -> None:
    """One of its layers is dense; the experts of the other are one tensor."""
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[0])
    lm = saved(transformers.Qwen3MoeConfig(**GROUPED, **sizes), tmp_path)
    engine = make_engine(str(tmp_path), {"model": {"lora_rank": 2, "target_modules": targets}})
    adapted = {name.split(".lora_")[0] for name, p in engine.module.named_parameters() if p.requires_grad}
    layers = {name.rpartition(".")[2] for name in adapted}
    others = {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"} if targets == "all-linear" else set()
    assert layers == {"q_proj", "down_proj", *others}
    assert not any("layers.1.mlp" in name for name in adapted)
    sent = dict(engine.weights())
    for name, parameter in lm.named_parameters():
        assert torch.equal(sent[name], parameter), name


@pytest.mark.slow
def test_all_ranks_decide_alike(ranks: Ranks, tmp_path: Path) -> None:
    for kind in ("doge", "nemotron"):
        saved(PADDED[kind], tmp_path / kind)
        assert ranks.run(padding_of, str(tmp_path / kind), {"model": {"lora_rank": 2}}) == [True, True]
    saved(PACKED["qwen3"], tmp_path / "qwen3")
    for options in ({"param_offload": True}, {"offload_policy": True}, {"dtype": "bf16"}):
        assert ranks.run(padding_of, str(tmp_path / "qwen3"), {"fsdp": options}) == [False, False]
