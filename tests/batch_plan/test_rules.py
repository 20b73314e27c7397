"""Broken rules: each names its key and its numbers, and remedies repair; all of them are reported at once."""

import pytest
from batch_plan.plans import ACTOR, ROLLOUT, broken, configured, resolve, small

from hydraflow.batch_plan.generate import resolve_generate_plan
from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.errors import ConfigError
from hydraflow.schema import GenerateConfig, PPOConfig


@pytest.mark.parametrize(
    ("values", "options", "field", "remedy"),
    [
        (
            dict(actor__ppo_mini_batch_size=24),
            {},
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ACTOR}.ppo_mini_batch_size=16",
        ),
        (
            dict(actor__ppo_mini_batch_size=128),
            {},
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ACTOR}.ppo_mini_batch_size=64",
        ),
        (dict(rollout__n=1), {"devices": 3}, f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n=3"),
        (
            dict(actor__ppo_micro_batch_size_per_gpu=5),
            {},
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            "_per_gpu=4 or ",
        ),
        (dict(actor__ppo_max_token_len_per_gpu=23), {}, f"{ACTOR}.ppo_max_token_len_per_gpu", "_per_gpu=24"),
        (dict(actor__optim__lr_warmup_steps=141), {}, f"{ACTOR}.optim.lr_warmup_steps", "lr_warmup_steps=14"),
        (
            dict(actor__optim__lr_warmup_steps_ratio=1.5),
            {},
            f"{ACTOR}.optim.lr_warmup_steps_ratio",
            "lr_warmup_steps_ratio=0.1",
        ),
        (dict(), {"prompts": 63}, "data.train_batch_size", "data.train_batch_size=32"),
        (
            dict(),
            {"prompts": 20},
            "data.train_batch_size",
            f"{ACTOR}.ppo_mini_batch_size=20 data.train_batch_size=20",
        ),
        (dict(rollout__n=0), {}, f"{ROLLOUT}.n", f"{ROLLOUT}.n=1"),
        (
            dict(rollout__name="vllm", rollout__max_model_len=20),
            {},
            f"{ROLLOUT}.max_model_len",
            "max_model_len=24",
        ),
        (
            dict(rollout__name="vllm", rollout__max_num_batched_tokens=512),
            {},
            f"{ROLLOUT}.max_num_batched_tokens",
            "tokens=1024",
        ),
        (dict(algorithm__filter_groups__enable=True, rollout__n=1), {}, f"{ROLLOUT}.n", f"{ROLLOUT}.n=2"),
        (
            dict(
                algorithm__filter_groups__enable=True,
                algorithm__filter_groups__max_num_gen_batches=2,
                data__gen_batch_size=16,
            ),
            {},
            "algorithm.filter_groups.max_num_gen_batches",
            "max_num_gen_batches=4",
        ),
        (
            dict(trainer__keep_groups=True, actor__ppo_micro_batch_size_per_gpu=4),
            {},
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            "_per_gpu=8 or ",
        ),
        (
            dict(trainer__keep_groups=True, actor__ppo_max_token_len_per_gpu=191),
            {},
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            "_per_gpu=192 or trainer.keep_groups=false",
        ),
        (
            dict(trainer__keep_groups=True, rollout__log_prob_micro_batch_size_per_gpu=12),
            {},
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            "_per_gpu=8 or ",
        ),
        (
            dict(trainer__keep_groups=True),
            {"devices": 64},
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ACTOR}.ppo_mini_batch_size=64 or trainer.keep_groups=false or trainer.n_gpus_per_node=32",
        ),
        (dict(async_training__require_batches=3), {}, "async_training.require_batches", "require_batches=2"),
    ],
)
def test_a_broken_rule_names_key_and_remedy(values, options, field, remedy):
    problems = broken(small(**values), **options)
    assert list(problems) == [field]
    assert remedy in problems[field].remedy


def test_a_step_that_no_mini_batch_fits():
    config = PPOConfig()
    config.algorithm.adv_estimator, config.data.train_batch_size = "grpo", 5
    problems = broken(config, origins={"data.train_batch_size": "command line"})
    assert list(problems) == ["data.train_batch_size"]
    assert problems["data.train_batch_size"].remedy.startswith(
        "data.train_batch_size=6 or data.train_batch_size=4"
    )


def test_a_decay_needs_a_step_after_the_warm_up():
    values = dict(trainer__total_training_steps=10, actor__optim__lr_warmup_steps=10)
    assert resolve(small(**values)).actor.warmup_steps == 10
    assert "linear decay" in str(
        broken(small(actor__optim__lr_scheduler_type="linear", **values)).popitem()[1]
    )


@pytest.mark.parametrize("role", ["actor", "critic", "ref", "rollout"])
def test_every_role_has_a_row_for_each_of_its_ranks(role):
    """ROLL: batch_size 32 < chunks 64, for each role: here 4 prompts and 8 devices of the one role."""
    lone = {"critic": "critic__device_mapping"}.get(role, f"{role}__device_mapping")
    others = {
        name: "0"
        for name in (
            "actor__device_mapping",
            "critic__device_mapping",
            "ref__device_mapping",
            "rollout__device_mapping",
        )
    }
    values = dict(
        data__train_batch_size=4,
        actor__ppo_mini_batch_size=4,
        rollout__n=1,
        critic__enable=True,
        actor__use_kl_loss=True,
    )
    problems = broken(small(**(others | {lone: "0-7"} | values)), devices=8)
    assert list(problems) == ["data.train_batch_size"]
    assert f"fewer than 8 data ranks of the {role}" in problems["data.train_batch_size"].rule


