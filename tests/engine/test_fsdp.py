"""The FSDP engine against one plain process with torch's AdamW, on one rank and on two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine import rank_jobs as jobs
from engine.alike import assert_same, assert_sent
from engine.pool import Ranks
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hydraflow.engine.base import ModelOutput
from hydraflow.engine.config import WrapPolicyConfig
from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.errors import ConfigError
from hydraflow.models import compiled
from hydraflow.models.adapters import (
    SIDES,
    AdapterLayers,
    Form,
    adapter_name,
    add_shapes,
    is_adapter,
    layer_and_side,
)
from hydraflow.models.ask import Ask
from hydraflow.protocol import ragged

DOUBLE = {"model_dtype": "fp64", "dtype": "fp64"}
TOLERANCE = {"fp64": 1e-10, "fp32": 3e-5}
OPTIONS: dict[str, dict[str, Any]] = {"fp64": {"fsdp": DOUBLE}, "fp32": {}}


def test_layers_from_a_size_on_are_units(tiny: str) -> None:
    """With the root; by default a small model is one unit."""

    def units(**policy: int) -> int:
        engine = jobs.make_engine(tiny, {"fsdp": {"wrap_policy": WrapPolicyConfig(**policy)}})
        return sum(isinstance(part, FSDPModule) for part in engine.module.modules())

    layer = AutoModelForCausalLM.from_pretrained(tiny).model.layers[0]
    size = sum(parameter.numel() for parameter in layer.parameters())
    assert [units(min_num_params=size), units(min_num_params=size + 1), units()] == [3, 1, 1]


def plain_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    """The loss of `rank_jobs.loss_of` at temperature 0.8, from transformers' logits, one row at a time."""
    batch = jobs.make_batch(step)
    columns = [
        ragged.rows(batch.batch[name]) for name in ("prompts", "responses", "response_mask", "advantages")
    ]
    total = torch.zeros((), dtype=torch.float64)
    for prompt, response, mask, weight in zip(*columns, strict=True):
        logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
        logp = (logits / 0.8).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        total = total + (weight * mask * (logp + 0.1 * logp.square())).sum() / 10
    return total


