"""Command lines of verl's supervised trainers: they mean the same here, or are refused by name."""

import json
from functools import partial

import pytest
from compose import here, legal, verl_sft_commands

from hydraflow.batch_plan.sft import resolve_sft_plan
from hydraflow.compose.loading import load_command
from hydraflow.compose.patterns import expand
from hydraflow.compose.verl_table import defaults, tables
from hydraflow.errors import ConfigError
from hydraflow.schema import SFTConfig

OWN = ["model.path=model", "data.train_files=train.parquet"]
STRATEGY = "engine.strategy"
translated = partial(legal.translated, schema=SFTConfig)


# --- single keys --------------------------------------------------


@pytest.mark.parametrize(
    ("old", "value", "new", "taken"),
    [
        ("model.partial_pretrain", "m", "model.path", "m"),
        ("use_remove_padding", False, "model.use_remove_padding", False),
        ("engine.param_offload", True, "fsdp_config.param_offload", True),
        ("engine.dtype", "bfloat16", "fsdp_config.dtype", "bf16"),
        ("engine.wrap_policy.min_num_params", 9, "fsdp_config.wrap_policy.min_num_params", 9),
        ("model.fsdp_config.model_dtype", "bf16", "fsdp_config.model_dtype", "bf16"),
        ("model.fsdp_config.cpu_offload", True, "fsdp_config.offload_policy", True),
        ("data.multiturn.messages_key", "turns", "data.messages_key", "turns"),
        ("data.multiturn.enable_thinking_key", None, "data.enable_thinking_key", None),
        ("trainer.checkpoint.save_contents", ["model"], "checkpoint.save_contents", ["model"]),
        ("checkpoint.save_contents", ["model"], "checkpoint.load_contents", ["model"]),
        ("optim.lr_scheduler", "cosine", "optim.lr_scheduler_type", "cosine"),
        ("optim.warmup_steps_ratio", 0.1, "optim.lr_warmup_steps_ratio", 0.1),
        ("trainer.logger", "console", "trainer.logger", ["console"]),
        ("trainer.logger", ["console", "tracking"], "trainer.logger", ["console", "wandb"]),
        ("trainer.test_freq", "after_each_epoch", "trainer.test_freq", "after_each_epoch"),
    ],
)
def test_a_key_of_verl_is_taken_at_its_word(old, value, new, taken):
    found, said = translated({old: value})
    assert (found[new], said.problems) == (taken, [])


def test_a_size_over_all_ranks_is_divided_by_them():
    """16 devices share 64 rows at a time, with 4 devices for each row."""
    sizes = {"data.micro_batch_size": 64, "trainer.nnodes": 2, "trainer.n_gpus_per_node": 8}
    found, said = translated({**sizes, "ulysses_sequence_parallel_size": 4})
    assert (found["data.micro_batch_size_per_gpu"], said.problems) == (16, [])


@pytest.mark.parametrize(
    ("more", "by_tokens"), [({}, False), ({"data.use_dynamic_bsz": True}, True), ({"model.path": "m"}, None)]
)
def test_the_earlier_trainer_takes_rows_at_a_time(more, by_tokens):
    """A line of sft_trainer, with model.path, fills by tokens unless it says otherwise."""
    path = {} if "model.path" in more else {"model.partial_pretrain": "m"}
    found, said = translated({**path, "data.micro_batch_size_per_gpu": 4, **more})
    assert found.get("data.use_dynamic_bsz") is by_tokens
    assert any("fsdp_sft_trainer" in note for note in said.notes) == (by_tokens is False)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trainer.resume_path", "x", "has no effect in verl either: verl's trainer never reads it"),
        ("engine.forward_prefetch", True, "has no effect: it changes speed only"),
        (
            "model.use_liger",
            True,
            "has no effect: norms, rotary embeddings and SwiGLU are kernels on every GPU here",
        ),
        (
            "optim.total_training_steps",
            9,
            "has no effect in verl either: verl overwrites it with the trainer's number of steps",
        ),
        ("data.pad_mode", "right", "has no effect: rows are packed without padding here"),
        ("trainer.default_hdfs_dir", None, "has no effect: it is off, or the default behaviour"),
        ("optim.optimizer", "AdamW", "has no effect: it is off, or the default behaviour"),
        ("data.enable_thinking_default", "none", "has no effect: it is off, or the default behaviour"),
    ],
)
def test_a_key_without_effect_is_accepted_and_said(key, value, said):
    _, found = translated({key: value})
    assert found.problems == []
    assert [problem.rule for problem in found.ignored] == [said]


