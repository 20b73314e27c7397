"""What Megatron-Core is told of a model, and what may be overridden; the counts of optimizers that are not
torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hydraflow.engine.megatron  # noqa: F401  lets Megatron-Core run without CUDA, so it comes first

pytest.importorskip("megatron.core")

from hydraflow.engine.config import MegatronConfig
from hydraflow.engine.megatron.architecture import Architecture
from hydraflow.engine.megatron.core_config import layers_of_stages, transformer_config
from hydraflow.engine.megatron.optimizer import STEP, count_of, set_count
from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelConfig

SECTION = "actor_rollout_ref.actor"
OVERRIDES = f"{SECTION}.megatron.override_transformer_config"


def configured(overrides: dict[str, Any], stages: int = 1) -> Any:
    shape = Architecture(4, 4, 2, 8, 32, 48, 19, False, False, False, 1e-6)
    settings = MegatronConfig(pipeline_model_parallel_size=stages, override_transformer_config=overrides)
    found = transformer_config(shape, ModelConfig(), settings, torch.float32, section=SECTION)
    return found, layers_of_stages(found, settings)


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_size": 8},
        {"num_moe_experts": 8},
        {"softmax_scale": 0.5},
        {"rotary_interleaved": True},
        {"fp16": True},
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


def test_a_key_that_we_have_is_offered_instead() -> None:
    with pytest.raises(ConfigError) as caught:
        configured({"sequence_parallel": True})
    assert caught.value.problems[0].remedy == f"{SECTION}.megatron.sequence_parallel=true"


def test_what_repeats_other_keys_is_accepted() -> None:
    assert configured({"hidden_size": 32, "attention_softmax_in_fp32": True})[0].hidden_size == 32


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        ({}, [2, 2]),
        ({"num_layers_in_first_pipeline_stage": 3}, [3, 1]),
        ({"num_layers_in_last_pipeline_stage": 3}, [1, 3]),
        ({"deallocate_pipeline_outputs": True}, [2, 2]),
    ],
)
def test_layers_of_stages(overrides: dict[str, Any], layers: list[int]) -> None:
    assert configured(overrides, stages=2)[1] == layers


@pytest.mark.parametrize("first", [4, 9])
def test_a_stage_without_layers_is_refused(first: int) -> None:
    with pytest.raises(ConfigError, match=OVERRIDES):
        configured({"num_layers_in_first_pipeline_stage": first}, stages=2)


def test_recomputation_is_full_unless_another_kind_is_asked_for() -> None:
    assert configured({})[0].recompute_method == "uniform"
    selective, _ = configured({"recompute_granularity": "selective"})
    assert (selective.recompute_granularity, selective.recompute_method) == ("selective", None)


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