def plain_training(
    path: str, dtype: torch.dtype, steps: int = 3
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(steps):
        plain_loss(model, step).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, dict(model.named_parameters())


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_weights_are_those_of_one_plain_process(tiny: str, ranks: Ranks, precision: str) -> None:
    norms, weights = plain_training(tiny, torch.float64 if precision == "fp64" else torch.float32)
    alone = jobs.train(tiny, OPTIONS[precision], 2, len(norms))
    for result in [alone, *ranks.run(jobs.train, tiny, OPTIONS[precision], 2, len(norms))]:
        assert [reported["grad_norm"] for reported in result["reported"]] == pytest.approx(
            norms, rel=1e-10 if precision == "fp64" else 1e-3
        )
        # Adam's first steps are signs of gradients: rounding in a tiny gradient moves a weight by a visible
        # part of lr
        assert_same(result["weights"], weights, 1e-10 if precision == "fp64" else 2e-3)


@pytest.mark.parametrize("options", [{}, {"model": {"lora_rank": 2, "target_modules": "all-linear"}}])
def test_weights_for_one_rank_have_values_there_alone(
    tiny: str, ranks: Ranks, options: dict[str, Any]
) -> None:
    receivers = (None, 0, 1)
    sent = ranks.run(jobs.weights_to, tiny, options, receivers)
    assert_sent(sent, receivers, sent[0][0])


def test_forward_sees_the_newest_weights(tiny: str, ranks: Ranks) -> None:
    alone = jobs.train(tiny, OPTIONS["fp64"])["seen"]
    for kept in (True, False):
        both = ranks.run(jobs.train, tiny, {"fsdp": {**DOUBLE, "reshard_after_forward": not kept}})
        for step, whole in enumerate(alone):
            torch.testing.assert_close(
                torch.cat([rank["seen"][step] for rank in both]), whole, rtol=0, atol=1e-10
            )


@pytest.mark.slow(short=True)
@pytest.mark.parametrize("model", [{}, {"lora_rank": 2, "target_modules": "all-linear"}], ids=["", "lora"])
def test_compiled_kernels_give_the_same_gradient(tiny: str, model: dict[str, Any]) -> None:
    options = {"model": {"enable_gradient_checkpointing": True, **model}}
    plain = jobs.one_gradient(tiny, options, jobs.ROWS)
    with patch.object(compiled, "swiglu", wraps=compiled.swiglu) as called:
        found = jobs.cut_gradients(tiny, {**options, "fsdp": {"use_torch_compile": True}}, (jobs.ROWS, 3))
    assert called.called
    for gradient in found:
        assert_same(gradient, plain, TOLERANCE["fp32"])


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("head", ["policy", "value"])
def test_gradient_does_not_depend_on_ranks_or_micro_batches(
    tiny: str, ranks: Ranks, precision: str, head: str
) -> None:
    options = {**OPTIONS[precision], "head": head}
    whole, *alone = jobs.cut_gradients(tiny, options, (jobs.ROWS, 1, 3), head == "policy")
    assert max(g.abs().max() for g in whole.values()) > 1e-2
    both = ranks.run(jobs.cut_gradients, tiny, options, (1, 4), head == "policy")
    for found in (alone, *both):
        for result in found:
            assert_same(result, whole, TOLERANCE[precision])


def test_gradient_of_log_probs_and_entropies_does_not_depend_on_chunks(tiny: str, ranks: Ranks) -> None:
    whole = jobs.one_gradient(tiny, {"fsdp": DOUBLE}, jobs.ROWS, True)
    for result in ranks.run(jobs.one_gradient, tiny, {"fsdp": {**DOUBLE, "head_chunk_tokens": 3}}, 2, True):
        assert_same(result, whole, 1e-12)


@pytest.mark.parametrize(
    "change",
    [
        {"fsdp": {**DOUBLE, "head_chunk_tokens": 3}},
        {"fsdp": {**DOUBLE, "reshard_after_forward": False}},
        {"fsdp": {**DOUBLE, "wrap_policy": WrapPolicyConfig(min_num_params=10**6)}},
        {"fsdp": {**DOUBLE, "param_offload": True}},
        {"fsdp": {**DOUBLE, "offload_policy": True}},
        {"fsdp": {**DOUBLE, "optimizer_offload": True}},
        {"fsdp": DOUBLE, "model": {"use_remove_padding": False}},
        {"fsdp": DOUBLE, "model": {"enable_gradient_checkpointing": False}},
    ],
    ids=[
        "head_chunks",
        "keep_gathered",
        "one_unit",
        "param_offload",
        "offload_policy",
        "optimizer_offload",
        "padded",
        "no_checkpointing",
    ],
)
def test_options_of_layout_change_no_number(tiny: str, ranks: Ranks, change: dict[str, Any]) -> None:
    usual = jobs.train(tiny, OPTIONS["fp64"])["weights"]
    assert_same(jobs.train(tiny, change)["weights"], usual, 1e-10)
    assert_same(ranks.run(jobs.train, tiny, change)[1]["weights"], usual, 1e-10)


def test_gradients_are_reduced_once(tiny: str, ranks: Ranks) -> None:
    for one, four in ranks.run(jobs.count_reductions, tiny, 4):
        assert one == four and one[jobs.SCATTERED] == 3  # two layers and the root


def test_clipping(tiny: str, ranks: Ranks) -> None:
    free = jobs.make_engine(tiny, OPTIONS["fp64"])
    free.forward_backward([jobs.make_batch()], jobs.loss_of)
    norm = torch.cat([g.flatten() for g in jobs.gradients(free).values()]).norm().item()
    assert free.optimizer_step()["grad_norm"] == pytest.approx(norm, rel=1e-12)

    clipped = jobs.make_engine(tiny, {"fsdp": DOUBLE, "optim": {"clip_grad": norm / 4}})
    seen: list[float] = []
    clipped._optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            torch.cat([g.flatten() for g in jobs.gradients(clipped).values()]).norm().item()
        )
    )
    clipped.forward_backward([jobs.make_batch()], jobs.loss_of)
    reported = clipped.optimizer_step()
    assert reported["grad_norm"] == pytest.approx(norm, rel=1e-12)
    assert seen == [pytest.approx(norm / 4, rel=1e-5)]
    assert not jobs.gradients(clipped)