@pytest.mark.parametrize(
    ("key", "value", "would", "instead"),
    [
        ("optim.optimizer", "Muon", "choose another optimizer than AdamW", ""),
        ("optim.min_lr", 1e-6, "configure Megatron's learning-rate schedule", " or optim.min_lr_ratio=..."),
        ("data.max_prompt_length", 512, "limit prompts and responses separately", " or data.max_length=..."),
        (
            "profiler.enable",
            True,
            "configure profiles",
            " or global_profiler.tool=torch global_profiler.steps=[2]",
        ),
        ("data.custom_cls.path", "my.py", "read the data with a user class", ""),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_what_it_would_do(key, value, would, instead):
    _, found = translated({key: value})
    [problem] = found.unsupported
    assert (problem.field, problem.rule) == (key, f"is not supported yet; in verl it would {would}")
    assert problem.remedy == f"leave out {key}{instead}"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("model.partial_pretrained", "model.partial_pretrain"),
        ("engine.ulysses_sequence_parallel", "engine.ulysses_sequence_parallel_size"),
        ("data.micro_batch_size_per_gp", "data.micro_batch_size_per_gpu"),
        ("actor_rollout_ref.rollout.n", None),  # of main_ppo
    ],
)
def test_a_misspelt_key_gets_a_suggestion(key, nearest):
    [problem] = legal.judged({key: 1}, SFTConfig).problems
    assert problem.rule == "unknown key"
    assert nearest is None or problem.remedy.startswith(f"{nearest}=1")


# --- engines and groups --------------------------------------------------


def test_the_words_for_verls_files_are_taken():
    words = ["engine=fsdp", "optim=fsdp", "model=hf_model", "optim.lr=1e-4", "engine.param_offload=True"]
    config, command = load_command("sft", SFTConfig, [*OWN, *words])
    assert (config.optim.lr, config.fsdp_config.param_offload) == (1e-4, True)
    with pytest.raises(ConfigError, match="engine=fdsp: must be fsdp"):
        load_command("sft", SFTConfig, [*OWN, "engine=fdsp"])
    with pytest.raises(ConfigError, match="optim=adam: is a group of keys, not a value"):
        load_command("sft", SFTConfig, [*OWN, "optim=adam"])


@pytest.mark.parametrize(
    ("words", "field", "remedy"),
    [
        (["engine=veomni", "engine.data_parallel_mode=fsdp2"], "engine", "engine=fsdp optim=fsdp"),
        (["engine.strategy=fsdp_turbo"], STRATEGY, "engine.strategy=fsdp2"),
    ],
)
def test_another_engine_is_refused_with_all_its_keys(words, field, remedy):
    with pytest.raises(ConfigError) as refused:
        load_command("sft", SFTConfig, [*OWN, *words])
    [problem] = refused.value.problems
    assert (problem.field, problem.rule) == (field, "there is no such training engine for main_sft here")
    changed, _, left_out = problem.remedy.partition(", and leave out ")
    assert changed == remedy
    kept = {word.partition("=")[0]: word for word in [*words, *remedy.split()]}
    load_command("sft", SFTConfig, [*OWN, *(kept[key] for key in kept if key not in left_out.split(", "))])


# --- command lines --------------------------------------------------


@pytest.mark.parametrize("name", verl_sft_commands.HONOURED)
def test_every_key_of_a_command_line_has_a_counterpart(name):
    words = verl_sft_commands.HONOURED[name]
    config, command = load_command("sft", SFTConfig, words, tolerant=True)
    groups = ("engine=", "optim=", "model=")
    assert command.unsupported == ()
    assert command.counts.honoured + command.counts.without_effect >= len(
        [word for word in words if not word.startswith(groups)]
    )
    plan = resolve_sft_plan(config, conversations=7473, devices_per_node=8)
    assert plan.total_steps > 0


@pytest.mark.parametrize("name", verl_sft_commands.REFUSED)
def test_what_the_others_need_is_named_at_once(name):
    words, refused = verl_sft_commands.REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        load_command("sft", SFTConfig, words)
    assert {problem.field for problem in caught.value.problems} == refused


