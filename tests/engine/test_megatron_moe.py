"""Mixtures of experts on Megatron-Core, divided in every way, give the numbers, gradients and steps of the
FSDP engine and of transformers itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import megatron_moe_jobs as jobs
from engine.alike import assert_same, assert_sent
from engine.megatron_jobs import (
    OPTIM,
    read_checkpoint,
    refusal,
    save_both,
    save_hf,
    state_of,
    weights_to,
    write_checkpoint,
)
from engine.megatron_models import GROUPED, LATENT, MIXTURES, QWEN, SCORE, save_model
from engine.megatron_models import of_mixtures as sizes
from engine.megatron_ways import Oracle, assert_near, check
from engine.pool import Ranks
from generation.test_native import empty
from model_merger.directories import assert_same_bits, merge, read
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

YARN: dict[str, Any] = dict(rope_type="yarn", rope_theta=100.0, factor=4.0)
YARN |= dict(original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.0)
FAMILIES: dict[str, Any] = {
    **MIXTURES,
    "deepseek_v3": DeepseekV3Config(
        **LATENT, q_lora_rank=20, n_group=4, topk_group=2, n_shared_experts=2, rope_parameters=YARN
    ),
    "deepseek_v3, plain": DeepseekV3Config(
        **LATENT,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
        rms_norm_eps=1e-3,
    ),
    "deepseek_v2": DeepseekV2Config(
        **LATENT | dict(num_experts_per_tok=3), q_lora_rank=None, routed_scaling_factor=2.0
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}, q_lora_rank=20
    ),
    "qwen3_moe": Qwen3MoeConfig(**QWEN, norm_topk_prob=False),
    "a dense layer": Qwen3MoeConfig(**QWEN, norm_topk_prob=True, mlp_only_layers=[1]),
    "four layers": Qwen3MoeConfig(
        **QWEN | dict(num_hidden_layers=4), norm_topk_prob=True, mlp_only_layers=[2]
    ),
}


@pytest.fixture(scope="module")
def oracle(models: Path) -> Oracle:
    """With the FSDP engine in float32: the kernels of experts have no float64."""
    return Oracle(models, {})


PLAIN = {"use_distributed_optimizer": False}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "alone, deepseek_v3": ("deepseek_v3", 1, sizes()),
    "alone, deepseek_v3, plain": ("deepseek_v3, plain", 1, sizes()),
    "alone, deepseek_v2": ("deepseek_v2", 1, sizes()),
    "alone, qwen2_moe": ("qwen2_moe", 1, sizes()),
    "alone, glm4_moe_lite": ("glm4_moe_lite", 1, sizes()),
    "alone, glm4_moe": ("glm4_moe", 1, sizes()),
    "deepseek_v3, tp 2": ("deepseek_v3", 2, sizes(2)),
    "deepseek_v3, plain, tp 2, ep 2": ("deepseek_v3, plain", 2, sizes(2, experts=2, slices=1, **PLAIN)),
    "deepseek_v2, tp 2": ("deepseek_v2", 2, sizes(2)),
    "qwen2_moe, tp 2": ("qwen2_moe", 2, sizes(2)),
    "glm4_moe, tp 2": ("glm4_moe", 2, sizes(2)),
    "deepseek_v3, ep 2": ("deepseek_v3", 2, sizes(experts=2)),
    "deepseek_v3, pp 2": ("deepseek_v3", 2, sizes(1, 2)),
    "deepseek_v3, context 2": ("deepseek_v3", 2, sizes(context_parallel_size=2)),
    "deepseek_v3, tp 2, pp 2": ("deepseek_v3", 4, sizes(2, 2)),
    "deepseek_v3, tp 2, ep 2, data 2": ("deepseek_v3", 4, sizes(2, experts=2, slices=1)),
    "alone": ("qwen3_moe", 1, sizes()),
    "alone, mixtral": ("mixtral", 1, sizes(**PLAIN)),
    "data 2": ("qwen3_moe", 2, sizes()),
    "ep 2": ("qwen3_moe", 2, sizes(experts=2)),
    "ep 2, plain optimizer": ("mixtral", 2, sizes(experts=2, **PLAIN)),
    "tp 2": ("mixtral", 2, sizes(2)),
    "tp 2, plain optimizer": ("a dense layer", 2, sizes(2, **PLAIN)),
    "tp 2, whole experts": ("qwen3_moe", 2, sizes(2, slices=1, **PLAIN)),
    "tp 2, ep 2": ("qwen3_moe", 2, sizes(2, experts=2, slices=1)),
    "sliced experts": ("a dense layer", 2, sizes(slices=2)),
    "pp 2": ("a dense layer", 2, sizes(1, 2)),
    "pp 2, plain optimizer": ("a dense layer", 2, sizes(1, 2, **PLAIN)),
    "tp 2, ep 2, data 2": ("mixtral", 4, sizes(2, experts=2, slices=1)),
    "tp 2, ep 2, slices 2": ("qwen3_moe", 4, sizes(2, experts=2)),
    "tp 2, ep 4": ("qwen3_moe", 4, sizes(2, experts=4, slices=1, **PLAIN)),
    "pp 2, ep 2": ("a dense layer", 4, sizes(1, 2, experts=2)),
    "pp 2, tp 2": ("qwen3_moe", 4, sizes(2, 2)),
    "context 2, ep 2": ("qwen3_moe", 4, sizes(experts=2, context_parallel_size=2)),
    "ep 2, data 4, plain optimizer": ("a dense layer", 4, sizes(experts=2, **PLAIN)),
}
"""Family, ranks and settings."""
PARTS = {"virtual_pipeline_model_parallel_size": 2}
INTERLEAVED: dict[str, tuple[int, dict[str, Any], int]] = {
    "two parts": (2, sizes(1, 2, **PARTS), 2),
    "two parts, filled up": (2, sizes(1, 2, **PARTS), 1),
    "two parts, ep 2": (4, sizes(1, 2, experts=2, **PARTS), 2),
    "two parts, tp 2, plain optimizer": (4, sizes(2, 2, **PARTS, **PLAIN), 2),
}
"""Ranks, settings and micro-batches of an interleaved schedule."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(pools: dict[int, Ranks], oracle: Oracle, layout: str) -> None:
    family, ranks, settings = LAYOUTS[layout]
    check(pools[ranks], oracle, family, settings)