def test_a_norm_that_is_not_finite_skips_the_step_on_all_ranks(tiny: str, ranks: Ranks) -> None:
    for reported, moved, _ in ranks.run(jobs.break_one_rank, tiny):
        assert reported["skipped"] == 1.0
        assert not reported["grad_norm"] < float("inf")
        assert not moved


def test_bf16_computes_in_bf16_and_keeps_float32(tiny: str, ranks: Ranks) -> None:
    bf16 = {"fsdp": {"dtype": "bf16"}}
    full, half = jobs.train(tiny, {}), jobs.train(tiny, bf16)
    both = ranks.run(jobs.train, tiny, bf16)
    for result in [half, *both]:
        difference = abs(result["reported"][0]["grad_norm"] / full["reported"][0]["grad_norm"] - 1)
        assert 0 < difference < 0.02
        assert {tensor.dtype for tensor in result["weights"].values()} == {torch.float32}


def test_output_and_columns_are_right_padded(tiny: str) -> None:
    engine, batch = jobs.make_engine(tiny), jobs.make_batch()
    seen: dict[str, Any] = {}

    def loss(output: ModelOutput, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.update(columns, output=output)
        return jobs.loss_of(output, columns)

    reported = engine.forward_backward([batch], loss, Ask(0.8, entropy=True))
    log_probs, entropy, mask = seen["output"].log_probs, seen["output"].entropy, seen["response_mask"]
    assert log_probs.shape == entropy.shape == mask.shape == seen["advantages"].shape == (8, 9)
    assert "prompts" not in seen
    assert torch.equal(log_probs != 0, mask.bool()) and torch.equal(entropy > 0, mask.bool())
    assert reported["tokens"].value == int(ragged.parts(batch.batch["response_mask"])[0].sum())
    inferred = engine.forward([batch], Ask(0.8, entropy=True))
    assert torch.equal(ragged.lengths(inferred.batch["log_probs"]), ragged.lengths(batch.batch["responses"]))
    torch.testing.assert_close(
        ragged.to_padded(inferred.batch["log_probs"]) * mask, log_probs.detach(), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        ragged.to_padded(inferred.batch["entropys"]) * mask, entropy.detach(), rtol=0, atol=1e-6
    )


def test_a_micro_batch_without_trained_tokens(tiny: str) -> None:
    batch = jobs.make_batch()
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    engine = jobs.make_engine(tiny)
    engine.forward_backward([batch], jobs.loss_of)
    assert engine.optimizer_step()["grad_norm"] == 0.0


@pytest.mark.parametrize("head", ["policy", "value"])
def test_frozen_engine_only_speaks(tiny: str, head: str) -> None:
    frozen = jobs.make_engine(tiny, {"optim": None, "head": head})
    assert not any(p.requires_grad for p in frozen.module.parameters())
    assert len(frozen.forward([jobs.make_batch()])) == 8
    with pytest.raises(AssertionError, match="frozen"):
        frozen.optimizer_step()


def test_schedule_moves_with_lr_step(tiny: str) -> None:
    engine = jobs.make_engine(tiny, {"optim": {"lr": 1.0, "lr_warmup_steps": 2}, "total_steps": 10})
    rates = []
    for _ in range(3):
        rates.append(engine._optimizer.param_groups[0]["lr"])
        engine.lr_step()
    assert rates == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}], ids=["full", "lora"])
def test_directory_is_bit_equal_and_a_resumed_run_is_too(
    tiny: str, ranks: Ranks, tmp_path: Path, lora: dict[str, Any]
) -> None:
    options = {
        "model": lora,
        "optim": {"lr_warmup_steps": 1, "lr_scheduler_type": "linear"},
        "total_steps": 9,
    }
    # which transformers reads, and does not save
    shutil.copytree(tiny, tmp_path / "tiny")
    settings = tmp_path / "tiny" / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_sample": False, "top_p": 0.6}))
    tiny = str(tmp_path / "tiny")
    first = ranks.run(jobs.save_both, tiny, options, str(tmp_path))[0]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert_same(dict(read.named_parameters()), first["saved"], 0.0)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template
    assert read.generation_config.top_p == 0.6
    assert read.generation_config.eos_token_id == AutoTokenizer.from_pretrained(tiny).eos_token_id
    assert not list(tmp_path.glob("*.unfinished"))

    again = ranks.run(jobs.resume, tiny, options, str(tmp_path))[0]
    assert_same(again["saved"], first["saved"], 0.0)
    assert_same(again["next"], first["next"], 0.0)
    assert again["lr"] == first["lr"]
    alone = jobs.resume(tiny, options, str(tmp_path))
    assert_same(alone["saved"], first["saved"], 0.0)
    assert_same(alone["next"], first["next"], 2e-3)


