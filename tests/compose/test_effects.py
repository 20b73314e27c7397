"""Keys without effect: each rule holds when its option is off, and not when it is on."""

import functools
from dataclasses import fields

import pytest
import yaml

from hydraflow.algorithms.config import ESTIMATORS, POLICY_LOSSES, AlgorithmConfig
from hydraflow.compose.effects import RULES, keys_without_effect
from hydraflow.compose.keys import known_keys
from hydraflow.compose.loading import load_command
from hydraflow.compose.patterns import expand, fits
from hydraflow.engine.config import TRAIN_ENGINES
from hydraflow.errors import ConfigError
from hydraflow.generation.config import GENERATION_ENGINES, RolloutConfig
from hydraflow.options import why_idle
from hydraflow.schema import PPOConfig, SFTConfig
from hydraflow.workers.config import ActorConfig

OWN = ["actor_rollout_ref.model.path=model", "data.train_files=train.parquet"]
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
BYPASS = [f"{CORRECTION}.bypass_mode=true"]
IN_FLOAT32 = [
    f"{ROLLOUT}.dtype=fp32",
    f"{ACTOR}.fsdp_config.dtype=fp32",
    f"{ACTOR}.fsdp_config.model_dtype=fp32",
]
ONE_REWARD = ("gdpo_reward_keys=[a]", "gdpo_reward_weights=[1.0]")
SHAPES_THE_SCORE = ("length_penalty=0.5", "norm_mean_type=batch", "norm_std_type=group", "reward_clip=2.0")
GDPO = ["algorithm.adv_estimator=gdpo"]
REC = f"{ACTOR}.policy_loss.rec_clip_mode"
KWARGS = "reward.reward_kwargs"

SAMPLES = "trainer.debug.rollout_only=true"

