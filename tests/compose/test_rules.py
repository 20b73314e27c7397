"""Values that a type cannot judge."""

import math
import re
from dataclasses import fields

import pytest
from compose.legal import put, valid

from hydraflow.algorithms.config import (
    ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
)
from hydraflow.algorithms.distillation.config import DIVERGENCES, DistillationLossConfig
from hydraflow.compose.keys import known_keys
from hydraflow.compose.rules import problems
from hydraflow.engine.config import TRAIN_ENGINES, OptimConfig
from hydraflow.generation.config import GENERATION_ENGINES
from hydraflow.options import option_of
from hydraflow.schema import DPOConfig, EvalConfig, GenerateConfig, PPOConfig, SFTConfig
from hydraflow.trainer.config import LOGGERS
from hydraflow.workers.config import ActorConfig

DEBUG, ROLLOUT = "trainer.debug", "actor_rollout_ref.rollout"


def test_the_defaults_are_legal():
    sft, generate, evaluate = SFTConfig(), GenerateConfig(), EvalConfig()
    sft.model.path, sft.data.train_files = "model", "data.jsonl"
    generate.model.path, generate.data.path, generate.output.path = "model", "in.parquet", "out.parquet"
    evaluate.data.path = "out.parquet"
    assert [problems(config) for config in (valid(), sft, generate, evaluate)] == [[], [], [], []]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("actor_rollout_ref.actor", "loss_agg_mode", "token_mean"),
        ("actor_rollout_ref.actor", "kl_loss_type", "k4"),
        ("actor_rollout_ref.actor", "clip_ratio_c", 1.0),
        ("actor_rollout_ref.actor.optim", "lr", -1e-6),
        ("actor_rollout_ref.actor.optim", "betas", [0.9]),
        ("actor_rollout_ref.actor.optim", "betas", [0.9, 1.0]),
        ("actor_rollout_ref.actor.fsdp_config", "model_dtype", "auto"),
        ("actor_rollout_ref.rollout", "temperature", -0.1),
        ("actor_rollout_ref.rollout", "temperature", 1e-38),
        ("actor_rollout_ref.rollout", "stop_token_ids", [-3]),
        ("actor_rollout_ref.rollout.val_kwargs", "stop_token_ids", [2**70]),
        ("actor_rollout_ref.actor", "ppo_epochs", -(10**400)),
        ("trainer", "max_wall_time", 10**400),
        ("actor_rollout_ref.rollout", "temperature", math.inf),
        ("actor_rollout_ref.rollout", "temperature", math.nan),
        ("actor_rollout_ref.rollout.val_kwargs", "temperature", math.inf),
        ("actor_rollout_ref.rollout", "top_k", 0),
        ("actor_rollout_ref.rollout", "top_p", 1.1),
        ("actor_rollout_ref.model", "target_modules", []),
        ("data", "truncation", "centre"),
        ("data", "train_files", [1]),
        ("trainer", "nnodes", 0),
        ("trainer", "logger", ["console", "wand"]),
        ("trainer", "wandb_proxy", "host:3128"),
        ("trainer", "wandb_proxy", "http://host"),
        ("trainer", "test_freq", 0),
        ("trainer", "save_freq", 0),
        ("trainer", "resume_mode", "always"),
        ("trainer", "max_restarts", -1),
        ("trainer", "max_actor_ckpt_to_keep", 0),
        ("actor_rollout_ref.actor.checkpoint", "save_contents", ["optimizer"]),
        ("actor_rollout_ref.actor.checkpoint", "load_contents", ["model", "hf_model"]),
        ("reward", "timeout", 0.0),
        ("reward", "timeout", math.inf),
        ("reward", "num_workers", -1),
        ("reward", "num_workers", 10**20),
        ("data", "apply_chat_template_kwargs", {"padding": True}),
        ("reward", "failure_score", math.nan),
        ("reward", "max_memory", 0.0),
        ("reward", "max_failed_share", 1.5),
        ("log", "level", "loud"),
        ("log", "console", "INFO"),
        ("log", "max_megabytes", 0.0),
        ("log", "keep", -1),
        ("global_profiler", "ranks", []),
        ("ray_init.runtime_env", "env_vars", {"A": True}),
        ("ray_init.runtime_env", "env_vars", {"A": None}),
        ("ray_init.runtime_env", "env_vars", {"A=B": "c"}),
        ("algorithm", "gamma", 1.5),
        ("actor_rollout_ref.actor", "entropy_coeff", math.nan),
        ("actor_rollout_ref.actor.optim", "lr", math.inf),
        ("actor_rollout_ref.actor.optim", "clip_grad", 0.0),
    ],
)
def test_an_illegal_value_is_named(section, name, value):
    config = valid()
    put(config, f"{section}.{name}", value)
    assert [problem.field for problem in problems(config)] == [f"{section}.{name}"]