def test_untied_embeddings_are_saved_and_trained(tmp_path: Path, ranks: Ranks, tiny: str) -> None:
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    for file in Path(tiny).glob("*token*"):
        shutil.copy(file, tmp_path / "llama")
    saved = ranks.run(jobs.save_both, str(tmp_path / "llama"), {}, str(tmp_path))[0]["saved"]
    assert "lm_head.weight" in saved
    assert_same(dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters()), saved, 0.0)


def test_value_model_is_saved_as_token_classification(tiny: str, tmp_path: Path) -> None:
    options = {"head": "value"}
    saved = jobs.save_both(tiny, options, str(tmp_path))["saved"]
    assert saved["score.weight"].abs().sum() > 0
    read = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf")
    assert_same(dict(read.named_parameters()), saved, 0.0)
    again = jobs.make_engine(str(tmp_path / "hf"), options)
    assert_same(jobs.full_weights(again), saved, 0.0)


def test_a_value_model_gets_a_class_that_reads_its_score(tiny: str, tmp_path: Path) -> None:
    """GPT-2's token classification calls its head otherwise and gives it a bias."""
    shape = GPT2Config(
        vocab_size=17, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1
    )
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "gpt2")
    for file in Path(tiny).glob("*token*"):
        shutil.copy(file, tmp_path / "gpt2")
    saved = jobs.save_both(str(tmp_path / "gpt2"), {"head": "value"}, str(tmp_path))["saved"]
    read, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same(dict(read.named_parameters()), saved, 0.0)
    assert read.config.architectures == ["GPT2ForSequenceClassification"]


def test_value_model_starts_at_zero(tiny: str) -> None:
    values = jobs.make_engine(tiny, {"head": "value"}).forward([jobs.make_batch()]).batch["values"]
    assert ragged.parts(values)[0].eq(0).all()


def test_adapters_start_as_the_base_and_merge_to_what_they_compute(
    tiny: str, ranks: Ranks, tmp_path: Path
) -> None:
    options = {
        "fsdp": DOUBLE,
        "model": {"lora_rank": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]},
    }
    batch = jobs.make_batch()
    base = (
        jobs.make_engine(tiny, {"fsdp": DOUBLE, "optim": None}).forward([batch]).batch["log_probs"].values()
    )
    engine = jobs.make_engine(tiny, options)
    trained = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2 and all(".lora_" in name for name in trained)
    assert torch.equal(engine.forward([batch]).batch["log_probs"].values(), base)
    for _ in range(3):
        engine.forward_backward([batch], jobs.loss_of)
        engine.optimizer_step()
    changed = engine.forward([batch]).batch["log_probs"].values()
    assert (changed - base).abs().max() > 1e-2
    assert torch.equal(engine.forward([batch], adapter=False).batch["log_probs"].values(), base)
    torch.testing.assert_close(engine.forward([batch]).batch["log_probs"].values(), changed, rtol=0, atol=0)

    assert_apart_is_merged(engine)
    engine.save_hf(tmp_path / "merged")
    merged = jobs.make_engine(str(tmp_path / "merged"), {"fsdp": DOUBLE, "optim": None})
    torch.testing.assert_close(
        merged.forward([batch]).batch["log_probs"].values(), changed, rtol=0, atol=1e-10
    )
    assert_same(
        ranks.run(jobs.train, tiny, options)[0]["weights"], jobs.train(tiny, options)["weights"], 1e-10
    )


