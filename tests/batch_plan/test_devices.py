"""Machines, mappings and the sizes by which roles divide their work, by hand."""

from dataclasses import replace

import pytest
from batch_plan.plans import ACTOR, ROLLOUT, broken, configured, resolve, small

from hydraflow.batch_plan.layout import Devices, ShapeNumbers
from hydraflow.batch_plan.mapping import parse, text_of


def megatron(**sizes):
    """The actor under Megatron-Core; `tensor=4` is actor.megatron.tensor_model_parallel_size=4."""
    names = {
        "tensor": "tensor_model",
        "pipeline": "pipeline_model",
        "virtual": "virtual_pipeline_model",
        "context": "context",
    }
    names |= {"expert": "expert_model", "expert_tensor": "expert_tensor"}
    return {"actor__strategy": "megatron"} | {
        f"actor__megatron__{names[name]}_parallel_size": size for name, size in sizes.items()
    }


# --- sets of devices --------------------------------------------------


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("0-7", "0-7"),
        ("0-3,8-11", "0-3,8-11"),
        ("8-11, 0-3", "0-3,8-11"),
        ([0, 1, 2, 5], "0-2,5"),
        (["0-3", 8], "0-3,8"),
        ("[0,1,2]", "0-2"),
        (3, "3"),
        ("list(range(0,8))", "0-7"),
        ("list(range(8))", "0-7"),
        ("list(range(0, 4)) + list(range(8,12))", "0-3,8-11"),
        ("list(range(0,8,4))", "0,4"),
    ],
)
def test_forms_of_a_mapping(written, devices):
    assert str(parse(written)[0]) == devices
    assert parse(text_of(parse(written)[0])) == parse(written)


@pytest.mark.parametrize(
    "written",
    [
        "",
        "all",
        "7-0",
        [],
        [-1],
        "0-",
        True,
        {"a": 1},
        "list(range(0,8,0))",
        "0-3+range(8,4,2)",
        "__import__('os')",
    ],
)
def test_what_is_no_mapping(written):
    with pytest.raises(ValueError, match=r"must|names no device|steps of 0"):
        parse(written)


def test_sets_of_devices():
    a, b = Devices.of([range(0, 8)]), Devices.of([range(2, 4), range(6, 12)])
    assert [str(one) for one in (a & b, a | b, a - b, b - a)] == ["2-3,6-7", "0-11", "0-1,4-5", "8-11"]
    assert (str(b.first(3)), len(b), b.stop) == ("2-3,6", 8, 12)


# --- machines --------------------------------------------------


def test_a_cluster_is_the_trainers_machines_where_nothing_else_is_said():
    plan = resolve(
        configured(cluster__nodes=64, cluster__devices_per_node=8, data__train_batch_size=1024, rollout__n=8)
    )
    assert (plan.cluster.nodes, len(plan.cluster.devices), plan.actor.data_ranks) == (64, 512, 512)


def test_machines_of_a_rollout_come_after_the_trainers():
    config = small(
        trainer__n_gpus_per_node=8, rollout__name="vllm", rollout__nnodes=2, rollout__n_gpus_per_node=4
    )
    plan = resolve(config)
    assert [(pool.name, pool.nodes, pool.first_device) for pool in plan.cluster.pools] == [
        ("trainer", 1, 0),
        ("rollout", 2, 8),
    ]
    assert (str(plan.layouts["rollout"].devices), plan.placement) == ("8-15", "disaggregated")
    assert [plan.cluster.node_of(device) for device in (7, 8, 11, 12)] == [0, 1, 1, 2]


def test_a_reward_model_has_machines_of_its_own_where_asked():
    config = small(reward__reward_model__enable=True, reward__reward_model__enable_resource_pool=True)
    config.reward.reward_model.n_gpus_per_node = 4
    plan = resolve(config)
    assert (str(plan.layouts["reward_model"].devices), len(plan.cluster.devices)) == ("2-5", 6)


@pytest.mark.parametrize(
    ("values", "key", "remedy"),
    [
        (dict(cluster__nodes=4, trainer__nnodes=2), "cluster.nodes", "cluster.nodes=2 or trainer.nnodes=4"),
        (
            dict(cluster__devices_per_node=8, trainer__n_gpus_per_node=4),
            "trainer.n_gpus_per_node",
            "trainer.n_gpus_per_node=8",
        ),
        (dict(rollout__nnodes=1, rollout__device_mapping="0-1"), f"{ROLLOUT}.nnodes", f"{ROLLOUT}.nnodes=0"),
    ],
)
def test_machines_that_do_not_add_up(values, key, remedy):
    problems = broken(small(rollout__name="vllm", **values))
    assert remedy in problems[key].remedy