CASES = [
    (f"{ACTOR}.megatron.param_offload=true", [], f"{ACTOR}.strategy=megatron"),
    (f"{ACTOR}.fsdp_config.param_offload=true", [f"{ACTOR}.strategy=megatron"], f"{ACTOR}.strategy=fsdp2"),
    (f"{REF}.megatron.param_offload=true", [f"{ACTOR}.use_kl_loss=true"], f"{ACTOR}.strategy=megatron"),
    *(
        (
            f"{ACTOR}.fsdp_config.{name}=true",
            [f"{ACTOR}.fsdp_config.offload_policy=true"],
            f"{ACTOR}.fsdp_config.offload_policy=false",
        )
        for name in ("param_offload", "optimizer_offload")
    ),
    ("critic.megatron.dtype=bf16", [], "critic.strategy=megatron"),
    (
        f"{ACTOR}.megatron.dist_checkpointing_path=x",
        [f"{ACTOR}.strategy=megatron"],
        f"{ACTOR}.megatron.use_dist_checkpointing=true",
    ),
    (
        f"{ACTOR}.megatron.use_dist_checkpointing=true",
        [f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.dist_checkpointing_path=x", SAMPLES],
        "trainer.debug.rollout_only=false",
    ),
    ("critic.optim.lr=1", ["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator=gae"),
    ("critic.model.path=x", ["critic.enable=false", "algorithm.adv_estimator=rloo"], "critic.enable=true"),
    (f"{REF}.log_prob_micro_batch_size_per_gpu=4", [], "algorithm.use_kl_in_reward=true"),
    (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        [f"{ACTOR}.use_dynamic_bsz=true"],
        f"{ACTOR}.use_dynamic_bsz=false",
    ),
    (
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
        [f"{ACTOR}.use_dynamic_bsz=true"],
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=false",
    ),
    (
        "critic.ppo_micro_batch_size_per_gpu=4",
        [f"{ACTOR}.use_dynamic_bsz=true"],
        "critic.use_dynamic_bsz=false",
    ),
    (
        "critic.forward_max_token_len_per_gpu=9000",
        ["critic.ppo_micro_batch_size_per_gpu=4"],
        "critic.use_dynamic_bsz=true",
    ),
    (f"{ACTOR}.kl_loss_coef=0.1", [], f"{ACTOR}.use_kl_loss=true"),
    (f"{ACTOR}.loss_scale_factor=9", [], f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"),
    (
        f"{ACTOR}.clip_ratio=0.1",
        [f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.3"],
        f"{ACTOR}.clip_ratio_low=null",
    ),
    *(
        (f"{ACTOR}.{key}=0.3", [f"{ACTOR}.policy_loss.loss_mode=rec", f"{REC}=none"], f"{REC}=one-side")
        for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    ),
    (f"{ACTOR}.optim.min_lr_ratio=0.1", [], f"{ACTOR}.optim.lr_scheduler_type=cosine"),
    (
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
        [f"{ACTOR}.optim.lr_warmup_steps=5"],
        f"{ACTOR}.optim.lr_warmup_steps=-1",
    ),
    ("algorithm.lam=0.9", ["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator=gae"),
    ("algorithm.gamma=0.9", ["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator=reinforce_plus_plus"),
    ("algorithm.norm_adv_by_std_in_grpo=false", [], "algorithm.adv_estimator=grpo"),
    ("algorithm.critic_lam=0.9", ["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator=gae"),
    ("algorithm.critic_gamma=0.9", ["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator=gae"),
    ("algorithm.lam_length_alpha=0.05", ["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator=gae"),
    *((f"algorithm.{key}", [], "algorithm.adv_estimator=gdpo") for key in ONE_REWARD),
    *((f"algorithm.{key}", GDPO, "algorithm.adv_estimator=grpo") for key in SHAPES_THE_SCORE),
    ("algorithm.whiten_advantages=true", [], "algorithm.adv_estimator=grpo"),
    (f"{KWARGS}.overlong_buffer_cfg.len=64", [], f"{KWARGS}.overlong_buffer_cfg.enable=true"),
    (f"{KWARGS}.max_resp_len=64", [], f"{KWARGS}.overlong_buffer_cfg.enable=true"),
    (f"{KWARGS}.overlong_buffer_cfg.enable=true", GDPO, "algorithm.adv_estimator=grpo"),
    ("algorithm.kl_penalty=mse", [], "algorithm.use_kl_in_reward=true"),
    ("algorithm.kl_ctrl.horizon=5", ["algorithm.use_kl_in_reward=true"], "algorithm.kl_ctrl.type=adaptive"),
    (f"{CORRECTION}.rollout_is_threshold=3.0", [], f"{CORRECTION}.rollout_is=token"),
    (f"{CORRECTION}.rollout_is_batch_normalize=true", [], f"{CORRECTION}.rollout_is=sequence"),
    (f"{CORRECTION}.rollout_rs_threshold=3.0", [], f"{CORRECTION}.rollout_rs=token_k1"),
    (f"{CORRECTION}.loss_type=reinforce", [], f"{CORRECTION}.bypass_mode=true"),
    *(
        (
            f"{CORRECTION}.{key}",
            [f"{CORRECTION}.rollout_is=token", *BYPASS],
            f"{CORRECTION}.loss_type=reinforce",
        )
        for key in ("rollout_is=token", "rollout_is_threshold=3.0", "rollout_is_batch_normalize=true")
    ),
    *(
        (f"{ACTOR}.{key}", [*BYPASS, f"{CORRECTION}.loss_type=reinforce"], f"{CORRECTION}.loss_type=ppo_clip")
        for key in (
            "clip_ratio=0.1",
            "clip_ratio_c=4.0",
            "clip_ratio_low=0.1",
            "policy_loss.loss_mode=vanilla",
        )
    ),
    (
        f"{ACTOR}.tau_pos=2.0",
        [*BYPASS, f"{CORRECTION}.loss_type=reinforce", f"{ACTOR}.policy_loss.loss_mode=sapo"],
        f"{CORRECTION}.loss_type=ppo_clip",
    ),
    *(
        (f"{CORRECTION}.{key}", IN_FLOAT32, f"{ROLLOUT}.name=vllm")
        for key in ("rollout_is=token", "rollout_rs=token_k1")
    ),
    (f"{CORRECTION}.rollout_rs=token_k1", IN_FLOAT32, f"{CORRECTION}.bypass_mode=true"),
    ("algorithm.filter_groups.metric=score", [], "algorithm.filter_groups.enable=true"),
    ("data.gen_batch_size=2048", [], "algorithm.filter_groups.enable=true"),
    ("actor_rollout_ref.model.lora_alpha=4", [], "actor_rollout_ref.model.lora_rank=8"),
    (f"{ROLLOUT}.gpu_memory_utilization=0.6", [], f"{ROLLOUT}.name=vllm"),
    (f"{ROLLOUT}.engine_kwargs.vllm={{swap_space: 4}}", [], f"{ROLLOUT}.name=vllm"),
    (f"{ROLLOUT}.engine_kwargs.sglang={{chunked_prefill_size: 4}}", [], f"{ROLLOUT}.name=sglang"),
    (
        f"{ROLLOUT}.engine_kwargs.sglang={{chunked_prefill_size: 4}}",
        [f"{ROLLOUT}.name=vllm"],
        f"{ROLLOUT}.name=sglang",
    ),
    (
        f"{ROLLOUT}.engine_kwargs.vllm={{swap_space: 4}}",
        [f"{ROLLOUT}.name=sglang"],
        f"{ROLLOUT}.name=vllm",
    ),
    (f"{ROLLOUT}.max_num_batched_tokens=9000", [f"{ROLLOUT}.name=sglang"], f"{ROLLOUT}.name=vllm"),
    (f"{ROLLOUT}.verify_weights_every=1", [f"{ROLLOUT}.name=sglang"], f"{ROLLOUT}.name=vllm"),
    (f"{ROLLOUT}.n_gpus_per_node=4", [], f"{ROLLOUT}.nnodes=1"),
    (f"{ROLLOUT}.val_kwargs.top_p=0.7", ["data.val_files=v"], f"{ROLLOUT}.val_kwargs.do_sample=true"),
    ("trainer.test_freq=5", [], "data.val_files=v"),
    ("reward.reward_model.model_path=x", [], "reward.reward_model.enable=true"),
    (
        "reward.reward_model.nnodes=2",
        ["reward.reward_model.enable=true"],
        "reward.reward_model.enable_resource_pool=true",
    ),
    ("reward.custom_reward_function.name=f", [], "reward.custom_reward_function.path=r.py"),
    (
        "recipe.warm_start_steps=5",
        [],
        "recipe.name=arithmetic actor_rollout_ref.model.path=null data.train_files=null",
    ),
    ("trainer.total_epochs=2", ["trainer.total_training_steps=5"], "trainer.total_training_steps=null"),
    (f"{ROLLOUT}.update_weights_bucket_megabytes=64", [], "trainer.fuse_roles=false"),
    (f"{ROLLOUT}.verify_weights_every=1", [], f"trainer.n_gpus_per_node=2 {ROLLOUT}.device_mapping=0"),
    (f"{ROLLOUT}.max_retries=1", [], "trainer.fuse_roles=false"),
    (
        f"{ROLLOUT}.max_retries=1",
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2"],
        f"{ROLLOUT}.tensor_model_parallel_size=1",
    ),
    (
        f"{ROLLOUT}.max_retries=1",
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.pipeline_model_parallel_size=2"],
        f"{ROLLOUT}.pipeline_model_parallel_size=1",
    ),
    ("trainer.fuse_roles=false", ["trainer.debug.local=true"], "trainer.debug.local=false"),
    (
        f"{REF}.fsdp_config.param_offload=true",
        ["algorithm.use_kl_in_reward=true", "actor_rollout_ref.model.lora_rank=8"],
        "actor_rollout_ref.model.lora_rank=0",
    ),
    ("data.truncation=left", ["data.filter_overlong_prompts=true"], "data.filter_overlong_prompts=false"),
    ("trainer.resume_from_path=x", [], "trainer.resume_mode=resume_path"),
    ("trainer.restart_backoff=5.0", [], "trainer.max_restarts=3"),
    ("trainer.wandb_proxy=http://host:1", ["trainer.logger=[file]"], "trainer.logger=[file,wandb]"),
    ("trainer.rollout_data_dir=x", ["trainer.val_only=true", "data.val_files=v"], "trainer.val_only=false"),
    ("trainer.rollout_data_dir=x", ["trainer.debug.load_rollouts=d"], "trainer.debug.load_rollouts=null"),
    ("trainer.validation_data_dir=x", [], "data.val_files=v"),
    (
        "trainer.validation_data_dir=x",
        ["data.val_files=v", "trainer.debug.train_only=true", "trainer.debug.load_rollouts=d"],
        "trainer.debug.train_only=false",
    ),
    ("ray_init.num_cpus=5", ["ray_init.address=auto"], "ray_init.address=local"),
    ("ray_init.num_cpus=5", ["trainer.debug.local=true"], "trainer.debug.local=false"),
    ("log.console=info", ["trainer.debug.local=true"], "trainer.debug.local=false"),
    ("trainer.rpc_timeout=5", ["debug=true"], "debug=false"),
    ("global_profiler.save_path=x", [], "global_profiler.tool=torch global_profiler.steps=[1]"),
    ("trainer.save_freq=5", ["trainer.debug.rollout_only=true"], "trainer.debug.rollout_only=false"),
    (f"{ACTOR}.optim.lr=1", ["trainer.debug.rollout_only=true"], "trainer.debug.rollout_only=false"),
    (
        "trainer.test_freq=5",
        ["data.val_files=v", "trainer.debug.train_only=true", "trainer.debug.load_rollouts=d"],
        "trainer.debug.train_only=false",
    ),
    (
        "reward.failure_score=1",
        ["trainer.debug.train_only=true", "trainer.debug.load_rollouts=d"],
        "trainer.debug.train_only=false",
    ),
    ("reward.timeout=5", ["reward.num_workers=0"], "reward.num_workers=1"),
    ("reward.max_memory=5", ["reward.num_workers=0"], "reward.num_workers=1"),
    ("reward.num_workers=5", ["trainer.debug.local=true"], "trainer.debug.local=false"),
]


def notes(*overrides: str) -> str:
    return "\n".join(load_command("ppo", PPOConfig, [*OWN, *overrides], tolerant=True)[1].notes)


def no_effect(key: str, *overrides: str) -> list[str]:
    """What is said about `key` where these overrides, and it, are set."""
    config = PPOConfig()
    for word in (key, *overrides):
        *sections, name = word.partition("=")[0].split(".")
        section = functools.reduce(getattr, sections, config)
        setattr(section, name, yaml.safe_load(word.partition("=")[2]))
    given = [(key.partition("=")[0], yaml.safe_load(key.partition("=")[2]))]
    return [problem.remedy for problem in keys_without_effect(config, given, planning=True)]


@pytest.mark.parametrize(("key", "with_these", "cure"), CASES, ids=[case[0] for case in CASES])
def test_a_key_without_effect_is_said_until_its_option_is_on(key, with_these, cure):
    assert [remedy.partition(" or ")[0] for remedy in no_effect(key, *with_these)] == [
        f"leave out {key.partition('=')[0]}"
    ]
    assert no_effect(key, *with_these, *cure.split()) == []


@pytest.mark.parametrize(("key", "with_these", "cure"), CASES, ids=[case[0] for case in CASES])
def test_the_suggested_option_is_one_that_helps(key, with_these, cure):
    [remedy] = no_effect(key, *with_these)
    for suggestion in remedy.split(" or ")[1:]:
        assert (
            no_effect(
                key, *with_these, *suggestion.replace("=...", "=x").replace("recipe=", "recipe.name=").split()
            )
            == []
        )


@pytest.mark.parametrize(("key", "with_these", "cure"), CASES, ids=[case[0] for case in CASES])
def test_another_algorithm_is_not_a_remedy(key, with_these, cure):
    [remedy] = no_effect(key, *with_these)
    assert "adv_estimator=" not in remedy and "loss_mode=" not in remedy


def test_the_algorithms_that_read_a_key_are_named():
    [note] = notes("algorithm.lam=0.5", "algorithm.adv_estimator=grpo").splitlines()
    assert note.endswith("only algorithm.adv_estimator=gae reads it")
    [note] = notes("algorithm.gdpo_reward_keys=[a]", "algorithm.adv_estimator=grpo").splitlines()
    assert note.endswith("only gdpo compares several")


TABLES = {
    "adv_estimator": (AlgorithmConfig(), "", ESTIMATORS),
    "loss_mode": (ActorConfig(), "policy_loss", POLICY_LOSSES),
    "strategy": (ActorConfig(), "", TRAIN_ENGINES),
    "name": (RolloutConfig(), "", GENERATION_ENGINES),
}


@pytest.mark.parametrize("chooser", TABLES)
def test_a_key_that_some_choices_read_has_no_effect_with_the_others(chooser):
    section, below, table = TABLES[chooser]
    parts = [section, getattr(section, below)] if below else [section]
    for choice, named in table.items():
        setattr(parts[-1], chooser, choice)
        others = {name for other in table.values() for name in other.all_reads} - set(named.all_reads)
        for prefix, part in zip(("", f"{below}."), parts, strict=False):
            for key in (prefix + field.name for field in fields(part) if field.name in others):
                assert why_idle(section, key) is not None, f"{chooser}={choice} does not read {key}"


def test_a_key_has_no_effect_once_all_keys_that_could_follow_it_are_given(tmp_path):
    (tmp_path / "own.py").write_text("def loss(tokens, *, clip_ratio_high): ...\n")
    section = ActorConfig(clip_ratio_high=0.3)
    section.policy_loss.loss_mode = f"{tmp_path}/own.py:loss"
    why, remedy = why_idle(section, "clip_ratio")
    assert (why, remedy) == (".clip_ratio_high is given", ".clip_ratio_high=null")
    section.clip_ratio_high = None
    assert why_idle(section, "clip_ratio") is None


def test_every_rule_is_about_keys_that_there_are():
    for schema, rules in RULES.items():
        leaves = [key.path for key in known_keys(schema).values() if not key.is_section]
        for rule in rules:
            assert all(any(fits(form, key) for key in leaves) for form in expand(rule.pattern)), rule.pattern


def test_strict_refuses_what_is_otherwise_said():
    assert "algorithm.lam=0.5: has no effect" in notes("algorithm.lam=0.5", "algorithm.adv_estimator=grpo")
    with pytest.raises(ConfigError) as caught:
        load_command(
            "ppo",
            PPOConfig,
            [*OWN, "algorithm.lam=0.5", "algorithm.adv_estimator=grpo", "+strict=true", "critic.grad_clip=3"],
        )
    found = {problem.field: problem for problem in caught.value.problems}
    assert set(found) == {"algorithm.lam", "critic.grad_clip"}
    assert found["algorithm.lam"].remedy == "leave out algorithm.lam"
    with pytest.raises(ConfigError, match=f"{ACTOR}.use_torch_compile=false: has no effect in verl either"):
        load_command("ppo", PPOConfig, [*OWN, "strict=true", f"{ACTOR}.use_torch_compile=false"])


def test_what_nobody_set_is_not_spoken_of():
    assert notes("algorithm.adv_estimator=gae") == ""
    # The recipe's own file sets keys of a critic that does not run.
    assert load_command("ppo", PPOConfig)[1].notes == ()


def test_supervised_training_has_rules_of_its_own():
    given = [
        "model.path=m",
        "data.train_files=t",
        "data.micro_batch_size_per_gpu=4",
        "trainer.test_freq=5",
        "optim.min_lr_ratio=0.1",
    ]
    _, command = load_command("sft", SFTConfig, given, tolerant=True)
    assert [note.partition("=")[0] for note in command.notes] == [
        "data.micro_batch_size_per_gpu",
        "trainer.test_freq",
        "optim.min_lr_ratio",
    ]
    assert str(command.counts) == "2 keys honoured, 3 accepted without effect, 0 unsupported"


def test_a_critic_by_default_is_announced():
    said = "algorithm.adv_estimator: not set, so gae as in verl, which trains a critic"
    for of_others in ([], [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], ["model_engine=megatron"]):
        assert said in notes(*of_others), of_others
    for meant in ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-5", "critic.enable=true"):
        assert said not in notes(meant), meant


def test_machines_to_plan_for_are_without_effect_in_a_run():
    assert notes("cluster.nodes=4", "algorithm.adv_estimator=grpo") == ""
    _, command = load_command("ppo", PPOConfig, [*OWN, "cluster.nodes=4", "algorithm.adv_estimator=grpo"])
    assert command.notes == (
        (
            "cluster.nodes=4: has no effect: it describes machines for python -m hydraflow.plan; a run reads"
            " trainer.*"
        ),
    )
