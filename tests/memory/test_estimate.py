"""Whole reports: devices by their roles, phases, machines, and advice that really makes a run fit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
from batch_plan import plans
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.published import PUBLISHED

from hydraflow.batch_plan.layout import Layout
from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.batch_plan.settings import with_value
from hydraflow.engine.config import MegatronConfig
from hydraflow.memory.activations import MicroBatchTokens
from hydraflow.memory.estimate import PROCESS_BYTES, estimate
from hydraflow.memory.limits import limits_of
from hydraflow.memory.megatron import MegatronModelMemory
from hydraflow.memory.report import MemoryReport, size_text
from hydraflow.memory.shape import ModelShape, shape_of
from hydraflow.schema import PPOConfig

GIB = 2**30
QWEN_7B, QWEN_HALF_B, QWEN_30B_A3B = (
    shape_of(PUBLISHED[name][1]) for name in ("Qwen2.5-7B", "Qwen2.5-0.5B", "Qwen3-30B-A3B")
)
POLICY = "actor_rollout_ref"


def configured(**changes: Any) -> PPOConfig:
    """GRPO on one machine with eight devices of 80 GiB; `changes` by dotted key, with __ for dots."""
    defaults: dict[str, Any] = {
        "algorithm__adv_estimator": "grpo",
        "cluster__device": "H100",
        "cluster__devices_per_node": 8,
        "cluster__device_memory_gib": 80.0,
        "cluster__host_memory_gib": 2048.0,
        "trainer__n_gpus_per_node": 8,
        "rollout__n": 8,
        "rollout__name": "vllm",
    }
    return plans.configured(**defaults | changes)


def report_of(config: PPOConfig, shape: ModelShape = QWEN_7B) -> MemoryReport:
    return estimate(resolve_plan(config, prompts=None), config, shape, limits=limits_of(config))


def overridden(config: PPOConfig, override: str) -> PPOConfig:
    """Another configuration with one override of the command line."""
    key, text = override.split("=")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return with_value(config, key, value)


def test_weights_and_optimizer_of_7b_on_8_devices() -> None:
    """float32 weights and two moments, an eighth each; the generation engine half of the device while it
    samples."""
    report = report_of(configured())
    actor, rollout = report.roles
    assert actor.resting.weights == 4 * -(-QWEN_7B.parameters // 8)
    assert actor.resting.optimizer == pytest.approx(2 * actor.resting.weights, abs=8)
    assert rollout.total == 40 * GIB
    (group,) = report.groups
    assert (group.devices, group.count, group.roles) == ("0-7", 8, ("actor", "rollout"))
    assert group.phases["sample"] == 40 * GIB + actor.resting.total
    assert group.phases["update"] == actor.phases["update"].total  # vLLM sleeps
    assert report.fits


@pytest.mark.parametrize(
    ("shape", "gpus", "offloads", "one_unit"),
    [
        (QWEN_HALF_B, 1, False, True),
        (QWEN_HALF_B, 2, False, False),
        (QWEN_HALF_B, 1, True, False),
        (QWEN_7B, 1, False, False),
    ],
)
def test_on_a_gpu_alone_a_small_model_is_one_unit(
    shape: ModelShape, gpus: int, offloads: bool, one_unit: bool
) -> None:
    def peak(least: int | None) -> int:
        config = configured(
            trainer__n_gpus_per_node=gpus,
            cluster__devices_per_node=gpus,
            actor__fsdp_config__offload_policy=offloads,
            actor__fsdp_config__wrap_policy__min_num_params=least,
        )
        return report_of(config, shape).roles[0].phases["update"].total

    layers, whole = peak(0), peak(10**12)
    assert layers < whole
    assert peak(None) == (whole if one_unit else layers)


def test_loading_reads_the_model_once_per_machine_and_in_float32() -> None:
    host = report_of(configured()).host
    assert host.load == 4 * QWEN_7B.parameters
    assert host.total == host.load + 8 * PROCESS_BYTES
    assert "rank 0" in host.load_text


def test_rewards_advantages_and_returns_of_all_rows_are_on_the_first_machine() -> None:
    """Two numbers of 8 bytes and five of 4 for each of 512 tokens, one of 8 for those of the prompt."""
    sizes = {"data__train_batch_size": 4, "data__max_prompt_length": 100, "data__max_response_length": 512}
    one = report_of(configured(**sizes)).host
    two = report_of(configured(**sizes, trainer__nnodes=2)).host
    assert one.rows == 32 * (8 * 100 + (16 + 5 * 4) * 512)
    assert two.rows == 16 * (8 * 100 + (16 + 2 * 4) * 512) + 32 * 3 * 4 * 512


def test_a_reference_and_a_critic_add_a_number_of_four_bytes_each() -> None:
    sizes = {"data__train_batch_size": 4, "data__max_prompt_length": 100, "data__max_response_length": 512}
    plain = report_of(configured(**sizes)).host.rows
    reference = {"actor__use_kl_loss": True}
    assert report_of(configured(**sizes, **reference)).host.rows == plain + 32 * 4 * 512
    both = configured(**sizes, **reference, algorithm__adv_estimator="gae")
    assert report_of(both).host.rows == plain + 32 * 2 * 4 * 512


def test_two_buckets_of_weights_stay_on_the_first_machine_where_the_rollout_is_another_process() -> None:
    """Of 100 MiB; or all weights, in 2 bytes, where buckets are larger; of 16 MiB for an engine that takes
    parts of weights. A single GPU has them itself."""
    small = {"rollout__update_weights_bucket_megabytes": 100}
    large = {"rollout__update_weights_bucket_megabytes": 10**6}
    native = {"rollout__name": "native"}
    alone = {"trainer__n_gpus_per_node": 1, "cluster__devices_per_node": 1}
    assert report_of(configured(**small)).host.slots == 200 * 2**20
    assert report_of(configured(**large)).host.slots == 2 * QWEN_7B.parameters
    assert report_of(configured(**small, **native)).host.slots == 0
    assert report_of(configured(**small, **native, trainer__fuse_roles=False)).host.slots == 32 * 2**20
    one = report_of(configured(**small, **alone))
    actor = next(role for role in one.roles if role.role == "actor")
    before = next(role for role in report_of(configured(**small)).roles if role.role == "actor")
    assert one.host.slots == 0 and before.phases["sync"].weight_sync < actor.phases["sync"].weight_sync


def test_roles_of_one_process_load_one_after_another() -> None:
    with_reference = report_of(configured(actor__use_kl_loss=True))
    assert [role.role for role in with_reference.roles] == ["actor", "ref", "rollout"]
    assert with_reference.host.load == report_of(configured()).host.load


def test_disaggregated_devices_are_groups_of_their_own() -> None:
    sizes = dict(data__train_batch_size=192, actor__ppo_mini_batch_size=96)
    mappings = dict(actor__device_mapping="0-5", rollout__device_mapping="6-7")
    report = report_of(configured(**sizes, **mappings))
    assert [(group.devices, group.roles) for group in report.groups] == [
        ("0-5", ("actor",)),
        ("6-7", ("rollout",)),
    ]
    assert "update" not in report.groups[1].phases and "sample" not in report.groups[0].phases
    assert report.groups[1].phases["sample"] == 40 * GIB


def test_overlapping_devices_hold_both_where_they_overlap() -> None:
    sizes = dict(data__train_batch_size=192, actor__ppo_mini_batch_size=96)
    mappings = dict(actor__device_mapping="0-5", rollout__device_mapping="4-7")
    report = report_of(configured(**sizes, **mappings))
    assert [(group.devices, group.roles) for group in report.groups] == [
        ("0-3", ("actor",)),
        ("4-5", ("actor", "rollout")),
        ("6-7", ("rollout",)),
    ]


def test_offloaded_moments_are_on_the_host() -> None:
    plain = report_of(configured())
    moved = report_of(configured(actor__fsdp_config__optimizer_offload=True))
    freed = plain.groups[0].phases["sample"] - moved.groups[0].phases["sample"]
    assert freed == plain.roles[0].resting.optimizer
    assert moved.host.offload == 8 * plain.roles[0].resting.optimizer


def test_offloaded_weights_leave_the_device_to_the_other_roles() -> None:
    """Two roles rest while others sample, and one of them while the other works; its own passes need all of
    its weights."""
    rest = dict(actor__fsdp_config__param_offload=True, ref__fsdp_config__param_offload=True)
    plain = report_of(configured(actor__use_kl_loss=True))
    moved = report_of(configured(actor__use_kl_loss=True, **rest))
    weights = plain.roles[0].resting.weights
    saved = {name: size - moved.groups[0].phases[name] for name, size in plain.groups[0].phases.items()}
    assert saved == {"sample": 2 * weights, "log_probs": weights, "update": weights, "sync": weights}
    assert moved.host.offload == 8 * 2 * weights
    assert [role.phases for role in moved.roles[1:]] == [role.phases for role in plain.roles[1:]]


@pytest.mark.parametrize(
    ("engine", "section", "names"),
    [
        ("fsdp2", "fsdp_config", ("param_offload", "offload_policy", "optimizer_offload")),
        ("megatron", "megatron", ("param_offload", "grad_offload", "optimizer_offload")),
    ],
)
def test_offloading_on_a_cpu_moves_nothing(engine: str, section: str, names: tuple[str, ...]) -> None:
    keys = {
        "cluster__device": "cpu",
        "cluster__device_memory_gib": None,
        "rollout__name": "native",
        "actor__strategy": engine,
    }
    plain = report_of(configured(**keys))
    for key in names:
        moved = report_of(configured(**keys, **{f"actor__{section}__{key}": True}))
        assert plain.groups == moved.groups
        assert plain.host.offload == moved.host.offload == 0
    assert plain.host.running == 8 * plain.groups[0].peak


def test_hybrid_sharding_holds_more() -> None:
    config = configured(actor__fsdp_config__fsdp_size=4)
    assert report_of(config).roles[0].resting.weights == 4 * -(-QWEN_7B.parameters // 4)


def test_accumulation_holds_gradients_unsharded() -> None:
    """Said by a number that users of FSDP do not expect: 28 GiB of gradients on every device."""
    one = report_of(configured(actor__ppo_mini_batch_size=8, actor__ppo_micro_batch_size_per_gpu=8))
    many = report_of(configured(actor__ppo_micro_batch_size_per_gpu=8))
    whole, sharded = (report.roles[0].phases["update"].gradients for report in (many, one))
    assert whole > 4 * QWEN_7B.parameters > sharded


def test_lora_trains_little() -> None:
    report = report_of(configured(actor_rollout_ref__model__lora_rank=16, actor__use_kl_loss=True))
    actor = report.roles[0]
    # The reference policy is the actor without its adapters.
    assert [role.role for role in report.roles] == ["actor", "rollout"]
    assert actor.resting.optimizer < actor.resting.weights / 50


MEGATRON = {
    "actor__strategy": "megatron",
    "rollout__tensor_model_parallel_size": 4,
    "trainer__nnodes": 64,
    "cluster__nodes": 64,
    "data__train_batch_size": 512,
}


def megatron(**sizes: Any) -> PPOConfig:
    return configured(**MEGATRON, **{f"actor__megatron__{name}": value for name, value in sizes.items()})


def test_megatron_by_hand() -> None:
    """64 machines, tp 4, pp 2, ep 8, etp 1: a device holds 24 layers, 16 of 128 experts, a quarter of every
    other matrix."""
    sizes = dict(
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
    )
    actor = report_of(megatron(**sizes), QWEN_30B_A3B).roles[0]
    shape = QWEN_30B_A3B
    experts = 24 * 16 * shape.expert
    dense = (
        24 * (-(-shape.attention // 4) + 2 * shape.hidden + shape.hidden * 128)
        + shape.embedding // 4
        + shape.hidden
    )
    assert actor.resting.weights == 2 * (experts + dense)
    assert actor.resting.gradients == 4 * (experts + dense)
    assert actor.resting.optimizer == 12 * (-(-dense // 64) + -(-experts // 32))


def test_a_slice_of_a_context_parallel_line_may_hold_asked_tokens_only() -> None:
    """Four ranks share lines of 1,279 tokens, of which 256 are asked for: all of them may be one rank's."""
    rows = {"data__max_prompt_length": 1024, "data__max_response_length": 256}
    rows["actor__ppo_micro_batch_size_per_gpu"] = 1
    size = "actor__megatron__context_parallel_size"
    whole, shared = (
        report_of(configured(**MEGATRON, **rows, **{size: ways})).roles[0].phases["update"] for ways in (1, 4)
    )
    assert shared.logits == whole.logits > 0
    assert shared.activations < whole.activations


