"""Remedies that lead somewhere: verl's names for misspelt ones of verl's, Hydra's words in this program's
form."""

import shlex

import pytest
from hydra.errors import ConfigCompositionException
from jobs.command import python

from hydraflow.compose.hydra_errors import translated
from hydraflow.compose.keys import known_keys, unknown_key
from hydraflow.compose.loading import load, load_command
from hydraflow.compose.tree import value_problems
from hydraflow.compose.verl_table import value_tables
from hydraflow.errors import ConfigError
from hydraflow.schema import GenerateConfig, PPOConfig, SFTConfig

ROLLOUT = "actor_rollout_ref.rollout"
ESTIMATOR, LOSS = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"
OLD, NEW = "actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"
SAVED = "actor_rollout_ref.actor.checkpoint.save_contents"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        (f"{ROLLOUT}.enfrce_eager", True, f"{ROLLOUT}.enforce_eager=true"),
        (f"{ROLLOUT}.moed", "async", f"{ROLLOUT}.mode=async"),
        ("actor_rollout_ref.actor.grad_clp", 1, "actor_rollout_ref.actor.grad_clip=1"),
        ("data.train_bach_size", 3, "data.train_batch_size=3"),
        ("actor_rollout_ref.actor.use_dynamc_bsz", True, "actor_rollout_ref.actor.use_dynamic_bsz=true"),
    ],
)
def test_the_nearest_name_comes_first_be_it_ours_or_verls(key, value, remedy):
    [problem] = value_problems(PPOConfig, key, value)
    assert problem.remedy.split(" or ")[0] == remedy


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("trainer.epochs", 3, "trainer.total_epochs=3"),
        ("epochs", 3, "trainer.total_epochs=3"),
        ("trainer.steps", 3, "trainer.total_training_steps=3"),
        ("trainer.n_gpus", 8, "trainer.n_gpus_per_node=8"),
        ("trainer.gpus", 8, "trainer.n_gpus_per_node=8"),
        ("batch_size", 64, "data.train_batch_size=64"),
        ("data.files", "/data", "data.train_files=/data"),
        ("model", "Qwen/Qwen3-4B", "actor_rollout_ref.model.path=Qwen/Qwen3-4B"),
        (f"{ROLLOUT}.n_samples", 4, "--help lists every key"),
        (f"{ROLLOUT}.tp_size", 2, "--help lists every key"),
    ],
)
def test_a_shortened_name_is_taken_for_a_longer_one_not_for_a_misspelling(key, value, remedy):
    [problem] = value_problems(PPOConfig, key, value)
    assert problem.remedy.split(" or ")[0] == remedy


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (
            "trainer.logger",
            [["console", "file"]],
            "without a list inside\n      -> trainer.logger=[console,file]",
        ),
        ("data.train_batch_size", "64", "='64': must be a whole number, and the quotes make it text\n"),
        ("actor_rollout_ref.actor.optim.betas", "[0.9,0.95]", "optim.betas=[0.9,0.95]"),
        ("trainer.seed", "abc", "trainer.seed=abc: must be a whole number, not text"),
    ],
)
def test_a_value_of_the_wrong_type_is_shown_as_it_was_written(key, value, expected):
    [problem] = value_problems(PPOConfig, key, value)
    assert expected in str(problem)


def test_other_entry_points_know_verls_names():
    assert (
        load(
            "sft", SFTConfig, ["model.path=m", "data.train_files=t", "optim.warmup_style=cosine"]
        ).optim.lr_scheduler_type
        == "cosine"
    )
    config, command = load_command(
        "generate",
        GenerateConfig,
        ["model.path=m", "data.path=d", "data.n_samples=2", "data.output_path=o.jsonl"],
    )
    assert (config.rollout.n, config.output.path, config.data.max_samples) == (2, "o.jsonl", -1)
    assert command.origins["rollout.n"] == "command line"