def test_a_number_without_an_upper_limit_is_still_finite():
    config = valid()
    config.actor_rollout_ref.actor.optim.lr = math.inf
    config.actor_rollout_ref.actor.optim.clip_grad = math.inf  # means: never clip
    assert [(problem.field, problem.rule) for problem in problems(config)] == [
        ("actor_rollout_ref.actor.optim.lr", "must be finite")
    ]


def test_choices_are_those_that_the_code_offers():
    """The configuration loads no torch; where it has names only, they are those of the code's tables."""
    from hydraflow.algorithms import aggregate, kl
    from hydraflow.engine import optim
    from hydraflow.tracking import trackers

    offered = {
        (ActorConfig, "loss_agg_mode"): aggregate.LOSS_AGG_MODES,
        (ActorConfig, "kl_loss_type"): kl.KL_ESTIMATORS,
        (DistillationLossConfig, "loss_mode"): kl.KL_ESTIMATORS | DIVERGENCES,
        (OptimConfig, "lr_scheduler_type"): optim.SCHEDULES,
    }
    for (owner, name), choices in offered.items():
        rule = next(option_of(field).rule for field in fields(owner) if field.name == name)
        assert rule is not None and set(rule.choices) == set(choices), f"{owner.__name__}.{name}"
    assert set(LOGGERS) == set(trackers.TRACKERS)


@pytest.mark.parametrize(
    ("table", "schema"),
    [
        (ESTIMATORS, PPOConfig),
        (POLICY_LOSSES, PPOConfig),
        (PREFERENCE_LOSSES, DPOConfig),
        (DIVERGENCES, PPOConfig),
        (TRAIN_ENGINES, PPOConfig),
        (GENERATION_ENGINES, PPOConfig),
    ],
)
def test_a_named_choice_has_code_or_is_planned_and_reads_keys_that_there_are(table, schema):
    keys = {key.rpartition(".")[2] for key in known_keys(schema)}
    for name, named in table.items():
        assert callable(named.load()) if named.where else named.planned, name
        assert set(named.all_reads) <= keys, name


def test_nulls_that_a_type_allows_are_legal():
    config = valid()
    config.actor_rollout_ref.actor.clip_ratio_low = config.trainer.n_gpus_per_node = config.critic.enable = (
        None
    )
    assert problems(config) == []


def test_keys_of_the_actors_loss_that_depend_on_each_other():
    config, key = valid(), "actor_rollout_ref.actor"
    actor = config.actor_rollout_ref.actor
    actor.policy_loss.loss_mode = "dro"
    assert [problem.field for problem in problems(config)] == [f"{key}.policy_loss.dro_beta"]
    actor.policy_loss.dro_beta = 0.1
    actor.policy_loss.loss_mode, actor.policy_loss.clip_cov_lb = "clip_cov", 5.0
    assert [problem.field for problem in problems(config)] == [f"{key}.policy_loss.clip_cov_lb"]
    actor.policy_loss.clip_cov_ub = 6.0
    assert problems(config) == []
    actor.policy_loss.loss_mode, actor.policy_loss.tis_lower_bound = "tis", 1.0
    assert [problem.field for problem in problems(config)] == [f"{key}.policy_loss.tis_lower_bound"]
    actor.policy_loss.tis_upper_bound = 2.0
    actor.policy_loss.loss_mode, actor.policy_loss.rec_epsilon_low_prime = "rec", 0.1
    assert problems(config) == [], "only the ring reads it"
    actor.policy_loss.rec_clip_mode, actor.clip_ratio_high = "ring", 3.0
    names = [f"{key}.policy_loss.rec_epsilon_{side}_prime" for side in ("low", "high")]
    assert [problem.field for problem in problems(config)] == names
    actor.clip_ratio_high, actor.policy_loss.rec_epsilon_low_prime = 0.2, 0.6
    actor.adaptive_entropy.min_ent_coef = 1.0
    assert problems(config) == [], "it is not enabled"
    actor.adaptive_entropy.enabled = True
    assert [problem.field for problem in problems(config)] == [f"{key}.adaptive_entropy.min_ent_coef"]
    actor.adaptive_entropy.min_ent_coef, config.algorithm.adv_estimator = 0.0, "optimal_token_baseline"
    assert [problem.field for problem in problems(config)] == [f"{key}.adaptive_entropy.enabled"]