def test_without_chunks_a_forward_holds_a_prompt():
    config = small(rollout__name="vllm", rollout__max_num_seqs=8, rollout__max_num_batched_tokens=16)
    config.trainer.device = "cuda"
    assert resolve(config)
    config.actor_rollout_ref.rollout.enable_chunked_prefill = False
    assert "a whole row of 24 tokens" in broken(config)[f"{ROLLOUT}.max_num_batched_tokens"].rule


def test_on_a_cpu_a_forward_holds_a_row_unless_chunks_are_asked_for():
    key = f"{ROLLOUT}.max_num_batched_tokens"
    config = small(rollout__name="vllm", rollout__max_num_seqs=8, rollout__max_num_batched_tokens=23)
    config.trainer.device = "cpu"
    problem = broken(config)[key]
    assert f"24 tokens, because {ROLLOUT}.enable_chunked_prefill=null on a CPU" in problem.rule
    assert problem.remedy == f"{key}=24"
    config.actor_rollout_ref.rollout.enable_chunked_prefill = True
    assert resolve(config)


@pytest.mark.parametrize(
    ("values", "field", "remedy"),
    [
        (dict(max_model_len=20), "max_model_len", "rollout.max_model_len=24 or rollout.max_model_len=null"),
        (dict(max_num_batched_tokens=512), "max_num_batched_tokens", "rollout.max_num_batched_tokens=1024"),
        (
            dict(max_num_batched_tokens=16, max_num_seqs=8, enable_chunked_prefill=False),
            "max_num_batched_tokens",
            "rollout.max_num_batched_tokens=24",
        ),
    ],
)
def test_generation_alone_has_the_limits_too(values, field, remedy):
    config = configured(GenerateConfig, data__max_prompt_length=16, data__max_response_length=8)
    for key, value in {**values, "name": "vllm"}.items():
        setattr(config.rollout, key, value)
    with pytest.raises(ConfigError) as caught:
        resolve_generate_plan(config, prompts=None)
    assert [(problem.field, problem.remedy) for problem in caught.value.problems] == [
        (f"rollout.{field}", remedy)
    ]


def test_all_broken_rules_are_named_at_once():
    config = small(
        critic__enable=True,
        actor__ppo_mini_batch_size=24,
        critic__ppo_max_token_len_per_gpu=3,
        critic__ppo_micro_batch_size_per_gpu=5,
    )
    problems = broken(config, prompts=10)
    assert set(problems) == {
        f"{ACTOR}.ppo_mini_batch_size",
        "critic.ppo_micro_batch_size_per_gpu",
        "data.train_batch_size",
    }
    config.critic.use_dynamic_bsz = True
    assert "critic.ppo_max_token_len_per_gpu" in broken(config)


def test_first_remedies_of_rules_that_hang_together_are_one():
    """24 does not divide 64, and there are only 50 prompts: one step and one mini-batch fix both."""
    problems = broken(small(actor__ppo_mini_batch_size=24), prompts=50)
    first = {problem.remedy.split(" or ")[0] for problem in problems.values()}
    assert first == {"data.train_batch_size=48"}


def test_a_key_that_the_critic_takes_from_the_actor_is_reported_once():
    assert list(broken(small(actor__ppo_mini_batch_size=24, critic__enable=True))) == [
        f"{ACTOR}.ppo_mini_batch_size"
    ]


def test_values_that_the_checks_refuse_are_no_crash():
    config = small(
        rollout__name="x", rollout__temperature=-1.0, async_training__staleness_threshold=float("inf")
    )
    config.actor_rollout_ref.actor.optim.lr_warmup_steps_ratio = float("nan")
    assert resolve(config).asynchronous.stale_trajectories == 0


def test_micro_batches_of_whole_groups() -> None:
    """24 tokens a row: 100 rows fit 2,400 tokens, 12 groups of 8 do, and 8 of them divide 16 evenly."""
    budget = dict(actor__ppo_max_token_len_per_gpu=2400)
    plan = resolve(small(trainer__keep_groups=True, **budget))
    assert plan.actor.micro == MicroPlan(rows=64, max_tokens=None, whole_groups=True)
    assert plan.old_log_prob == MicroPlan(rows=96, max_tokens=None, whole_groups=True)
    [kept] = [one for one in plan.quantities if one.name == "kept together"]
    assert kept.value == 8
    dynamic = resolve(small(trainer__keep_groups=True, actor__use_dynamic_bsz=True, **budget))
    assert dynamic.actor.micro == MicroPlan(rows=None, max_tokens=2400, whole_groups=True)
    alone = resolve(
        small(trainer__keep_groups=True, rollout__n=1, algorithm__adv_estimator="remax", **budget)
    )
    assert not alone.actor.micro.whole_groups, "a group of one is a row"


def test_numbers_that_follow_keep_groups_whole() -> None:
    """Of 1,000 prompts on 8 ranks, 200 a mini-batch and not 250; in 4 micro-batches of whole groups."""
    config = configured(
        trainer__keep_groups=True,
        algorithm__adv_estimator="grpo",
        data__train_batch_size=1000,
        rollout__n=8,
        batch__gradient_accumulation_steps=5,
    )
    origins = {key: "command line" for key in ("data.train_batch_size", f"{ROLLOUT}.n")}
    plan = resolve(config, devices=8, origins=origins)
    assert plan.actor.mini_batch_prompts == 200
    assert plan.actor.micro == MicroPlan(rows=40, max_tokens=None, whole_groups=True)
    config.batch.gradient_accumulation_steps = 8
    problems = broken(config, devices=8, origins=origins)
    assert list(problems) == ["batch.gradient_accumulation_steps"]
    assert problems["batch.gradient_accumulation_steps"].remedy.startswith(
        "batch.gradient_accumulation_steps=5 "
    )