def test_a_generation_does_not_divide_models() -> None:
    given = ["model.path=m", "data.path=d", "output.path=o.jsonl"]
    size = "rollout.tensor_model_parallel_size"
    with pytest.raises(ConfigError) as refused:
        load("generate", GenerateConfig, [*given, f"{size}=2"])
    [problem] = refused.value.problems
    assert "divide each model" in problem.rule and problem.remedy == f"leave out {size}"
    assert load("generate", GenerateConfig, [*given, f"{size}=1"]).rollout.n == 1


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("~data.shufle", "~data.shufle: there is no such key to delete\n      -> ~data.shuffle"),
        ("~data.nope", "~data.nope: there is no such key to delete\n      -> leave out ~data.nope"),
        ("trainer.seed=${nope}", "trainer.seed=${nope}: Interpolation key 'nope' not found\n      -> "),
        ("data.train_batch_size", "is not key=value\n      -> data.train_batch_size=1024"),
        ("data.train_batch_size: 32", "is not key=value\n      -> data.train_batch_size=32"),
        ("data.train_batch_size:", "is not key=value\n      -> --help lists every key"),
        ("trainer.max_wall_time=2024-13-45", "trainer.max_wall_time=2024-13-45: must be"),
        ("data.train_batch_size=1:30", "data.train_batch_size=1:30: must be a whole number"),
        ("data.train_batch_size==32", "has more than one =\n      -> data.train_batch_size=32"),
        ("data.train_batch_size=64,128", "-> data.train_batch_size=64 for one value, or --multirun"),
        ("data.train_files=[a,b", "its [ is not closed\n      -> 'data.train_files=[a,b]'"),
        ("data.x={a:", "its { is not closed\n      -> 'data.x={a:...}'"),
        ("citric.ppo_epochs=2", "unknown key\n      -> critic.ppo_epochs=2 or"),
        ("lr=1e-5", "unknown key\n      -> actor_rollout_ref.actor.optim.lr=1e-05 or critic.optim.lr"),
        ("trainer.use_legacy_worker_imp=disable", "-> trainer.use_legacy_worker_impl=disable"),
        ("data.val_files=['']", "data.val_files=['']: must be a file or a list of files"),
        (
            'data.train_files="[/a,/b]"',
            "data.train_files='[/a,/b]': must be a file or a list of files, and the quotes make it text\n"
            "      -> data.train_files=[/a,/b]",
        ),
        (
            "trainer.logger='[console,file]'",
            "trainer.logger='[console,file]': must be a list of text, and the quotes make it text\n"
            "      -> trainer.logger=[console,file]",
        ),
        ("d\u0430ta.shuffle=true", "\u0430 (U+0430) is not allowed in a key\n      -> data.shuffle=true"),
        ("algorithm.adv_estimator=GRPO", "-> algorithm.adv_estimator=grpo"),
        ("actor_rollout_ref.actor.use_kl_loss=1", "-> actor_rollout_ref.actor.use_kl_loss=true"),
        (f"{SAVED}=model", f"must be a list of text, not text\n      -> {SAVED}=[model]"),
        ("data.nope", "is not key=value\n      -> --help lists every key"),
    ],
)
def test_a_word_that_hydra_cannot_take_has_a_remedy(word, expected):
    with pytest.raises(ConfigError) as refused:
        load("ppo", PPOConfig, [word])
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (
            "algorithm.adv_estimator=codapo",
            "is verl's and not implemented here yet\n      -> leave out algorithm.adv_estimator",
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=cppo",
            "is verl's and not implemented here yet\n"
            "      -> leave out actor_rollout_ref.actor.policy_loss.loss_mode",
        ),
        ("algorithm.adv_estimator=mine", "\n      -> leave out algorithm.adv_estimator"),
        ("trainer.logger=[console,wandbb]", "\n      -> trainer.logger=[console,wandb]"),
        ("cluster=h100x", "must be a100, cpu, h100, h200 or l40s\n      -> cluster=h100"),
        ("actor_rollout_ref.rollout.nam=3", "unknown key\n      -> actor_rollout_ref.rollout.n=3"),
    ],
)
def test_a_remedy_changes_no_algorithm_and_loses_nothing(word: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("ppo", PPOConfig, [word])
    assert expected in str(refused.value) and len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        (ESTIMATOR, "ppo", f"{ESTIMATOR}=gae"),
        (ESTIMATOR, "PPO", f"{ESTIMATOR}=gae"),
        (ESTIMATOR, "reinforce++", f"{ESTIMATOR}=reinforce_plus_plus"),
        (ESTIMATOR, "grop", f"{ESTIMATOR}=grpo"),
        (ESTIMATOR, "dapo", f"leave out {ESTIMATOR}"),
        (ESTIMATOR, "foo", f"leave out {ESTIMATOR}"),
        (ESTIMATOR, "[grpo]", f"{ESTIMATOR}=grpo"),
        (ESTIMATOR, "[grpo,gae]", f"leave out {ESTIMATOR}"),
        (ESTIMATOR, "null", f"leave out {ESTIMATOR}"),
        (LOSS, "ppo", f"{LOSS}=vanilla"),
        (LOSS, "dppo", f"{LOSS}=dppo_tv or dppo_kl"),
        (LOSS, "gspoo", f"{LOSS}=gspo"),
        ("trainer.device", "npu", "leave out trainer.device"),
        ("trainer.device", "CUDA", "trainer.device=cuda"),
        ("actor_rollout_ref.actor.strategy", "[megatron]", "actor_rollout_ref.actor.strategy=megatron"),
        ("data.train_batch_size", "[64]", "data.train_batch_size=64"),
    ],
)
def test_a_choice_is_suggested_only_if_it_was_meant(key: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("ppo", PPOConfig, [f"{key}={value}"])
    assert [problem.remedy for problem in refused.value.problems] == [remedy]


def test_verls_values_are_taken_in_any_case() -> None:
    config = load("ppo", PPOConfig, ["trainer.device=GPU", "actor_rollout_ref.actor.strategy=FSDP"])
    assert (config.trainer.device, config.actor_rollout_ref.actor.strategy) == ("cuda", "fsdp2")


def test_what_a_name_is_taken_for_is_a_choice_of_its_key() -> None:
    for key, names in value_tables().suggested.items():
        rule = known_keys(PPOConfig)[key].rule
        assert (
            rule is not None and set(names.values()) <= set(rule.choices) and not {*names} & {*rule.choices}
        )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("actor_rollout_ref.actor.grad_clip=0", "actor_rollout_ref.actor.grad_clip=1.0"),
        ("actor_rollout_ref.actor.grad_clip=x", "actor_rollout_ref.actor.grad_clip=1.0"),
        ("critic.ulysses_sequence_parallel_size=x", "critic.ulysses_sequence_parallel_size=1"),
        ("actor_rollout_ref.ref.strategy=fsdp3", "actor_rollout_ref.ref.strategy=fsdp2"),
    ],
)
def test_a_remedy_has_the_name_that_the_user_wrote(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("ppo", PPOConfig, [wrong])
    [problem] = refused.value.problems
    assert (problem.field, problem.remedy) == (wrong.partition("=")[0], right)
    load("ppo", PPOConfig, [wrong, right])


def test_two_names_of_one_key_keep_their_own() -> None:
    with pytest.raises(ConfigError) as refused:
        load("ppo", PPOConfig, [f"{OLD}=2", f"{NEW}=3"])
    [problem] = refused.value.problems
    assert (problem.field, problem.remedy) == (OLD, f"leave out {OLD} or {NEW}=2")


def test_optimizer_settings_of_the_reference_change_nothing() -> None:
    """verl's generated file for torchtitan has them."""
    given = ["+actor_rollout_ref.ref.optim.lr=0.1", "+actor_rollout_ref.actor.optim.decay_type=linear"]
    config, command = load_command("ppo", PPOConfig, given)
    assert config == load("ppo", PPOConfig)
    assert any("the reference is not trained" in note for note in command.notes)


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m['role'] }}: {{ m[\"content\"] }}{% endfor %}", "<|im_start|> é"]
)
def test_a_quoted_value_is_the_users_with_all_of_its_own_quotes(template):
    key = "actor_rollout_ref.model.custom_chat_template"
    with pytest.raises(ConfigError) as refused:
        load("ppo", PPOConfig, [f"{key}={template}"])
    [problem] = refused.value.problems
    [word] = shlex.split(problem.remedy.partition("for the shell: ")[2])
    assert load("ppo", PPOConfig, [word]).actor_rollout_ref.model.custom_chat_template == template


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.train_batch_size", "=", "32"], "data.train_batch_size = 32: has spaces around its ="),
        (["data.train_batch_size:", "32"], "data.train_batch_size: 32: is not key=value"),
    ],
)
def test_spaces_around_the_sign_are_one_problem(words, said):
    with pytest.raises(ConfigError) as refused:
        load("ppo", PPOConfig, ["trainer.seed=2", *words])
    [problem] = refused.value.problems
    assert str(problem) == f"{said}\n      -> data.train_batch_size=32"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["data.x={a:", "1,", "b:", "2}"],
            "data.x={a: 1, b: 2}: contains spaces, so the shell split it\n"
            "      -> quote it: 'data.x={a: 1, b: 2}'",
        ),
        (["data.x=[1,"], "data.x=[1,: its [ is not closed\n      -> 'data.x=[1,...]'"),
        (["data.x=[{a: 1]"], "data.x=[{a: 1]: its [ is not closed\n      -> 'data.x=[{a: 1]}]'"),
        (["data.x=[1,", "~data.shuffle"], "data.x=[1,: its [ is not closed\n      -> 'data.x=[1,...]'"),
    ],
)
def test_a_value_that_the_shell_has_split_is_one_problem(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("ppo", PPOConfig, [*words, "trainer.seed=3"])
    assert [str(problem) for problem in refused.value.problems] == [expected]


@pytest.mark.parametrize(
    ("key", "value"), [("actor_rollout_ref.actor.loss_agg_mode", "token_mean"), (SAVED, "[weights]")]
)
def test_a_key_that_follows_another_is_not_refused_beside_it(key, value):
    with pytest.raises(ConfigError) as refused:
        load("ppo", PPOConfig, [f"{key}={value}", "algorithm.adv_estimator=gae"])
    assert [problem.field for problem in refused.value.problems] == [key]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "primary config 'mine' must be a DictConfig, got ListConfig",
            "mine.yaml: holds a list where keys belong\n",
        ),
        ("In 'mine': Could not load 'ppo_triner'.", "-> write ppo_trainer instead"),
        ("In 'mine': Could not load 'nowhere'.", "-> leave out nowhere"),
        (
            "In 'mine': Could not find 'model_engine/veomni'\n\nAvailable options in 'model_engine':"
            "\n\tdp\n\tmegatron",
            "names 'veomni' of model_engine, which must be dp or megatron\n      -> write model_engine: dp",
        ),
        (
            "In 'mine': Could not override 'recipe'. No match in the defaults list.",
            "-> write recipe without override",
        ),
        (
            "Multiple values for recipe. To override a value use 'override recipe: arithmetic'",
            "-> write override recipe: arithmetic in the defaults list",
        ),
        (
            "Cannot find primary config 'ppo'. Check that it's in your config search path.",
            "-> --config-name NAME",
        ),
        (
            "Could not delete from config. The value of 'trainer.logger' is ['file'] and not ['console'].",
            "~trainer.logger: the key has a different value\n      -> ~trainer.logger",
        ),
        ("something new", "configuration: something new"),
    ],
)
def test_hydras_words_get_field_rule_and_remedy(said, expected):
    found = translated(ConfigCompositionException(said), ["ppo", "ppo_trainer"])
    assert expected in str(found)


