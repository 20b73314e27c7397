"""verl's keys and command lines: each key falls in one class, and a command line means here what it means
there."""

from pathlib import Path

import pytest
from compose import verl_commands
from compose.legal import translated
from jobs.command import hydraflow

from hydraflow.algorithms.config import ESTIMATORS
from hydraflow.compose import verl, verl_page
from hydraflow.compose.keys import accepts, is_below_open, known_keys
from hydraflow.compose.loading import load_command
from hydraflow.compose.patterns import fits
from hydraflow.compose.tree import check, flatten, nested
from hydraflow.compose.verl_table import FOLLOWS, Alias, aliases, defaults, tables, value_tables
from hydraflow.compose.verl_trees import config_file
from hydraflow.errors import ConfigError
from hydraflow.schema import EvalConfig, GenerateConfig, PPOConfig, SFTConfig

KEYS = known_keys(PPOConfig)
ROOT = Path(__file__).parents[2]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction.rollout_rs"
QUANTISED = "sample with quantised weights, which no engine here can read back and compare with the trainer's"
OWN = ["actor_rollout_ref.model.path=model", "data.train_files=train.parquet"]


def is_ours(key: str, schema: type = PPOConfig) -> bool:
    keys = known_keys(schema)
    return key in keys or is_below_open(keys, key)


# --- the tables --------------------------------------------------


def test_the_defaults_are_those_of_verl():
    # verl 0.9.1 has 898 leaves; 69 of them are _target_
    assert len(defaults(PPOConfig, megatron=False)) == 829
    assert len(defaults(PPOConfig)) == 829 + 182
    assert defaults(PPOConfig)["actor_rollout_ref.actor.ppo_mini_batch_size"] == 256
    assert defaults(PPOConfig)["critic.fsdp.qat.ignore_patterns"] == [
        "lm_head",
        "embed_tokens",
        "re:.*mlp.gate$",
    ]
    assert defaults(PPOConfig)["actor_rollout_ref.ref.strategy"] is ...


def test_the_defaults_of_supervised_training_are_those_of_verl():
    found = defaults(SFTConfig)
    # sft_trainer_engine.yaml has 180, and three come with the sections that are like those of main_ppo
    assert len(found) == 180 + 3
    assert (found["optim.lr"], found["engine.dtype"], found["model.lora_alpha"]) == (0.001, "bfloat16", 16)
    assert (found["trainer.total_epochs"], found["data.use_dynamic_bsz"]) == (4, True)


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig])
def test_every_key_of_verl_falls_in_exactly_one_class(schema):
    rows = tables(schema)
    other_names = aliases(schema)
    for key in defaults(schema):
        new = verl.renamed(schema, key)
        found = [pattern for pattern in rows.rows if fits(pattern, new)]
        found += (
            ["known"] * is_ours(key, schema)
            + ["moved"] * (new != key and is_ours(new, schema))
            + ["alias"] * (new in other_names)
        )
        if not found and any(new.startswith(section) for section in rows.like):
            found += ["like"] * (verl.classify(schema, key) is not None)
        assert len(found) == 1, (key, found)


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig, GenerateConfig, EvalConfig])
def test_every_alias_leads_to_a_key_of_ours(schema):
    keys = known_keys(schema)
    for old, row in aliases(schema).items():
        assert old not in keys, f"{old} is a key of ours; its row is dead"
        assert verl.classify(schema, old) in (row, Alias(row.new)), "the second: its whole section moved"
        assert is_ours(row.new, schema) or old == "model_engine", (old, row.new)
    sections = [*tables(schema).sections.values(), *tables(schema).like]
    assert all(
        any(key.startswith(new) for key in keys) or new.startswith(("reward_model", "reward."))
        for new in sections
    )


def test_every_key_that_follows_another_is_one_of_ours():
    for key, leader in FOLLOWS.items():
        assert any(
            key in known_keys(schema) and leader in known_keys(schema) for schema in (PPOConfig, SFTConfig)
        )


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig])
def test_no_row_hides_a_key_of_ours(schema):
    keys = known_keys(schema)
    for pattern in tables(schema).rows:
        hidden = [key for key in keys if fits(pattern, key) and not keys[key].is_section]
        assert hidden == [], pattern