@pytest.mark.parametrize(
    ("parts", "refused"), [(["moe"], True), ("moe", True), (["moe_act"], False), (3, False)]
)
def test_experts_that_are_computed_again_alone_cannot_be_replayed(parts: object, refused: bool) -> None:
    config = valid()
    actor = config.actor_rollout_ref.actor
    actor.strategy, actor.router_replay.mode = "megatron", "R2"
    actor.megatron.override_transformer_config = {"recompute_modules": parts}
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_modules"
    assert [problem.field for problem in problems(config)] == [key] * refused


def test_a_dist_checkpoint_has_a_path() -> None:
    config, key = valid(), "actor_rollout_ref.actor.megatron.dist_checkpointing_path"
    config.actor_rollout_ref.actor.megatron.use_dist_checkpointing = True
    assert problems(config) == []  # FSDP2 does not read it
    config.actor_rollout_ref.actor.strategy = "megatron"
    [problem] = problems(config)
    assert problem.field == key and "must be given" in problem.rule
    put(config, key, "/checkpoint")
    assert problems(config) == []


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        (f"{ROLLOUT}.temperature", 0.0, f"{ROLLOUT}.temperature"),
        ("critic.enable", False, "critic.enable"),
        (f"{ROLLOUT}.val_kwargs.do_sample", True, f"{ROLLOUT}.val_kwargs.temperature"),
        ("trainer.val_only", True, "data.val_files"),
        ("data.train_files", None, "data.train_files"),
    ],
)
def test_fields_that_depend_on_each_other(key, value, field):
    config = valid()
    put(config, key, value)
    assert [problem.field for problem in problems(config)] == [field]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"debug": True}, []),
        ({"debug": True, "trainer.n_gpus_per_node": 2}, ["trainer.n_gpus_per_node"]),
        (
            {f"{DEBUG}.local": True, "trainer.nnodes": 2, "trainer.n_gpus_per_node": 4},
            ["trainer.nnodes", "trainer.n_gpus_per_node"],
        ),
        ({f"{DEBUG}.local": True, "debug": True}, ["debug"]),
        ({f"{DEBUG}.local": True, f"{ROLLOUT}.nnodes": 1}, [f"{ROLLOUT}.nnodes"]),
        ({f"{DEBUG}.train_only": True}, [f"{DEBUG}.load_rollouts"]),
        ({f"{DEBUG}.train_only": True, f"{DEBUG}.load_rollouts": "dump"}, []),
        (
            {f"{DEBUG}.train_only": True, f"{DEBUG}.load_rollouts": "dump", f"{DEBUG}.rollout_only": True},
            [f"{DEBUG}.rollout_only", f"{DEBUG}.load_rollouts"],
        ),
        ({f"{DEBUG}.save_rollouts": "dump", f"{DEBUG}.load_rollouts": "dump"}, [f"{DEBUG}.save_rollouts"]),
        (
            {f"{DEBUG}.rollout_only": True, "trainer.keep_best": "x", "data.val_files": "val.parquet"},
            ["trainer.keep_best"],
        ),
        (
            {
                f"{DEBUG}.rollout_only": True,
                "trainer.resume_mode": "resume_path",
                "trainer.resume_from_path": "run/global_step_2",
            },
            ["trainer.resume_mode"],
        ),
        (
            {f"{DEBUG}.save_rollouts": "dump", "trainer.val_only": True, "data.val_files": "val.parquet"},
            ["trainer.val_only"],
        ),
        ({"global_profiler.tool": "torch"}, ["global_profiler.steps"]),
        ({"global_profiler.tool": "npu", "global_profiler.steps": [1]}, ["global_profiler.tool"]),
        ({"global_profiler.tool": "torch", "global_profiler.steps": []}, ["global_profiler.steps"]),
        ({"global_profiler.tool": "torch", "global_profiler.steps": [0]}, ["global_profiler.steps"]),
        (
            {"global_profiler.tool": "nsys", "global_profiler.steps": [1], f"{DEBUG}.local": True},
            ["global_profiler.tool"],
        ),
    ],
)
def test_debugging_keys_fit_each_other(given, found):
    config = valid()
    for key, value in given.items():
        put(config, key, value)
    reported = problems(config)
    assert [problem.field for problem in reported] == found
    assert all(problem.remedy for problem in reported)