def test_a_checkpoint_of_megatron_core_is_read_tensor_by_tensor() -> None:
    host = report_of(megatron(use_dist_checkpointing=True, dist_checkpointing_path="/core")).host
    whole = report_of(megatron()).host
    assert host.load == whole.load // QWEN_7B.parameters * QWEN_7B.largest_tensor
    assert "a tensor at a time" in host.load_text and "a tensor" not in whole.load_text


def test_megatron_plain_optimizer() -> None:
    sizes = dict(tensor_model_parallel_size=8)
    plain = report_of(megatron(**sizes)).roles[0]
    whole = report_of(megatron(**sizes, use_distributed_optimizer=False)).roles[0]
    assert whole.resting.optimizer == 6 * whole.resting.weights > plain.resting.optimizer


def test_layers_that_are_recomputed_in_part_are_counted_as_kept() -> None:
    def activations(overrides: dict[str, Any], *, checkpointing: bool) -> int:
        config = megatron(tensor_model_parallel_size=8, override_transformer_config=overrides)
        config.actor_rollout_ref.model.enable_gradient_checkpointing = checkpointing
        return report_of(config).roles[0].phases["update"].activations

    kept, recomputed = (activations({}, checkpointing=on) for on in (False, True))
    assert activations({"recompute_granularity": "selective"}, checkpointing=True) == kept
    assert activations({"recompute_granularity": "full"}, checkpointing=False) == recomputed < kept
    for in_part in ({"recompute_method": "block"}, {"recompute_num_layers": 2}):
        assert activations(in_part, checkpointing=True) == kept