@pytest.mark.parametrize(
    ("command", "schema", "row"),
    [
        ("main_ppo", PPOConfig, "| `algorithm.filter_groups.metric` | `reward` | `score` |"),
        ("main_sft", SFTConfig, "| `model.partial_pretrain` | `model.path` | a name of other versions |"),
        ("main_generate", GenerateConfig, "| `data.n_samples` | `rollout.n` | a name of other versions |"),
        ("main_eval", EvalConfig, "The arguments of `python -m verl.trainer.main_eval` run with"),
    ],
)
def test_help_says_what_becomes_of_verls_keys(command, schema, row):
    said = hydraflow(command, "--help", "verl", cwd=ROOT).stdout
    assert said.strip() == verl_page.page(schema).strip()
    assert row in said
    refused = sum(verl_page.kind(schema, key) == "unsupported" for key in defaults(schema))
    assert not refused or f"| unsupported | {refused} |" in said


# --- single keys --------------------------------------------------


@pytest.mark.parametrize(
    ("old", "value", "new", "taken"),
    [
        (
            f"{ACTOR}.ulysses_sequence_parallel_size",
            2,
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            2,
        ),
        ("critic.fsdp.param_offload", True, "critic.fsdp_config.param_offload", True),
        ("critic.fsdp_config.offload_policy", True, "critic.fsdp_config.offload_policy", True),
        ("critic.model.fsdp_config.param_offload", True, "critic.fsdp_config.param_offload", True),
        ("ray_kwargs.ray_init.num_cpus", 8, "ray_init.num_cpus", 8),
        ("ray_kwargs.timeline_json_file", "t.json", "ray_init.timeline_file", "t.json"),
        ("ray_init.timeline_json_file", "t.json", "ray_init.timeline_file", "t.json"),
        ("global_profiler.steps", [1, 2], "global_profiler.steps", [1, 2]),
        ("trainer.profile_steps", [1, 2], "global_profiler.steps", [1, 2]),
        ("custom_reward_function.path", "r.py", "reward.custom_reward_function.path", "r.py"),
        ("reward_model.enable", True, "reward.reward_model.enable", True),
        ("reward_model.reward_manager", "batch", "reward.reward_manager.name", "batch"),
        (f"{ACTOR}.grad_clip", 0.5, f"{ACTOR}.optim.clip_grad", 0.5),
        (f"{ACTOR}.optim.warmup_style", "cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
        (f"{ROLLOUT}.response_length", 99, "data.max_response_length", 99),
        ("actor_rollout_ref.ref.strategy", "fsdp", f"{ACTOR}.strategy", "fsdp2"),
        (f"{ACTOR}.strategy", "fsdp", f"{ACTOR}.strategy", "fsdp2"),
        (f"{ACTOR}.fsdp_config.model_dtype", "bfloat16", f"{ACTOR}.fsdp_config.model_dtype", "bf16"),
        (f"{ACTOR}.optim.lr_warmup_steps", None, f"{ACTOR}.optim.lr_warmup_steps", -1),
        (f"{ROLLOUT}.name", "hf", f"{ROLLOUT}.name", "native"),
        *((CORRECTION, old, CORRECTION, new) for old, new in value_tables().renamed[CORRECTION].items()),
        ("trainer.logger", "console", "trainer.logger", ["console"]),
        ("trainer.logger", ["console", "clearml"], "trainer.logger", ["console", "file", "tensorboard"]),
        ("trainer.val_generations_to_log_to_wandb", 4, "trainer.log_val_generations", 4),
        ("trainer.test_freq", 0, "trainer.test_freq", -1),
    ],
)
def test_a_key_of_verl_is_taken_at_its_word(old, value, new, taken):
    found, said = translated({old: value})
    assert found[new] == taken
    assert said.problems == []
    assert bool(said.notes) == ((old, value) != (new, taken) and taken != ["console"])


def test_an_engine_of_verl_is_taken_at_its_word_where_responses_are_generated():
    own = ["model.path=m", "data.path=p", "output.path=o"]
    config, command = load_command("generate", GenerateConfig, [*own, "rollout.name=hf"])
    assert config.rollout.name == "native"
    assert any("rollout.name=hf: taken as native" in note for note in command.notes)


def test_reward_arguments_go_into_the_open_mapping():
    found, _ = translated(
        {"custom_reward_function.reward_kwargs.a": 1, "custom_reward_function.reward_kwargs.b.c": 2}
    )
    assert found["reward.custom_reward_function.reward_kwargs"] == {"a": 1, "b": {"c": 2}}


@pytest.mark.parametrize(
    ("extra", "per_rank"),
    [
        ({}, 8),  # 128 rows over 2·8 ranks
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 4}, 32),  # over 16/4
        ({"model_engine": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 2}, 16),  # over 16/2
    ],
)
def test_a_size_over_all_ranks_is_divided_by_them(extra, per_rank):
    tree = {f"{ACTOR}.ppo_micro_batch_size": 128, "trainer.nnodes": 2, "trainer.n_gpus_per_node": 8, **extra}
    assert translated(tree)[0][f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == per_rank


def test_a_size_over_all_ranks_that_cannot_be_divided_is_refused():
    _, said = translated({"critic.ppo_micro_batch_size": 12, "trainer.n_gpus_per_node": 8})
    assert (
        str(said.problems[0])
        == "critic.ppo_micro_batch_size=12: counts rows over all data ranks, so it must be divisible by"
        " their number, 8\n"
        "      -> critic.ppo_micro_batch_size_per_gpu=1"
    )
    _, said = translated({"critic.ppo_micro_batch_size": 16})
    assert "whose number is not known here" in said.problems[0].rule
    size = f"{ACTOR}.ulysses_sequence_parallel_size"
    _, said = translated({f"{ACTOR}.ppo_micro_batch_size": 16, "trainer.n_gpus_per_node": 8, size: 0})
    assert "whose number is not known here" in said.problems[0].rule
    assert translated({"critic.ppo_micro_batch_size": None})[1].problems == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            f"{ACTOR}.use_torch_compile",
            False,
            "has no effect in verl either: verl reads fsdp_config.use_torch_compile",
        ),
        ("actor_rollout_ref.nccl_timeout", 1200, "has no effect in verl either: verl never reads it"),
        (
            "actor_rollout_ref.actor._target_",
            "verl.X",
            "has no effect: it names a class of verl's",
        ),
        ("data.dataloader_num_workers", 2, "has no effect: it changes speed only"),
        ("actor_rollout_ref.hybrid_engine", True, "has no effect: it is off, or the default behaviour"),
        ("trainer.default_hdfs_dir", None, "has no effect: it is off, or the default behaviour"),
        (
            f"{ACTOR}.profiler.all_ranks",
            True,
            "has no effect: global_profiler.{tool,steps,ranks} profile all roles of a process together",
        ),
    ],
)
def test_a_key_without_effect_is_accepted_and_said(key, value, said):
    _, found = translated({key: value})
    assert (found.problems, [problem.rule for problem in found.ignored]) == ([], [said])