def test_a_critic_warm_up_needs_a_critic():
    config = valid()
    config.trainer.critic_warmup = 2
    assert problems(config) == []
    config.algorithm.adv_estimator = "grpo"
    assert [problem.field for problem in problems(config)] == ["trainer.critic_warmup"]


def test_a_recipe_takes_no_files_of_the_users():
    config = valid()
    config.data.val_files, config.recipe.name = "val.parquet", "arithmetic"
    found = problems(config)
    assert [problem.field for problem in found] == [
        "actor_rollout_ref.model.path",
        "data.train_files",
        "data.val_files",
    ]
    assert "recipe=arithmetic makes its own" in found[0].rule and "recipe=none" in found[0].remedy
    config.actor_rollout_ref.model.path = config.data.train_files = config.data.val_files = None
    assert problems(config) == []


def test_checkpoint_keys_fit_each_other():
    config = valid()
    config.trainer.resume_mode, config.trainer.keep_best = "resume_path", "val-core/sums/acc/mean@1"
    config.critic.checkpoint.save_contents = ["model"]
    found = {problem.field: problem.remedy for problem in problems(config)}
    assert found == {
        "trainer.resume_from_path": "trainer.resume_from_path=.../global_step_N or trainer.resume_mode=auto",
        "critic.checkpoint.load_contents": "critic.checkpoint.load_contents=[model]",
        "trainer.keep_best": "data.val_files=... or trainer.keep_best=null",
    }


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "actor_rollout_ref.rollout.n",
            0,
            "rollout.n=0: must be at least 1\n      -> leave out actor_rollout_ref.rollout.n",
        ),
        (
            "trainer.n_gpus_per_node",
            0,
            "trainer.n_gpus_per_node=0: must be at least 1\n      -> trainer.n_gpus_per_node=null",
        ),
        ("algorithm.gamma", 7, "algorithm.gamma=7: must be from 0 to 1\n      -> algorithm.gamma=1.0"),
        ("actor_rollout_ref.actor.optim.betas", [2, 3], "betas=[2,3]: must be two numbers from 0 to below 1"),
        ("data.train_files", ["a", 3], "data.train_files=[a,3]: must be a file or a list of files"),
        ("data.train_files", "", "data.train_files=: must be a file or a list of files"),
    ],
)
def test_a_remedy_is_legal(key, value, said):
    config = PPOConfig()
    put(config, key, value)
    (problem,) = problems(config, planning=True)
    assert said in str(problem)
    assert problem.remedy.startswith((f"{key}=", f"leave out {key}"))