def test_interleaved_stages_have_more_micro_batches_in_flight() -> None:
    """1 + (p - 1) / (p v) times as many: a quarter more with two stages of two chunks (Korthikanti et al.
    2022, https://arxiv.org/abs/2205.05198)."""

    def activations(micro_batches: int, chunks: int) -> int:
        layout = Layout("actor", "megatron", tuple(range(2)), 2, pipeline=2, virtual_pipeline=chunks)
        memory = MegatronModelMemory(
            QWEN_7B, layout, MegatronConfig(), 2, True, checkpointing=False, policy=True, host_copies=False
        )
        return memory.update(MicroBatchTokens(1024, 1024, 512), micro_batches).activations

    one, two, interleaved = activations(1, 1), activations(2, 1), activations(2, 2)
    assert activations(4, 1) == two and activations(4, 2) == interleaved
    assert interleaved - two == (two - one) // 2


def test_megatron_offload() -> None:
    """Gradients are freed, all else moves to the host; the optimizer's step is no longer beside passes."""
    sizes = dict(tensor_model_parallel_size=8)
    plain = report_of(megatron(**sizes)).roles[0]
    keys = ("param_offload", "grad_offload", "optimizer_offload")
    moved = report_of(megatron(**sizes, **dict.fromkeys(keys, True))).roles[0]
    weights, state = plain.resting.weights, plain.resting.optimizer
    assert moved.resting.total == 0
    assert moved.host == moved.resting.host == weights + state
    passes, update = plain.phases["update"], moved.phases["update"]
    assert moved.phases["log_probs"].gradients == 0 < plain.phases["log_probs"].gradients
    assert (update.weights, update.gradients) == (weights, plain.resting.gradients)
    largest = max(state, passes.activations + passes.logits)
    assert update.total == passes.total - state - passes.activations - passes.logits + largest
    assert moved.phases["sync"].weights == weights