def test_a_deleted_key_is_at_its_default():
    config, command = load_command("ppo", PPOConfig, ["~data.train_batch_size", "trainer.n_gpus_per_node=2"])
    assert (config.data.train_batch_size, command.origins["data.train_batch_size"]) == (1024, "default")
    assert command.origins["data.max_prompt_length"] == "config/recipe/arithmetic.yaml"


def test_a_value_is_suggested_that_the_run_has_without_the_command_line():
    lr, suggested = "actor_rollout_ref.actor.optim.lr", {}
    wrong = [
        "data.train_batch_size=0",
        "data.max_response_length=many",
        "data.max_prompt_length=0",
        f"{lr}=-1",
    ]
    for recipe in ("arithmetic", "none"):
        with pytest.raises(ConfigError) as refused:
            load("ppo", PPOConfig, [f"recipe={recipe}", *wrong])
        suggested[recipe] = {problem.remedy for problem in refused.value.problems}
    keys = ("data.train_batch_size", "data.max_response_length", "data.max_prompt_length", lr)
    assert suggested["arithmetic"] >= {
        f"{key}={value}" for key, value in zip(keys, ("64", "8", "16", "0.0006"), strict=True)
    }
    assert suggested["none"] >= {
        "leave out data.train_batch_size",  # its default, 1024, may not fit the other sizes
        f"{lr}=1e-06",
    }


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("data:train_batch_size=64", "data.train_batch_size=64"),
        ("data.x/y=5", "--help lists every key"),
        ("data.train_batch_size=64)", "data.train_batch_size=64"),
        ("actor_rollout_ref.actor.optim.lr=1e-6;", "actor_rollout_ref.actor.optim.lr=1e-6"),
    ],
)
def test_what_hydra_cannot_read_has_a_remedy_that_it_reads(word, remedy):
    with pytest.raises(ConfigError) as refused:
        load("ppo", PPOConfig, [word])
    [problem] = refused.value.problems
    assert problem.remedy == remedy


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("critic.enable", "maybe", "leave out critic.enable"),
        ("actor_rollout_ref.actor.optim.betas", 0.9, "actor_rollout_ref.actor.optim.betas=[0.9,0.999]"),
        ("actor_rollout_ref.actor.use_kl_loss", "yes", "actor_rollout_ref.actor.use_kl_loss=true"),
        ("data.promt_key", "question", "data.prompt_key=<text>"),  # hidden: its name ends like a secret's
        ("algorithm.adv_estimator", ["grpo"], "algorithm.adv_estimator=grpo"),
    ],
)
def test_a_remedy_of_a_wrong_type_is_of_the_right_one(key, value, remedy):
    [problem] = value_problems(PPOConfig, key, value)
    assert problem.remedy == remedy
    assert "quotes" not in problem.rule


