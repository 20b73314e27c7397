"""What is passed to Megatron-Core about a model, and what may be overridden; the counts of optimizers that
are not torch's."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from hydraflow.batch_plan.stages import layers_of_parts
from hydraflow.engine.config import MegatronConfig
from hydraflow.engine.megatron.architecture import Architecture, Latent, Mixture
from hydraflow.engine.megatron.core_arguments import OF_OTHER_MODELS, fixed_arguments
from hydraflow.engine.megatron.core_config import transformer_config
from hydraflow.engine.megatron.ddp_config import FIXED, FREE, OWN, ddp_config
from hydraflow.engine.megatron.optimizer import STEP, count_of, set_count
from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelConfig

SECTION = "actor_rollout_ref.actor"
OVERRIDES = f"{SECTION}.megatron.override_transformer_config"

DENSE = Architecture(4, 4, 2, 8, 32, 48, 19, False, False, False, 1e-6)
COMPRESSED = replace(DENSE, latent=Latent(None, 12, 8, 4, 6, True, 0.3))
MIXTURE = replace(DENSE, mixture=Mixture(4, 2, 8, True, (True,) * 4))


def configured(
    overrides: dict[str, Any], stages: int = 1, chunks: int | None = None, layers: int = 4
) -> TransformerConfig:
    settings = divided(overrides, stages, chunks)
    shape = replace(DENSE, layers=layers)
    return transformer_config(shape, ModelConfig(), settings, torch.float32, section=SECTION)


def divided(overrides: dict[str, Any], stages: int, chunks: int | None) -> MegatronConfig:
    return MegatronConfig(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        override_transformer_config=overrides,
    )


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_size": 8},
        {"num_moe_experts": 8},
        {"softmax_scale": 0.5},
        {"rotary_interleaved": True},
        {"fp16": True},
        {"glu_linear_offset": 1.0},
        {"enable_autocast": True},
        {"microbatch_group_size_per_vp_stage": 3},
        {"softmax_type": "learnable"},
        {"moe_router_topk_scaling_factor": 2.0},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_what_follows_from_the_model_is_refused(overrides: dict[str, Any]) -> None:
    (name,) = overrides
    with pytest.raises(
        ConfigError, match=f"{OVERRIDES}.{name}=.*: follows from the model and from other keys"
    ):
        configured(overrides)


def test_what_is_fixed_is_what_megatron_core_has() -> None:
    """Under its names, and with its defaults where a model is only not to become another."""
    usual = {one.name: one.default for one in fields(TransformerConfig)}
    assert fixed_arguments(MIXTURE, MegatronConfig(), torch.float32).keys() <= usual.keys()
    assert {name: usual[name] for name in OF_OTHER_MODELS} == OF_OTHER_MODELS
    fusions = ("masked_softmax", "bias_activation", "bias_dropout", "apply_rope", "gradient_accumulation")
    assert not any(usual[f"{name}_fusion"] for name in fusions) and not usual["persist_layer_norm"], (
        "their kernels may not be installed"
    )


def test_safe_defaults_of_mixtures() -> None:
    """No loss and no noise beside the policy's, biases of routers frozen, routers in float32, tokens put back
    in float32 by plain torch."""
    found = transformer_config(MIXTURE, ModelConfig(), MegatronConfig(), torch.bfloat16, section=SECTION)
    assert (found.moe_aux_loss_coeff, found.moe_z_loss_coeff, found.moe_input_jitter_eps) == (0, None, None)
    assert (found.moe_router_load_balancing_type, found.moe_router_bias_update_rate) == ("none", 0)
    assert (found.moe_router_dtype, found.moe_permute_fusion) == ("fp32", False)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"tp_comm_overlap": True}, "the engine creates no communication buffers of Transformer Engine"),
        ({"moe_grouped_gemm": True}, "the engine has its own experts"),
        (
            {"moe_token_dispatcher_type": "flex"},
            "only alltoall supports lines of different lengths",
        ),
        ({"moe_layer_recompute": True}, "recompute_modules=[moe] replaced it"),
        ({"moe_enable_deepep": True}, "only alltoall supports lines of different lengths"),
        ({"moe_z_loss_coeff": 0.01}, "the gradient would depend on how rows are split into micro-batches"),
        ({"moe_aux_loss_coeff": 0.01}, f"-> {SECTION}.megatron.moe_aux_loss_coeff=0.01"),
        ({"moe_router_bias_update_rate": 0.1}, f"-> {SECTION}.megatron.moe_router_bias_update_rate=0.1"),
        ({"moe_permute_fusion": True}, f"-> {SECTION}.megatron.moe_permute_fusion=true"),
        ({"moe_router_fusion": True}, "moe_router_fusion=true: Transformer Engine is not installed"),
        ({"gradient_accumulation_fusion": True}, "fusion=true: Apex and its kernel for it are not installed"),
    ],
)
def test_speed_and_losses_of_mixtures_are_refused_with_the_reason(
    overrides: dict[str, Any], said: str
) -> None:
    settings = MegatronConfig(override_transformer_config=overrides)
    with pytest.raises(ConfigError, match=re.escape(said)):
        transformer_config(MIXTURE, ModelConfig(), settings, torch.float32, section=SECTION)


@pytest.mark.parametrize(
    ("shape", "settings", "said"),
    [
        (DENSE, {"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff=0.1: the model has no experts"),
        (
            MIXTURE,
            {"moe_router_bias_update_rate": 0.1},
            "moe_router_bias_update_rate=0.1: the routers of the model have no biases",
        ),
        (
            MIXTURE,
            {"moe_aux_loss_coeff": 0.1, "override_transformer_config": {"recompute_modules": ["moe"]}},
            "when only the experts are recomputed, the rows of",
        ),
    ],
)
def test_what_cannot_even_out_the_load(shape: Architecture, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        transformer_config(shape, ModelConfig(), MegatronConfig(**settings), torch.float32, section=SECTION)


def test_no_loss_evens_out_the_load_of_a_type_that_is_none() -> None:
    settings = MegatronConfig(moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="none")
    assert transformer_config(DENSE, ModelConfig(), settings, torch.float32, section=SECTION)


def test_a_key_that_we_have_is_offered_instead() -> None:
    with pytest.raises(ConfigError) as caught:
        configured({"sequence_parallel": True})
    assert caught.value.problems[0].remedy == f"{SECTION}.megatron.sequence_parallel=true"


def test_what_repeats_other_keys_is_accepted() -> None:
    assert configured({"hidden_size": 32, "attention_softmax_in_fp32": True}).hidden_size == 32


@pytest.mark.parametrize(
    ("overrides", "stages", "chunks", "layers"),
    [
        ({}, 2, None, 4),
        ({}, 2, 2, 8),
        ({"num_layers_in_first_pipeline_stage": 3}, 2, None, 4),
        ({"num_layers_in_last_pipeline_stage": 3}, 2, None, 4),
        ({"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 4}, 4, 2, 14),
        ({"account_for_embedding_in_pipeline_split": True}, 2, None, 7),
        ({"account_for_embedding_in_pipeline_split": True}, 2, 2, 7),
        ({"account_for_loss_in_pipeline_split": True}, 3, 2, 11),
        ({"deallocate_pipeline_outputs": True}, 2, None, 4),
    ],
)
def test_layers_are_divided_as_megatron_core_does(
    overrides: dict[str, Any], stages: int, chunks: int | None, layers: int
) -> None:
    core, parts = configured(overrides, stages, chunks, layers), range(chunks or 1)
    wanted = [
        [get_num_layers_to_build(core, part if chunks else None, stage) for part in parts]
        for stage in range(stages)
    ]
    assert layers_of_parts(layers, divided(overrides, stages, chunks)) == wanted


@pytest.mark.parametrize(
    ("layout", "stages", "chunks", "layers"),
    [
        ("Et|t*3L", 2, None, 4),
        ("E(t|)*2t,t|tL", 2, 2, 5),
        ([["embedding", "decoder"], ["decoder", "decoder", "loss"]], 2, None, 3),
    ],
)
def test_layouts_are_read_as_megatron_core_reads_them(
    layout: Any, stages: int, chunks: int | None, layers: int
) -> None:
    name = "pipeline_model_parallel_layout"
    core = configured({name: layout}, stages, chunks, layers)
    wanted = [[part.count(LayerType.decoder) for part in stage] for stage in getattr(core, name).layout]
    assert layers_of_parts(layers, divided({name: layout}, stages, chunks)) == wanted


@pytest.mark.parametrize("first", [4, 9])
def test_a_stage_without_layers_is_refused(first: int) -> None:
    with pytest.raises(ConfigError, match=OVERRIDES):
        configured({"num_layers_in_first_pipeline_stage": first}, stages=2)


def test_recomputation_is_full_unless_another_kind_is_asked_for() -> None:
    assert configured({}).recompute_method == "uniform"
    model = ModelConfig(enable_gradient_checkpointing=False)
    for overrides, wanted in (({}, None), ({"recompute_granularity": "full"}, "uniform")):
        settings = divided(overrides, 1, None)
        found = transformer_config(DENSE, model, settings, torch.float32, section=SECTION)
        assert found.recompute_method == wanted
    selective = configured({"recompute_granularity": "selective"})
    assert (selective.recompute_granularity, selective.recompute_method) == ("selective", None)


@pytest.mark.parametrize(
    ("shape", "parts", "said"),
    [
        (DENSE, ["mlp", "layernorm"], "only with Transformer Engine, which is not installed"),
        (
            COMPRESSED,
            ["core_attn"],
            "recompute_modules=[core_attn]: latent attention is not recomputed on its",
        ),
        (COMPRESSED, None, "recompute_modules=null: latent attention is not recomputed on its own"),
    ],
)
def test_parts_that_cannot_be_recomputed_alone(
    shape: Architecture, parts: list[str] | None, said: str
) -> None:
    """Megatron-Core would end in a NameError in the first update, or recompute nothing."""
    overrides = {"recompute_granularity": "selective", **({"recompute_modules": parts} if parts else {})}
    with pytest.raises(ConfigError, match=re.escape(said)):
        transformer_config(shape, ModelConfig(), divided(overrides, 1, None), torch.float32, section=SECTION)


def test_other_parts_of_latent_layers_are_recomputed_alone() -> None:
    overrides = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    settings = divided(overrides, 1, None)
    found = transformer_config(COMPRESSED, ModelConfig(), settings, torch.float32, section=SECTION)
    assert found.recompute_modules == ["mlp"]


DDP = f"{SECTION}.megatron.override_ddp_config"


def buffers(overrides: dict[str, Any], **others: Any) -> Any:
    return ddp_config(MegatronConfig(override_ddp_config=overrides, **others), section=SECTION)


def test_every_argument_of_buffers_is_fixed_or_passed_on() -> None:
    """An argument of a newer version wants a decision."""
    usual = {one.name: one.default for one in fields(DistributedDataParallelConfig)}
    assert usual.keys() == {*FIXED, *FREE, OWN}
    changed = {"grad_reduce_in_fp32"}
    assert {name for name, (value, _) in FIXED.items() if value != usual[name]} == changed
    assert all(getattr(buffers({name: True}), name) is True for name in FREE)
    made = buffers({})
    assert (made.grad_reduce_in_fp32, made.use_distributed_optimizer) == (True, True)


@pytest.mark.parametrize("name", FIXED)
def test_what_the_engine_relies_on_is_refused(name: str) -> None:
    value, rule = FIXED[name]
    buffers({name: value})
    with pytest.raises(ConfigError) as caught:
        buffers({name: not value})
    assert [(one.field, one.rule, one.remedy) for one in caught.value.problems] == [
        (f"{DDP}.{name}", rule, f"leave out {DDP}.{name}")
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"use_distributed_optimizer": False}, f"-> {SECTION}.megatron.use_distributed_optimizer=false"),
        ({"average_in_collective": True}, "gradients are summed and never averaged"),
        ({"pad_buckets_for_high_nccl_busbw": "no"}, "must be true or false"),
        ({"bucketsize": 1}, "Megatron-Core has no such argument"),
    ],
)
def test_other_overrides_of_buffers_are_refused(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        buffers(overrides)


def test_overrides_of_buffers_may_repeat_other_keys() -> None:
    assert not buffers(
        {"use_distributed_optimizer": False}, use_distributed_optimizer=False
    ).overlap_grad_reduce


class FusedAdam(torch.optim.AdamW):
    """Counts by group, as those of Transformer Engine and Apex do."""


def test_updates_are_counted_by_parameter_or_by_group() -> None:
    one, two = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    one.grad = two.grad = torch.ones(2)
    adamw = torch.optim.AdamW([{"params": [one]}, {"params": [two]}])
    adamw.step()
    set_count(adamw, two, torch.tensor(5.0))
    assert (count_of(adamw, one), count_of(adamw, two)) == (1, 5)
    fused = FusedAdam([{"params": [one]}, {"params": [two]}])
    assert count_of(fused, two) == 0
    set_count(fused, two, torch.tensor(7.0))
    assert (count_of(fused, one), count_of(fused, two), fused.param_groups[1][STEP]) == (0, 7, 7)