@pytest.mark.parametrize("layout", ["tp 2, ep 2", "deepseek_v3, pp 2"])
def test_padded_rows(pools: dict[int, Ranks], oracle: Oracle, layout: str) -> None:
    family, ranks, settings = LAYOUTS[layout]
    check(pools[ranks], oracle, family, settings, model={"use_remove_padding": False})


@pytest.mark.parametrize("layout", INTERLEAVED)
def test_stages_of_several_parts(pools: dict[int, Ranks], oracle: Oracle, layout: str) -> None:
    ranks, settings, micro_batches = INTERLEAVED[layout]
    check(pools[ranks], oracle, "four layers", settings, micro_batches=micro_batches)


def test_values_of_tokens(pools: dict[int, Ranks], oracle: Oracle) -> None:
    check(pools[4], oracle, "mixtral", sizes(2, experts=2), head="value")


def test_no_checkpointing_of_activations(pools: dict[int, Ranks], oracle: Oracle) -> None:
    off = {"enable_gradient_checkpointing": False}
    check(pools[2], oracle, "qwen3_moe", sizes(experts=2), model=off, micro_batches=4)


@pytest.mark.parametrize("layout", ["qwen2_moe, tp 2", "pp 2, tp 2"])
def test_experts_that_are_recomputed_alone(pools: dict[int, Ranks], oracle: Oracle, layout: str) -> None:
    family, ranks, settings = LAYOUTS[layout]
    overrides = {"recompute_granularity": "selective", "recompute_modules": ["moe", "shared_experts"]}
    check(pools[ranks], oracle, family, {**settings, "override_transformer_config": overrides})


def test_the_oracle_is_not_trivial(oracle: Oracle) -> None:
    """Every tensor has a gradient, each expert's matrices among them, and gradients are clipped."""
    for family in FAMILIES:
        found = oracle(family)
        assert min(float(g.abs().max()) for g in found["gradient"].values()) > 1e-4
        experts = [g for name, g in found["gradient"].items() if "experts" in name]
        assert experts and all(bool(g.flatten(1).abs().amax(1).gt(1e-4).all()) for g in experts)
        assert found["fsdp"]["steps"][0]["grad_norm"] > 2 * OPTIM["clip_grad"]