def assert_apart_is_merged(engine: FSDPEngine) -> None:
    """W + B A of what is sent apart, for each layer that has an adapter."""
    sent = {form: {name: one.clone() for name, one in engine.weights(form=form)} for form in Form}
    merged, apart, adapters = (sent[form] for form in (Form.MERGED, Form.APART, Form.ADAPTERS))
    assert list(apart) == [*merged, *adapters], "the base weights come first"
    changed = {layer_and_side(name)[0] for name in adapters}
    for name, weight in merged.items():
        layer = name.removesuffix(".weight")
        assert torch.equal(apart[name], weight) == (layer not in changed)
        if layer in changed:
            a, b = (adapters[adapter_name(layer, side)] for side in SIDES)
            torch.testing.assert_close(apart[name] + b @ a, weight, rtol=0, atol=1e-12)


def test_an_engine_can_tell_which_adapters_come_and_every_rank_sends_the_same(
    tiny: str, ranks: Ranks
) -> None:
    """From the model's configuration alone."""
    for targets in ("all-linear", ["q_proj", "down_proj"], ".*layers.0.*up_proj"):
        options = {"model": {"lora_rank": 2, "target_modules": targets}}
        shaped = AutoModelForCausalLM.from_pretrained(tiny).to("meta")
        add_shapes(AdapterLayers(2, targets if isinstance(targets, str) else tuple(targets)), shaped)
        expected = {name: one.shape for name, one in shaped.named_parameters() if is_adapter(name)}
        found = [one for (one,) in ranks.run(jobs.weights_to, tiny, options, [None], Form.ADAPTERS)]
        assert {name: one.shape for name, one in found[0].items()} == expected != {}
        assert_same(found[0], found[1], 0)


def test_all_linear_adapts_every_projection_and_the_value_head_is_trained(tiny: str) -> None:
    engine = jobs.make_engine(tiny, {"head": "value", "model": {"lora_rank": 2}})
    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    assert "score.weight" in trained and len(trained) == 1 + 2 * 7 * 2
    with pytest.raises(ConfigError, match="actor_rollout_ref.model.target_modules"):
        jobs.make_engine(tiny, {"model": {"lora_rank": 2, "target_modules": ["nothing"]}})


def test_missing_weights_stop_every_rank(tiny: str, ranks: Ranks, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    first, second = ranks.run(jobs.refusal, str(tmp_path / "broken"))
    assert first == second
    assert "its weights cannot be read" in first


def test_token_budget_gives_every_rank_as_many_parts(ranks: Ranks) -> None:
    lengths = [
        int(n)
        for n in ragged.lengths(jobs.make_batch().batch["prompts"])
        + ragged.lengths(jobs.make_batch().batch["responses"])
    ]
    (first, order), (second, _) = ranks.run(jobs.split_by_tokens, max(lengths))
    assert first == second > 1
    assert sorted(order) == [0, 1, 2, 3]


def test_supervised_rows_need_nothing_special(tiny: str) -> None:
    """A supervised row: one token of prompt, and a mask that chooses what is learnt; the loss is
    transformers' own."""
    row = torch.tensor([3, 5, 7, 2, 4])
    mask = torch.tensor([0, 1, 1, 0])
    data = jobs.DataProto.from_dict(
        {
            "prompts": ragged.from_rows([row[:1]]),
            "responses": ragged.from_rows([row[1:]]),
            "response_mask": ragged.from_rows([mask]),
        }
    )
    engine = jobs.make_engine(tiny, {"fsdp": DOUBLE})

    def mean_loss(
        output: ModelOutput, columns: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        assert output.log_probs is not None
        return -output.log_probs.sum() / 2, {}

    engine.forward_backward([data], mean_loss)
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    plain(
        input_ids=row[None], labels=torch.where(torch.cat([torch.tensor([0]), mask]).bool(), row, -100)[None]
    ).loss.backward()
    for name, gradient in jobs.gradients(engine).items():
        wanted = plain.get_parameter(name.removeprefix("lm.")).grad
        # transformers takes its loss in float32.
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-6)


def test_a_model_without_generation_settings_is_written_with_its_end_token(
    tiny: str, tmp_path: Path, one_rank: None
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    (folder / "generation_config.json").unlink()
    engine = jobs.make_engine(str(folder), {})
    engine.save_hf(str(tmp_path / "hf"))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert read.generation_config.eos_token_id == read.config.eos_token_id is not None