def test_a_hundred_thousand_devices_take_no_longer() -> None:
    prompts = dict(data__train_batch_size=100_000, actor__ppo_mini_batch_size=100_000)
    config = configured(trainer__nnodes=12500, cluster__nodes=12500, **prompts)
    plan, limits = resolve_plan(config, prompts=10_000_000), limits_of(config)
    began = time.process_time()
    report = estimate(plan, config, QWEN_7B, limits=limits)
    assert time.process_time() - began < 0.05
    assert report.groups[0].count == 100_000


# --- advice --------------------------------------------------


def test_advice_makes_it_fit() -> None:
    """Every override is applied to the configuration and the whole run planned again."""
    config = configured(rollout__name="native", data__max_response_length=8192, actor__use_kl_loss=True)
    report = report_of(config)
    assert report.fits is False and report.advice
    peak = report.groups[0].peak
    for advice in report.advice:
        config = overridden(config, advice.override)
        after = report_of(config).groups[0].peak
        assert peak - after == advice.saves
        peak = after
    assert report_of(config).fits
    assert report.advice[0].override.startswith("actor_rollout_ref.rollout.max_num_seqs=")


@pytest.mark.parametrize("memory", [8, 16])
def test_advice_names_no_key_that_other_advice_leaves_without_effect(memory: int) -> None:
    report = report_of(configured(cluster__device_memory_gib=memory))
    overrides = [advice.override for advice in report.advice]
    offloaded = [one for one in overrides if "_offload=" in one or "offload_policy=" in one]
    assert offloaded == [f"{POLICY}.actor.fsdp_config.offload_policy=true"]