def busiest_share(path: str, rows: DataProto) -> float:
    """Of all tokens of trained rows, of a model of transformers."""
    lm = AutoModelForCausalLM.from_pretrained(path)
    routers = [layer.mlp.gate for layer in lm.model.layers if hasattr(layer.mlp, "gate")]
    counts = torch.zeros(len(routers), 4)

    def count(number: int, output: Any) -> None:
        counts[number] += output[2].flatten().bincount(minlength=4)

    for number, router in enumerate(routers):
        router.register_forward_hook(lambda m, args, output, number=number: count(number, output))
    columns = [ragged.rows(rows.get(name)) for name in ("prompts", "responses", "response_mask")]
    for prompt, response, mask in zip(*columns, strict=True):
        if bool(mask.any()):
            lm(input_ids=torch.cat([prompt, response[:-1]])[None])  # the last token predicts nothing
    return float((counts.amax(1) / counts.sum(1)).max())


LOADS: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3_moe", 1, sizes()),
    ("qwen3_moe", 2, sizes(experts=2)),
    ("qwen3_moe", 4, sizes(1, 2, 2)),
    ("four layers", 2, sizes(1, 2, **PARTS)),  # three micro-batches, and one that fills up
]
"""Family, ranks and settings."""


@pytest.mark.parametrize("again", [True, False])
def test_share_of_the_busiest_expert(pools: dict[int, Ranks], models: Path, again: bool) -> None:
    """Each token of all ranks counts once, also where activations are computed again, or where a micro-batch
    fills up the last group of a schedule."""
    for family, ranks, settings in LOADS:
        path = str(models / family)
        wanted = busiest_share(path, jobs.make_rows("far apart"))
        assert wanted < 0.5, "no expert that every token chose"
        options = {"megatron": settings, "model": {"enable_gradient_checkpointing": again}}
        for reported, load in pools[ranks].run(jobs.reported_load, path, options, "far apart", 3):
            assert reported == {"busiest": pytest.approx(wanted), "idle": 0}
            assert (load.busiest, load.idle) == (1, 3 / 4)


# --- weights and checkpoints


OUT = ["tp 2, ep 2, data 2", "tp 2, ep 2, slices 2", "pp 2, ep 2"]
OUT += ["deepseek_v3, tp 2, pp 2", "deepseek_v3, tp 2, ep 2, data 2"]


@pytest.mark.parametrize("layout", OUT)
def test_weights_come_out_as_they_went_in(pools: dict[int, Ranks], models: Path, layout: str) -> None:
    """Bit by bit and under the FSDP engine's names, on all ranks or on the one that wants them."""
    family, ranks, settings = LAYOUTS[layout]
    path = str(models / family)
    receivers = (None, 0, 3)
    sent = pools[ranks].run(weights_to, path, {"megatron": settings}, receivers)
    assert_sent(sent, receivers, weights_to(path, {})[0])