def test_a_line_of_the_earlier_trainer_means_the_same():
    config, command = load_command("sft", SFTConfig, verl_sft_commands.MULTITURN_32B, tolerant=True)
    assert (config.data.train_batch_size, config.data.max_length, config.optim.lr) == (128, 16384, 1e-6)
    assert (config.data.micro_batch_size_per_gpu, config.data.use_dynamic_bsz) == (4, False)
    assert config.fsdp_config.offload_policy
    assert config.fsdp_config.ulysses_sequence_parallel_size == 8
    plan = resolve_sft_plan(config, conversations=2000, devices_per_node=8)
    assert (plan.role.data_ranks, plan.role.rows_per_rank, plan.role.accumulation_steps) == (1, 128, 32)
    assert any("verl gets it from torchrun" in note for note in command.notes)


def test_a_line_of_the_later_trainer_means_the_same():
    config, command = load_command("sft", SFTConfig, verl_sft_commands.ENGINE_E2E, tolerant=True)
    assert (config.optim.lr_scheduler_type, config.optim.min_lr_ratio, config.optim.betas) == (
        "cosine",
        0.1,
        [0.9, 0.95],
    )
    assert (config.fsdp_config.fsdp_size, config.trainer.test_freq) == (-1, "after_each_epoch")
    size = "fsdp_config.fsdp_size=8: more than the 2 devices, so the model is sharded over all of them"
    assert size in command.notes, "torchrun says how many there are, and is not part of the line"
    plan = resolve_sft_plan(config, conversations=1000, devices_per_node=8)
    assert (plan.role.micro.max_tokens, plan.total_steps, plan.steps_per_epoch) == (2048, 2, 7)


def test_every_default_of_verl_is_accepted():
    """A user who writes verl's own defaults on the command line asks for nothing special."""
    given = {key: value for key, value in defaults(SFTConfig).items() if value is not ...}
    assert [str(problem) for problem in translated(given)[1].problems] == []


def test_torchrun_is_left_out(monkeypatch):
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        load_command("sft", SFTConfig, OWN)
    assert [str(problem) for problem in refused.value.problems] == [
        "torchrun: has started this 16 times; start it once: it starts its own workers\n"
        "      -> python -m hydraflow.main_sft ... trainer.nnodes=2 trainer.n_gpus_per_node=8"
    ]
    load_command("sft", SFTConfig, OWN, tolerant=True)


# --- files --------------------------------------------------


def test_a_file_over_verls_defaults_composes(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [sft_trainer_engine, _self_]\nengine: {param_offload: true}\ndata: {max_length: 48}\n"
    )
    words = [*OWN, "engine=fsdp", "optim=fsdp"]
    done = here.call(tmp_path, "sft", "--config-dir", ".", "--config-name", "mine", *words)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)["config"]
    assert (seen["data"]["max_length"], seen["fsdp_config"]["param_offload"]) == (48, True)


def test_verls_own_file_means_the_defaults(tmp_path):
    done = here.call(tmp_path, "sft", "--config-name", "sft_trainer", *OWN)
    assert done.returncode == 0, done.stderr


def test_untouched_defaults_of_any_version_are_accepted_in_a_file():
    """What verl prints as its whole configuration, values that follow others left out."""
    given = {key: value for key, value in defaults(SFTConfig).items() if value is not ...}
    for pattern, default in tables(SFTConfig).other_defaults.items():
        given |= dict.fromkeys(expand(pattern), default)
    judged = legal.judged(given, SFTConfig, origin="mine.yaml")
    assert [str(problem) for problem in judged.problems] == []
    assert judged.translation.untouched["mine.yaml"] > 90
    assert len(judged.translation.notes) < 12, judged.translation.notes


def test_options_of_a_profiler_in_an_earlier_file_ask_for_nothing():
    """Version 0.7.1 has them in its file for supervised training."""
    section = "global_profiler.global_tool_config.nsys.worker_nsight_options"
    tree = {f"{section}.capture-range": "cudaProfilerApi", f"{section}.capture-range-end": None}
    judged = legal.judged(tree, SFTConfig, origin="mine.yaml")
    assert judged.problems == [] and judged.translation.untouched["mine.yaml"] == 2