@pytest.mark.parametrize("again", ["out", "./out", "out/", "../{here}/out"])
def test_two_dumps_in_one_folder_are_refused(again, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = valid()
    config.trainer.rollout_data_dir, config.trainer.validation_data_dir = (
        "out",
        again.format(here=tmp_path.name),
    )
    [problem] = problems(config)
    assert (problem.field, problem.remedy) == (
        "trainer.validation_data_dir",
        "trainer.validation_data_dir=out-val",
    )


@pytest.mark.parametrize(
    ("engine", "name"),
    [(engine, name) for engine, facts in GENERATION_ENGINES.items() for name in facts.set_elsewhere],
)
def test_what_the_trainer_tells_an_engine_cannot_be_given_again(engine, name):
    config, generate = valid(), GenerateConfig()
    for rollout in (config.actor_rollout_ref.rollout, generate.rollout):
        rollout.name = engine
        setattr(rollout.engine_kwargs, engine, {name: 1, "block_size": 32})
    assert [problem.field for problem in problems(config)] == [f"{ROLLOUT}.engine_kwargs.{engine}.{name}"]
    found = {one.field: one for one in problems(generate)}[f"rollout.engine_kwargs.{engine}.{name}"]
    assert "actor_rollout_ref" not in str(found)
    remedy = found.remedy.removesuffix("=...").removeprefix("leave out ")
    assert remedy == found.field or remedy in known_keys(GenerateConfig)


def test_a_refused_argument_of_vllm_says_which_key_sets_it():
    config = valid()
    key = f"{ROLLOUT}.engine_kwargs.vllm"
    config.actor_rollout_ref.rollout.engine_kwargs.vllm = {"dtype": "half", "logprobs_mode": "raw_logits"}
    first, second = map(str, problems(config))
    assert first == f"{key}.dtype=half: is set by {ROLLOUT}.dtype\n      -> {ROLLOUT}.dtype=..."
    assert "is set by the trainer: softmax(logits / temperature) before top-k and top-p" in second
    assert second.endswith(f"-> leave out {key}.logprobs_mode")


@pytest.mark.parametrize(
    ("key", "value", "also"),
    [
        (f"{ROLLOUT}.temperature", 0.005, {}),
        (f"{ROLLOUT}.val_kwargs.temperature", 0.005, {f"{ROLLOUT}.val_kwargs.do_sample": True}),
        (f"{ROLLOUT}.dtype", "fp64", {}),
        (f"{ROLLOUT}.dtype", "auto", {"actor_rollout_ref.actor.fsdp_config.dtype": "fp64"}),
        (f"{ROLLOUT}.dtype", "auto", {"actor_rollout_ref.actor.fsdp_config.model_dtype": "fp64"}),
        (f"{ROLLOUT}.name", "vllm", {f"{DEBUG}.local": True}),
    ],
)
def test_what_vllm_does_not_do_is_refused(key, value, also):
    config = valid()
    for one, given in {**also, key: value}.items():
        put(config, one, given)
    put(config, f"{ROLLOUT}.name", "native")
    assert problems(config) == []
    put(config, f"{ROLLOUT}.name", "vllm")
    assert [problem.field for problem in problems(config)] == [key]


@pytest.mark.parametrize(
    ("engine", "devices", "said"),
    [
        ("native", 1, "rollout.name=native samples from merged weights only"),
        ("sglang", 1, "rollout.name=sglang samples from merged weights only"),
        ("vllm", 2, "adapters are not sharded, but .*tensor_model_parallel_size=2 shards the weights"),
        ("vllm", 1, None),
    ],
)
def test_adapters_go_to_an_engine_that_loads_them(engine, devices, said):
    config, key = valid(), "actor_rollout_ref.model.lora.merge"
    put(config, f"{ROLLOUT}.name", engine)
    put(config, f"{ROLLOUT}.tensor_model_parallel_size", devices)
    put(config, key, False)
    assert [one for one in problems(config, planning=True) if one.field == key] == [], "it has no effect"
    config.actor_rollout_ref.model.lora_rank = 4
    found = [one for one in problems(config, planning=True) if one.field == key]
    assert len(found) == (said is not None)
    assert all(re.search(said, one.rule) and one.remedy.startswith(f"{key}=true or") for one in found)
    put(config, key, True)
    assert [one for one in problems(config, planning=True) if one.field == key] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ROLLOUT}.temperature", 1e-7),
        (f"{ROLLOUT}.dtype", "fp64"),
        (f"{DEBUG}.local", True),
    ],
)
def test_what_sglang_does_not_do_is_refused(key, value):
    config = valid()
    put(config, f"{ROLLOUT}.name", "sglang")
    assert problems(config) == []
    put(config, key, value)
    [problem] = problems(config)
    assert problem.field in (key, f"{ROLLOUT}.name")


def test_fp16_is_for_frozen_models() -> None:
    config = PPOConfig()
    config.recipe.name = "arithmetic"
    config.actor_rollout_ref.ref.fsdp_config.dtype = "fp16"
    assert list(problems(config)) == []
    for name in ("dtype", "reduce_dtype"):
        setattr(config.actor_rollout_ref.actor.fsdp_config, name, "fp16")
    config.critic.fsdp_config.dtype = "fp16"  # there is no critic
    config.algorithm.adv_estimator = "grpo"
    key = "actor_rollout_ref.actor.fsdp_config"
    assert [problem.remedy for problem in problems(config)] == [
        f"{key}.dtype=bf16",
        f"{key}.reduce_dtype=fp32",
    ]
    config.trainer.val_only = True
    assert list(problems(config)) == []
    supervised = SFTConfig()
    supervised.model.path, supervised.data.train_files = "m", "d"
    supervised.fsdp_config.model_dtype = "fp16"
    assert [problem.remedy for problem in problems(supervised)] == ["fsdp_config.model_dtype=fp32"]