@pytest.mark.parametrize(
    ("key", "value", "would"),
    [
        (
            "actor_rollout_ref.hybrid_engine",
            False,
            "give actor and rollout separate engines when false",
        ),
        ("trainer.default_hdfs_dir", "out", "keep checkpoints elsewhere"),
        ("global_profiler.finish_hook_cmd", "ls", "configure profiles"),
        ("skip.rollout.enable", True, "reuse responses of an earlier run"),
        (f"{ROLLOUT}.multi_turn.enable", True, "hold conversations of several turns"),
        (
            f"{ACTOR}.tis_imp_ratio_cap",
            2.0,
            "correct for the difference between rollout and training probabilities",
        ),
        (f"{ACTOR}.veomni.param_offload", True, "set up another training engine"),
        (f"{ROLLOUT}.quantization", "fp8", QUANTISED),
        (f"{ROLLOUT}.quantization_config_file", "torchao.json", QUANTISED),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_what_it_would_do(key, value, would):
    _, found = translated({key: value})
    [problem] = found.unsupported
    assert (problem.field, problem.rule) == (key, f"is not supported yet; in verl it would {would}")
    assert problem.remedy.startswith(f"leave out {key}")


@pytest.mark.parametrize("role", ["actor_rollout_ref", "critic"])
def test_overrides_of_the_models_configuration_are_those_of_any_engine(role):
    """verl's Megatron engine has them one level deeper."""
    key = f"{role}.model.override_config"
    taken, said = translated({f"{key}.model_config.rope_theta": 5e6, f"{key}.eos_token_id": 7})
    assert taken[key] == {"rope_theta": 5e6, "eos_token_id": 7} and said.problems == []
    assert said.notes == [f"{key}.model_config: taken as {key}, with rope_theta"]
    _, said = translated({f"{key}.model_config.eos_token_id": 5, f"{key}.eos_token_id": 7})
    [problem] = said.problems
    assert (problem.field, problem.remedy) == (
        f"{key}.model_config.eos_token_id",
        f"leave out {key}.model_config.eos_token_id",
    )


def test_frozen_routers_are_refused_by_name():
    key = "actor_rollout_ref.model.override_config"
    taken, said = translated({f"{key}.moe_config.freeze_moe_router": False, f"{key}.eos_token_id": 7})
    assert (taken[key], said.problems) == ({"eos_token_id": 7}, [])
    taken, said = translated({f"{key}.moe_config.freeze_moe_router": True})
    [problem] = said.unsupported
    assert taken[key] == {} and problem.remedy == f"leave out {key}.moe_config.freeze_moe_router"


def test_two_names_of_one_key_must_agree():
    _, said = translated({f"{ACTOR}.grad_clip": 0.5, f"{ACTOR}.optim.clip_grad": 2.0})
    assert (
        str(said.problems[0])
        == f"{ACTOR}.grad_clip=0.5: is another name for {ACTOR}.optim.clip_grad, which is set to 2.0\n"
        f"      -> leave out {ACTOR}.grad_clip or {ACTOR}.optim.clip_grad=0.5"
    )
    assert translated({f"{ACTOR}.grad_clip": 0.5, f"{ACTOR}.optim.clip_grad": 0.5})[1].problems == []


def test_the_command_line_goes_before_a_file_by_whatever_name():
    tree = nested({f"{ACTOR}.grad_clip": 0.5, f"{ACTOR}.optim.clip_grad": 2.0})
    origins = {f"{ACTOR}.grad_clip": "mine.yaml", f"{ACTOR}.optim.clip_grad": "command line"}
    judged = check(PPOConfig, tree, origins, lambda key: None)
    assert judged.leaves[f"{ACTOR}.optim.clip_grad"] == 2.0
    judged = check(
        PPOConfig,
        tree,
        {key: origins[other] for key, other in zip(origins, reversed(origins), strict=True)},
        lambda key: None,
    )
    assert judged.leaves[f"{ACTOR}.optim.clip_grad"] == 0.5
    assert judged.problems == []


def test_the_reference_follows_the_actors_layout():
    config, command = load_command(
        "ppo", PPOConfig, [*OWN, f"{ACTOR}.megatron.tensor_model_parallel_size=4"], tolerant=True
    )
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 4
    assert (
        command.origins["actor_rollout_ref.ref.megatron.tensor_model_parallel_size"]
        == f"follows {ACTOR}.megatron.tensor_model_parallel_size"
    )
    own = [
        f"{ACTOR}.megatron.tensor_model_parallel_size=4",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
    ]
    config, _ = load_command("ppo", PPOConfig, [*OWN, *own], tolerant=True)
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 2


# --- command lines --------------------------------------------------


def words_of(command_line: list[str]) -> list[str]:
    """The overrides of a command line; verl's configuration file becomes what it stands for."""
    files = [word.partition("=")[2] for word in command_line if word.startswith("--config-name")]
    return [word for word in command_line if not word.startswith("--")] + [
        word for file in files for word in config_file(PPOConfig, file)
    ]


@pytest.mark.parametrize("name", verl_commands.RUNNABLE_MEANING)
def test_every_key_of_a_command_line_has_a_counterpart(name):
    command_line = verl_commands.RUNNABLE_MEANING[name]
    _, command = load_command("ppo", PPOConfig, words_of(command_line), tolerant=True)
    assert command.unsupported == ()
    assert command.counts.honoured + command.counts.without_effect >= len(
        [word for word in command_line if "=" in word and word[0] != "-"]
    )


def test_ppo_on_gsm8k_means_the_same():
    config, command = load_command("ppo", PPOConfig, verl_commands.PPO_GSM8K, tolerant=True)
    assert (
        config.data.train_batch_size,
        config.actor_rollout_ref.actor.ppo_mini_batch_size,
        config.trainer.total_epochs,
    ) == (256, 64, 15)
    assert (config.critic.optim.lr, config.critic.ppo_micro_batch_size_per_gpu, config.trainer.logger) == (
        1e-5,
        4,
        ["console"],
    )
    assert str(command.counts) == "23 keys honoured, 2 accepted without effect, 0 unsupported"
    assert command.notes == (
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4: has no effect: no reference runs",
        "algorithm.kl_ctrl.kl_coef=0.001: has no effect: algorithm.use_kl_in_reward=false",
    )


def test_grpo_with_megatron_means_the_same():
    config, _ = load_command("ppo", PPOConfig, words_of(verl_commands.GRPO_MEGATRON), tolerant=True)
    policy = config.actor_rollout_ref
    assert (policy.actor.strategy, config.critic.strategy, policy.rollout.n) == ("megatron", "megatron", 8)
    assert (
        policy.actor.megatron.expert_model_parallel_size,
        policy.ref.megatron.expert_model_parallel_size,
    ) == (4, 4)
    assert policy.actor.megatron.override_transformer_config == {
        "recompute_granularity": "full",
        "recompute_num_layers": 1,
    }
    assert config.data.train_files == ["/data/gsm8k/train.parquet", "/data/math/train.parquet"]


def test_names_of_early_versions_mean_the_same():
    config, _ = load_command("ppo", PPOConfig, verl_commands.PPO_OLD, tolerant=True)
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 128 // 8
    assert (config.critic.fsdp_config.param_offload, config.trainer.log_val_generations) == (False, 4)
    assert (config.reward.custom_reward_function.path, config.reward.custom_reward_function.name) == (
        "/code/reward.py",
        "score",
    )


def test_what_dapo_needs_besides_is_taken():
    config, command = load_command("ppo", PPOConfig, verl_commands.DAPO, tolerant=True)
    assert (config.algorithm.filter_groups.enable, config.data.gen_batch_size) == (True, 1536)
    assert config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size == 8
    buffer = config.reward.reward_kwargs.overlong_buffer_cfg
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 4096, 1.0)
    assert config.reward.reward_manager.name == "dapo"
    assert not command.unsupported


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_of_verls_is_one_of_ours(name):
    given = ["algorithm.gdpo_reward_keys=[a,b]"] if name == "gdpo" else []
    if name.endswith("token_baseline"):
        given = ["actor_rollout_ref.actor.calculate_sum_pi_squared=True"]
    _, command = load_command("ppo", PPOConfig, [*OWN, f"algorithm.adv_estimator={name}", *given])
    assert not command.unsupported


def test_verls_groups_are_taken_or_named():
    config, _ = load_command("ppo", PPOConfig, [*OWN, "critic@critic=megatron_critic"], tolerant=True)
    assert (config.actor_rollout_ref.actor.strategy, config.critic.strategy) == ("fsdp2", "megatron")
    with pytest.raises(ConfigError, match="model_engine=veomni: there is no such engine here"):
        load_command("ppo", PPOConfig, [*OWN, "model_engine=veomni"])


def test_every_default_of_verl_is_accepted():
    """A user who writes verl's own defaults on the command line asks for nothing special."""
    given = {
        key: value
        for key, value in defaults(PPOConfig, megatron=False).items()
        if value is not ... and value != "???"
    }
    given |= {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 1}
    found, said = translated(given)
    assert [str(problem) for problem in said.problems] == []
    assert all(accepts(KEYS[key].hint, value) for key, value in found.items() if key in KEYS)
    assert len(list(flatten(PPOConfig, nested(given)))) > 600