def test_biases_of_routers_are_never_rounded(pools: dict[int, Ranks], models: Path) -> None:
    """Of a model in bfloat16; the engine that samples has them in float32, too."""
    path, name = models / "deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"
    wanted = load_file(path / "model.safetensors")[name]
    assert not torch.equal(wanted, wanted.bfloat16().float())
    for options in ({"megatron": sizes(2, dtype="bf16")}, {"fsdp": {"model_dtype": "bf16", "dtype": "bf16"}}):
        tensors = pools[2].run(weights_to, str(path), options)[0][0]
        others = {tensor.dtype for other, tensor in tensors.items() if other != name}
        assert torch.equal(tensors[name], wanted) and others == {torch.bfloat16}
        sampler = empty(FAMILIES["deepseek_v3"], torch.bfloat16)
        sampler.update_weights(tensors.items())
        assert all(torch.equal(held, tensors[other]) for other, held in sampler.held().items())


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("a dense layer", sizes(experts=2)),
        ("deepseek_v3", sizes(2, experts=2, slices=1)),
        ("deepseek_v2", sizes(1, 2)),
        ("qwen2_moe", sizes(2)),
        ("glm4_moe", sizes(1, 2)),
    ],
)
def test_files_are_saved_as_they_were_read(
    pools: dict[int, Ranks], models: Path, tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """Each expert under its own names, bit by bit. A layer more, which predicts tokens further ahead, is left
    out, as transformers leaves it out."""
    path, saved = tmp_path / "model", tmp_path / "saved"
    shutil.copytree(models / family, path)
    file = path / "model.safetensors"
    wanted = load_file(file)
    if family == "deepseek_v3":
        save_file({**wanted, "model.layers.2.eh_proj.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    pools[2].run(save_hf, str(path), {"megatron": settings}, str(saved))
    found = load_file(saved / "model.safetensors")
    del wanted[SCORE]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


PATHS = {
    "fsdp 2": "tp 2, ep 2, slices 2",
    "tp 2, ep 2, slices 2": "pp 2, ep 2",
    "pp 2, ep 2": "sliced experts",
    "sliced experts": "ep 2, plain optimizer",
    "ep 2, plain optimizer": "alone",
    "alone": "fsdp 2",
}


@pytest.mark.parametrize("writer", PATHS)
def test_checkpoints_are_read_with_other_sizes(
    pools: dict[int, Ranks], models: Path, tmp_path: Path, writer: str
) -> None:
    """Weights and moments bit by bit; the next steps are the same."""

    def run(layout: str, job: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        ranks, options = 2, {}
        if layout in LAYOUTS:
            ranks, options = LAYOUTS[layout][1], {"megatron": LAYOUTS[layout][2]}
        path, folder = str(models / "deepseek_v3"), str(tmp_path)
        found = pools[ranks].run(job, path, options, folder)
        return state_of(found) | found[0]["weights"], found[0]["next"]

    (written, went_on), (found, goes_on) = run(writer, write_checkpoint), run(PATHS[writer], read_checkpoint)
    assert_same(found, written)
    assert_near(goes_on, went_on)


def test_the_merger_reads_a_checkpoint(pools: dict[int, Ranks], models: Path, tmp_path: Path) -> None:
    options = {"megatron": LAYOUTS["deepseek_v3, tp 2, pp 2"][2]}
    pools[4].run(save_both, str(models / "deepseek_v3"), options, str(tmp_path))
    assert_same_bits(merge(tmp_path / "actor", tmp_path / "merged"), read(tmp_path / "exported"))


# --- what is not built


@pytest.mark.parametrize(("ranks", "settings"), [(1, sizes()), (2, sizes(1, 2)), (2, sizes(experts=2))])
def test_a_model_that_changes_from_pass_to_pass_ends_the_run(
    pools: dict[int, Ranks], models: Path, ranks: int, settings: dict[str, Any]
) -> None:
    path = str(models / "qwen3_moe")
    for reported in pools[ranks].run(jobs.refusal_of_noise, path, {"megatron": settings}):
        assert "two passes over the same rows differ by" in reported
        assert "-> actor_rollout_ref.actor.megatron.moe_router_dtype=fp64" in reported


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "experts": (
        MixtralConfig(**GROUPED, num_local_experts=3),
        sizes(experts=2),
        "must divide the 3 experts of the model",
    ),
    "slices": (
        Qwen3MoeConfig(**QWEN | dict(moe_intermediate_size=25)),
        sizes(slices=2),
        "must divide the 25 columns of an expert",
    ),
    "no sp": (FAMILIES["mixtral"], sizes(2, sequence_parallel=False), "megatron.sequence_parallel=false"),
    "dense": (Qwen3Config(**GROUPED), sizes(experts=2), "must divide the 0 experts of the model"),
    "one expert": (
        MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=1),
        sizes(),
        "does not support a top-1 router",
    ),
    "noise": (
        MixtralConfig(**GROUPED, num_local_experts=4, router_jitter_noise=0.1),
        sizes(),
        "router_jitter_noise",
    ),
    "shared experts": (
        Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=21),
        sizes(2),
        "must divide the 21 columns of the shared experts",
    ),
    "another kind": (OlmoeConfig(**GROUPED), sizes(), "not olmoe"),
    "groups": (
        DeepseekV3Config(**LATENT | dict(num_experts_per_tok=2), n_group=4, topk_group=2),
        sizes(),
        "scores a group of experts by its best 1 (num_experts_per_tok / topk_group), but this model by its",
    ),
    "a bias that is not there": (
        FAMILIES["mixtral"],
        sizes(moe_router_bias_update_rate=0.001),
        "moe_router_bias_update_rate=0.001: the routers of the model have no biases",
    ),
    "kernels": (
        FAMILIES["mixtral"],
        sizes(moe_permute_fusion=True),
        "megatron.moe_permute_fusion=true: Transformer Engine is not installed",
    ),
    "loss": (
        FAMILIES["mixtral"],
        sizes(override_transformer_config={"moe_z_loss_coeff": 0.01}),
        "leave out actor_rollout_ref.actor.megatron.override_transformer_config.moe_z_loss_coeff",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_built_is_refused(tmp_path: Path, pools: dict[int, Ranks], why: str) -> None:
    config, settings, words = REFUSED[why]
    save_model(config, tmp_path)
    for reported in pools[2].run(refusal, str(tmp_path), {"megatron": settings}):
        assert words in reported