def test_a_secret_of_a_file_is_not_suggested(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo, _self_]\ntrainer: {wandb_proxy: 'http://me:hush@host:1'}\n"
    )
    own = [f"--config-dir={tmp_path}", "--config-name=mine"]
    said = python("-m", "hydraflow.plan", *own, "trainer.wandb_proxy=[1]", cwd=tmp_path)
    assert said.returncode == 2 and "-> leave out trainer.wandb_proxy\n" in said.stderr
    assert "hush" not in said.stdout + said.stderr


def test_a_secret_below_a_misspelt_mapping_is_not_repeated():
    """No type is known of a mapping's entries."""
    problem = unknown_key(PPOConfig, "ray_init.runtime_env.env_varz.JUDGE_TOKEN", "hush")
    assert problem.remedy == "ray_init.runtime_env.env_vars.JUDGE_TOKEN=<any value>"


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig, GenerateConfig])
def test_no_key_fails_over_a_value_of_any_type(schema):
    values = (
        [1],
        ["a"],
        [None],
        [[1]],
        {"a": 1},
        {},
        [],
        "yes",
        "0x40",
        "",
        True,
        0,
        -1,
        1.5,
        float("nan"),
        None,
    )
    for key in known_keys(schema):
        for value in values:
            assert all(problem.rule for problem in value_problems(schema, key, value)), (key, value)
