"""The command lines of verl's examples: they plan here, or are refused for what is not built, by name."""

import pytest
from compose.verl_examples import LINES

from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.compose.loading import load_command
from hydraflow.errors import ConfigError
from hydraflow.schema import PPOConfig

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CPPO = "actor_rollout_ref.actor.policy_loss"
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
NO_PLAN = {
    "codapo": {"algorithm.adv_estimator"},
    "cppo_moe_megatron": {f"{CPPO}.loss_mode"},
    # 32 rows on 8 devices: verl stops here, too
    "correction_rloo": {MICRO},
    "correction_several_rules": {MICRO},
    # 16 groups of experts on 8 devices; the line was written for 16
    "sapo_moe_megatron": {"actor_rollout_ref.actor.megatron.expert_tensor_parallel_size"},
}
"""Lines that do not plan, and what is wrong with them."""
NOT_HONOURED = {
    "grpo_fsdp_trtllm": {f"{ROLLOUT}.name"},
    "lora_from_adapter": {f"{MODEL}.lora_adapter_path"},
    "lora_moe_megatron": {f"{MODEL}.lora.{name}" for name in ("rank", "alpha", "lora_A_init_method")},
    "multi_token_prediction": {
        f"{MODEL}.mtp.{name}" for name in ("enable", "enable_train", "detach_encoder")
    },
}
"""Lines that plan, and what main_ppo refuses of them besides engines that are only planned."""


def test_the_example_lines_that_plan_are_most_of_them():
    assert (len(LINES), len(LINES) - len(NO_PLAN)) == (49, 44)


@pytest.mark.parametrize("name", LINES)
def test_an_example_line_plans_or_says_what_is_missing(name):
    if name in NO_PLAN:
        with pytest.raises(ConfigError) as refused:
            config, _ = load_command("ppo", PPOConfig, LINES[name], tolerant=True)
            resolve_plan(config, prompts=17000, devices_per_node=8)
        assert {problem.field for problem in refused.value.problems} == NO_PLAN[name]
        return
    config, command = load_command("ppo", PPOConfig, LINES[name], tolerant=True)
    assert {problem.field for problem in command.unsupported} == NOT_HONOURED.get(name, set())
    plan = resolve_plan(config, prompts=17000, devices_per_node=8)
    assert plan.total_steps > 0


def test_verls_teachers_are_ours():
    config, _ = load_command("ppo", PPOConfig, LINES["distillation_fsdp"], tolerant=True)
    assert config.distillation.teachers == {"default": "Qwen/Qwen3-32B"}
    several = [word for word in LINES["distillation_fsdp"] if ".teacher_model.model_path" not in word]
    for name, source in (("a", "openai/gsm8k"), ("b", "geo3k")):
        several += [
            f"+distillation.teacher_models.{name}.key={source}",
            f"+distillation.teacher_models.{name}.model_path=teachers/{name}",
        ]
    config, command = load_command("ppo", PPOConfig, several, tolerant=True)
    assert config.distillation.teachers == {"openai/gsm8k": "teachers/a", "geo3k": "teachers/b"}
    assert command.unsupported == ()


@pytest.mark.parametrize(
    ("for_the_model", "refused"), [("true", set()), ("false", {"data.trust_remote_code"})]
)
def test_the_tokenizers_code_is_trusted_where_the_models_is(for_the_model, refused):
    words = [
        *LINES["grpo_fsdp"],
        "data.trust_remote_code=true",
        f"{MODEL}.trust_remote_code={for_the_model}",
    ]
    _, command = load_command("ppo", PPOConfig, words, tolerant=True)
    assert {problem.field for problem in command.unsupported} == refused


def test_megatrons_optimizer_on_the_host_is_our_offload():
    config, command = load_command("ppo", PPOConfig, LINES["grpo_deepseek_v3"], tolerant=True)
    assert config.actor_rollout_ref.actor.megatron.optimizer_offload
    assert command.unsupported == ()


OVERRIDE = "+actor_rollout_ref.actor.megatron.override_transformer_config"


def test_options_of_mixtures_inside_megatron_core_are_keys_of_ours():
    """The reference follows the actor in what its routers compute, and in no loss."""
    words = [
        *LINES["gspo_moe_megatron"],
        f"{OVERRIDE}.moe_aux_loss_coeff=0.01",
        f"{OVERRIDE}.moe_router_load_balancing_type=seq_aux_loss",
        f"{OVERRIDE}.moe_router_bias_update_rate=0.001",
    ]
    config, _ = load_command("ppo", PPOConfig, words, tolerant=True)
    actor, ref = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.ref.megatron
    assert (actor.moe_permute_fusion, actor.moe_router_dtype) == (True, "fp32")
    assert (actor.moe_aux_loss_coeff, actor.moe_router_bias_update_rate) == (0.01, 0.001)
    assert (ref.moe_permute_fusion, ref.moe_aux_loss_coeff) == (True, 0.0)
    assert not any(name.startswith("moe_") for name in actor.override_transformer_config)
    assert actor.override_transformer_config["recompute_granularity"] == "full"


def test_a_loss_whose_gradient_depends_on_micro_batches_is_refused():
    words = [*LINES["gspo_moe_megatron"], f"{OVERRIDE}.moe_router_load_balancing_type=aux_loss"]
    with pytest.raises(ConfigError, match="depends on how rows are split into micro-batches"):
        load_command("ppo", PPOConfig, words, tolerant=True)


def test_weights_in_a_megatron_checkpoint_are_refused_with_the_command_that_merges_them():
    _, command = load_command("ppo", PPOConfig, LINES["grpo_moonlight"], tolerant=True)
    for problem in command.unsupported:
        assert "python -m hydraflow.model_merger merge --backend megatron --local_dir" in problem.remedy


def test_a_divided_replica_is_vllms_where_a_line_of_verls_names_none():
    name, size = f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size"
    config, command = load_command("ppo", PPOConfig, LINES["grpo_qwen3_236b"], tolerant=True)
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert f"{name}: not set, and {size}=8; taken as vllm, as in earlier versions of verl" in command.notes
    stages = f"{ROLLOUT}.pipeline_model_parallel_size"
    line = [one for one in LINES["grpo_qwen3_236b"] if not one.startswith(size)]
    config, command = load_command("ppo", PPOConfig, [*line, f"{stages}=2"], tolerant=True)
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert f"{name}: not set, and {stages}=2; taken as vllm, as in earlier versions of verl" in command.notes
    with pytest.raises(ConfigError, match=f"{size}=2: .*name=native holds the whole model"):
        load_command("ppo", PPOConfig, [f"{size}=2", "recipe=arithmetic"])