def test_a_role_placed_twice_is_told_of_both_places():
    config = small(rollout__name="vllm", rollout__nnodes=1, rollout__device_mapping="0-1")
    problem = broken(config)[f"{ROLLOUT}.nnodes"]
    assert str(problem).startswith(f"{ROLLOUT}.nnodes: gives the rollout machines of its own, but ")
    assert f"{ROLLOUT}.device_mapping=0-1 gives it devices of the trainer" in problem.rule


# --- mappings --------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "said", "remedy"),
    [
        ("0-9", "names devices 8-9, but 1 x 8 devices have only 0-7", f"{ROLLOUT}.device_mapping=0-7"),
        ("0-3,2-7", "names devices 2-3 twice", f"{ROLLOUT}.device_mapping=0-7"),
        ("eight", "'eight' is neither", f"{ROLLOUT}.device_mapping=0-7"),
    ],
)
def test_a_mapping_that_is_not_in_the_cluster(mapping, said, remedy):
    problem = broken(small(rollout__device_mapping=mapping), devices=8)[f"{ROLLOUT}.device_mapping"]
    assert said in problem.rule
    assert problem.remedy.split(" or ")[0] == remedy


def test_a_hole_is_named():
    problems = broken(small(actor__device_mapping="0-3", rollout__device_mapping="0-3,6-7"), devices=8)
    assert list(problems) == [f"{ACTOR}.device_mapping"]
    assert "no role uses devices 4-5 of 0-7" in problems[f"{ACTOR}.device_mapping"].rule


def test_a_hole_below_the_cluster_can_be_cut_off():
    problem = broken(small(actor__device_mapping="0-3"), devices=8)[f"{ACTOR}.device_mapping"]
    assert "trainer.n_gpus_per_node=4" in problem.remedy


def test_who_follows_the_actor_is_not_reported_again():
    problems = broken(small(actor__device_mapping="0-9", actor__use_kl_loss=True), devices=8)
    assert list(problems) == [f"{ACTOR}.device_mapping"]


# --- sizes --------------------------------------------------


def test_ulysses_divides_data_ranks_and_hsdp_does_not():
    config = small(actor__fsdp_config__ulysses_sequence_parallel_size=2, actor__fsdp_config__fsdp_size=4)
    plan = resolve(config, devices=8)
    assert (plan.actor.data_ranks, plan.layouts["actor"].shard, plan.layouts["actor"].context) == (4, 4, 2)
    config.actor_rollout_ref.actor.use_dynamic_bsz = True
    assert resolve(config, devices=8).actor.micro.max_tokens == 2 * 16384


def test_expert_parallelism_does_not_divide_data_ranks():
    plan = resolve(small(**megatron(tensor=4, pipeline=2, expert=8, expert_tensor=1)), devices=16)
    assert (plan.actor.data_ranks, plan.layouts["actor"].expert) == (2, 8)
    lines = {quantity.name: quantity.value for quantity in plan.quantities}
    assert lines["actor: data ranks of the experts"] == 1  # 16/(1·8·2)


def test_the_reference_divides_its_model_like_the_actor():
    plan = resolve(small(actor__use_kl_loss=True, **megatron(tensor=2)), devices=8)
    assert plan.layouts["ref"].tensor == 2
    own = small(actor__use_kl_loss=True, ref__megatron__tensor_model_parallel_size=4, **megatron(tensor=2))
    assert resolve(own, devices=8).layouts["ref"].tensor == 4


def test_interleaved_micro_batches_come_in_groups():
    # g = 32·8/4 = 64 rows; 24 tokens a row; 100 tokens hold 4; micro-batches of 4 rows are 16, a multiple of
    # 2.
    config = small(actor__ppo_max_token_len_per_gpu=100, **megatron(pipeline=2, virtual=2))
    assert resolve(config, devices=8).actor.accumulation_steps == 16
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 64  # one micro-batch
    assert "needs a multiple of 2" in broken(config, devices=8)[f"{ACTOR}.ppo_micro_batch_size_per_gpu"].rule


