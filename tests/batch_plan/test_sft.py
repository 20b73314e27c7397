"""The plan of supervised training, by hand."""

import json

import pytest
from batch_plan.plans import configured

from hydraflow.batch_plan.layout import ShapeNumbers
from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.batch_plan.sft import resolve_sft_plan
from hydraflow.errors import ConfigError
from hydraflow.schema import DPOConfig, RMConfig, SFTConfig


def sft(**values):
    base = dict(data__train_batch_size=24, data__max_length=100, data__max_token_len_per_gpu=550)
    return configured(SFTConfig, **(base | values))


def broken(config, **options):
    with pytest.raises(ConfigError) as caught:
        resolve_sft_plan(config, **options)
    return {problem.field: problem.remedy for problem in caught.value.problems}


def test_numbers_by_hand():
    plan = resolve_sft_plan(sft(), conversations=100)
    assert (plan.role.rows_per_rank, plan.steps_per_epoch, plan.total_steps) == (12, 4, 4)
    assert plan.role.micro == MicroPlan(rows=None, max_tokens=550)
    assert plan.notes == (
        "4 of 100 training conversations do not fill a step of 24: each epoch leaves that many out",
    )
    static = resolve_sft_plan(sft(data__use_dynamic_bsz=False), conversations=100)
    # 5 fit, 4 divide 12.
    assert (static.role.micro, static.role.accumulation_steps) == (MicroPlan(rows=4, max_tokens=None), 3)
    assert json.loads(plan.to_json())["conversations_per_step"] == 24


def test_steps_and_ranks_that_are_never_profiled():
    profiled = dict(
        global_profiler__tool="torch", global_profiler__steps=[2, 4], global_profiler__ranks=[0, 2]
    )
    plan = resolve_sft_plan(sft(**profiled), conversations=72)
    assert [note.partition(",")[0] for note in plan.notes] == [
        "global_profiler.steps=[4]: the run has 3 training steps",
        "global_profiler.ranks=[2]: ranks count from 0",
    ]
    assert resolve_sft_plan(sft(**profiled), conversations=96, devices_per_node=3).notes == ()


def test_ulysses_and_copies():
    config = sft(fsdp_config__ulysses_sequence_parallel_size=2, fsdp_config__fsdp_size=4)
    plan = resolve_sft_plan(config, conversations=100, devices_per_node=8)
    assert (plan.role.data_ranks, plan.role.rows_per_rank, plan.role.micro.max_tokens) == (4, 6, 1100)
    assert plan.layouts["model"].shard == 4
    shape = ShapeNumbers(layers=2, heads=3, kv_heads=3)
    assert list(broken(config, conversations=100, devices_per_node=8, shape=shape)) == [
        "fsdp_config.ulysses_sequence_parallel_size"
    ]


def test_all_broken_rules_are_named_at_once():
    config = sft(data__train_batch_size=9, data__max_token_len_per_gpu=50)
    with pytest.raises(ConfigError) as caught:
        resolve_sft_plan(config, conversations=8, devices_per_node=4)
    assert [problem.field for problem in caught.value.problems] == [
        "data.train_batch_size",
        "data.max_token_len_per_gpu",
        "data.train_batch_size",
    ]
    assert [problem.remedy.split(" or ")[0] for problem in caught.value.problems] == [
        "data.train_batch_size=8",
        "data.max_token_len_per_gpu=100",
        "data.train_batch_size=8",
    ]


@pytest.mark.parametrize(
    ("values", "key", "remedy"),
    [
        (dict(data__train_batch_size=0), "data.train_batch_size", "data.train_batch_size=256"),
        (
            dict(data__use_dynamic_bsz=False, data__micro_batch_size_per_gpu=5),
            "data.micro_batch_size_per_gpu",
            "_per_gpu=4",
        ),
        (dict(fsdp_config__fsdp_size=3), "fsdp_config.fsdp_size", "fsdp_config.fsdp_size=-1"),
        (dict(optim__lr_warmup_steps=100), "optim.lr_warmup_steps", "optim.lr_warmup_steps=1"),
    ],
)
def test_a_broken_rule_names_key_and_remedy(values, key, remedy):
    found = broken(sft(**values), conversations=256)
    assert list(found) == [key]
    assert remedy in found[key]


PAIRS = {"data__train_batch_size": 8, "data__max_length": 100, "trainer__n_gpus_per_node": 2}


def test_the_rows_of_a_pair_stay_together():
    by_tokens = resolve_sft_plan(configured(DPOConfig, **PAIRS), conversations=20).role
    assert (by_tokens.mini_batch_prompts, by_tokens.mini_batch_trajectories) == (8, 16)
    assert by_tokens.rows_per_rank == 8
    assert by_tokens.micro == MicroPlan(rows=None, max_tokens=8192, unit=2)
    given = {"data__use_dynamic_bsz": False, "data__micro_batch_size_per_gpu": 2}  # pairs
    fixed = resolve_sft_plan(configured(DPOConfig, **PAIRS, **given), conversations=20).role
    assert (fixed.micro, fixed.accumulation_steps) == (MicroPlan(rows=4, max_tokens=None, unit=2), 2)


@pytest.mark.parametrize(("schema", "least"), [(DPOConfig, 200), (RMConfig, 202)])
def test_a_micro_batch_holds_the_longest_pair(schema, least):
    """A reward model's rows end with a token more."""
    resolve_sft_plan(configured(schema, **PAIRS, data__max_token_len_per_gpu=least), conversations=20)
    with pytest.raises(ConfigError, match=f"data.max_token_len_per_gpu={least}"):
        resolve_sft_plan(configured(schema, **PAIRS, data__max_token_len_per_gpu=least - 1), conversations=20)


def test_pairs_are_called_pairs():
    with pytest.raises(ConfigError, match="pairs cannot be shared equally by 2 data ranks"):
        resolve_sft_plan(configured(DPOConfig, **PAIRS | {"data__train_batch_size": 7}), conversations=20)