def test_one_copy_of_the_model_is_advised_where_several_do_not_fit() -> None:
    """8 devices, 2 to a copy: weights and both moments in 4 bytes each, a half of them on every device."""
    key = f"{POLICY}.actor.fsdp_config.fsdp_size"
    report = report_of(configured(**{key.replace(".", "__"): 2}))
    [advised] = [advice for advice in report.advice if advice.override == f"{key}=-1"]
    assert report.fits is False
    assert advised.saves == 3 * 4 * (QWEN_7B.parameters // 2 - QWEN_7B.parameters // 8)
    assert not any(advice.override.startswith(key) for advice in report_of(configured()).advice)


def test_advice_that_is_not_enough_says_so() -> None:
    fits, tight = report_of(configured()), report_of(configured(cluster__device_memory_gib=1))
    assert (fits.missing_after_advice, fits.missing[1] <= 0) == (0, True)
    assert (
        tight.missing_after_advice == tight.groups[0].peak - GIB - sum(one.saves for one in tight.advice) > 0
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([24, 40, 48, 80]),
    st.sampled_from([512, 2048, 8192]),
    st.sampled_from([None, 1, 8]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["native", "vllm"]),
    st.sampled_from([1, 2]),
)
def test_advice_keeps_its_word(
    memory: int,
    response: int,
    micro: int | None,
    checkpointing: bool,
    reference: bool,
    engine: str,
    ways: int,
) -> None:
    """Each change saves what it says, on top of the ones before, in a plan that is resolved again."""
    config = configured(
        cluster__device_memory_gib=memory,
        data__max_response_length=response,
        actor__ppo_micro_batch_size_per_gpu=micro,
        actor_rollout_ref__model__enable_gradient_checkpointing=checkpointing,
        actor__use_kl_loss=reference,
        rollout__name=engine,
        actor__fsdp_config__ulysses_sequence_parallel_size=ways,
    )
    report = report_of(config)
    assert bool(report.advice) <= (report.fits is False)
    excess = max(report.groups[0].peak - memory * GIB, 0)
    for advice in report.advice:
        assert advice.saves > 0
        config = overridden(config, advice.override)
        left = report_of(config).groups[0].peak - memory * GIB
        assert left <= excess - advice.saves + 1
        excess = left


def test_a_token_budget_that_is_advised_counts_tokens_of_a_device() -> None:
    """Two devices share each row: half of 16,384 is 8,192, though a data rank has twice as many."""
    config = configured(
        cluster__device_memory_gib=24,
        actor__use_dynamic_bsz=True,
        actor__ppo_max_token_len_per_gpu=16_384,
        actor__fsdp_config__ulysses_sequence_parallel_size=2,
    )
    key = f"{POLICY}.actor.ppo_max_token_len_per_gpu="
    advised = [one.override for one in report_of(config).advice if one.override.startswith(key)]
    assert all(int(one.removeprefix(key)) < 16_384 for one in advised) and advised


def test_micro_batches_that_set_the_optimizer_step_are_not_advised() -> None:
    tight = dict(cluster__device_memory_gib=16, actor__ppo_micro_batch_size_per_gpu=8)
    key = f"{POLICY}.actor.ppo_micro_batch_size_per_gpu"
    assert any(one.override.startswith(key) for one in report_of(configured(**tight)).advice)
    found = report_of(configured(**tight, batch__gradient_accumulation_steps=4)).advice
    assert not any(one.override.startswith(key) for one in found)


def test_a_share_without_room_for_a_row_does_not_fit() -> None:
    """The engine refuses to start without a key-value cache."""
    assert report_of(configured(rollout__gpu_memory_utilization=0.5)).fits
    report = report_of(configured(rollout__gpu_memory_utilization=0.1))
    assert not report.fits and report.groups[0].peak_phase == "sample"


def test_whether_a_model_fits_unknown_limits_is_unknown() -> None:
    report = report_of(configured(cluster__device_memory_gib=None, cluster__host_memory_gib=None))
    assert report.fits is None and report.groups[0].fits is None and report.advice == ()
    assert any("cluster.device_memory_gib" in note for note in report.notes)


# --- the report --------------------------------------------------


def test_json_holds_everything() -> None:
    reported = json.loads(json.dumps(report_of(configured()).to_json()))
    assert reported["fits"] is True
    assert reported["groups"][0]["peak"] == max(reported["groups"][0]["phases"].values())
    assert {
        "weights",
        "gradients",
        "optimizer",
        "gathered",
        "activations",
        "logits",
        "kv_cache",
        "weight_sync",
    } <= set(reported["roles"][0]["resting"])


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1.00 KiB"), (1536, "1.50 KiB"), (10 * GIB, "10.0 GiB"), (-GIB, "-1.00 GiB")],
)
def test_sizes_as_text(size: int, text: str) -> None:
    assert size_text(size) == text


def test_nothing_heavy_is_imported() -> None:
    heavy = "[name for name in ('torch', 'ray', 'transformers', 'numpy') if name in sys.modules]"
    code = f"import sys, hydraflow.memory.estimate; print({heavy})"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