@pytest.mark.parametrize(
    ("values", "key", "remedy"),
    [
        (megatron(tensor=3), f"{ACTOR}.megatron.tensor_model_parallel_size", "tensor_model_parallel_size=4"),
        (megatron(expert=16), f"{ACTOR}.megatron.expert_model_parallel_size", "expert_model_parallel_size=8"),
        (megatron(virtual=2), f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size", "parallel_size=null"),
        (dict(actor__fsdp_config__fsdp_size=3), f"{ACTOR}.fsdp_config.fsdp_size", "fsdp_size=4"),
        (dict(actor__fsdp_config__fsdp_size=0), f"{ACTOR}.fsdp_config.fsdp_size", "fsdp_size=-1"),
        (dict(actor__fsdp_config__fsdp_size=-2), f"{ACTOR}.fsdp_config.fsdp_size", "fsdp_size=-1"),
        (
            dict(rollout__tensor_model_parallel_size=16),
            f"{ROLLOUT}.tensor_model_parallel_size",
            "tensor_model_parallel_size=8",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_devices(values, key, remedy):
    problems = broken(small(**values), devices=8)
    assert list(problems) == [key]
    assert remedy in problems[key].remedy


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        (megatron(tensor=8), f"{ACTOR}.megatron.tensor_model_parallel_size", "12 attention heads"),
        (megatron(pipeline=8), f"{ACTOR}.megatron.pipeline_model_parallel_size", "6 layers"),
        (
            megatron(tensor=2, context=4),
            f"{ACTOR}.megatron.context_parallel_size",
            "6 attention heads of a tensor-parallel rank",
        ),
        (megatron(expert=2), f"{ACTOR}.megatron.expert_model_parallel_size", "the model has none"),
        (
            dict(actor__fsdp_config__ulysses_sequence_parallel_size=8),
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            "12 attention",
        ),
        (
            dict(rollout__tensor_model_parallel_size=8),
            f"{ROLLOUT}.tensor_model_parallel_size",
            "12 attention heads",
        ),
        (
            dict(rollout__pipeline_model_parallel_size=8),
            f"{ROLLOUT}.pipeline_model_parallel_size",
            "must be at most 6, the number of layers of the rollout's model",
        ),
    ],
)
def test_a_model_that_cannot_be_divided(values, key, said):
    assert resolve(small(**values), devices=8)
    problems = broken(small(**values), devices=8, shape=ShapeNumbers(layers=6, heads=12, kv_heads=4))
    assert said in problems[key].rule


def test_a_replicas_stages_may_have_different_numbers_of_layers():
    shape = ShapeNumbers(layers=7, heads=12, kv_heads=4)
    divided = dict(rollout__name="vllm", rollout__pipeline_model_parallel_size=2)
    found = resolve(small(**divided, rollout__tensor_model_parallel_size=2), devices=8, shape=shape)
    assert found.layouts["rollout"].pipeline == 2 and found.layouts["rollout"].replicas == 2


def test_each_stage_of_a_replica_needs_a_layer_with_experts():
    key = "actor_rollout_ref.rollout.pipeline_model_parallel_size"
    shape = ShapeNumbers(layers=8, heads=12, kv_heads=4, experts=4, dense_at=(0, 1, 4))
    divided = dict(rollout__name="vllm", rollout__pipeline_model_parallel_size=4)
    problem = broken(small(**divided), devices=8, shape=shape)[key]
    wanted = "each stage of the rollout's model needs a layer with experts; none is in layers 0 to 1 (of 8)"
    assert problem.rule == wanted and problem.remedy == f"{key}=2"
    divided["rollout__pipeline_model_parallel_size"] = 2
    assert resolve(small(**divided), devices=8, shape=shape).layouts["rollout"].pipeline == 2
    shape = replace(shape, dense_at=(2, 4))
    assert resolve(small(**divided), devices=8, shape=shape).layouts["rollout"].pipeline == 2
    assert (
        broken(small(**divided), devices=8, shape=replace(shape, dense_at=range(8)))[key].remedy == f"{key}=1"
    )


def test_few_key_value_heads_are_repeated_but_by_megatron():
    shape = ShapeNumbers(layers=12, heads=16, kv_heads=2)
    repeated = dict(rollout__name="vllm", rollout__tensor_model_parallel_size=4)
    assert resolve(small(**repeated), devices=8, shape=shape).layouts["rollout"].tensor == 4
    problems = broken(small(**megatron(tensor=4)), devices=8, shape=shape)
    assert "2 key-value heads" in problems[f"{ACTOR}.megatron.tensor_model_parallel_size"].rule
