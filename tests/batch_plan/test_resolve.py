"""The numbers of a plan, worked out by hand; who may read the keys that they come from."""

import ast
import json
import time
from pathlib import Path

import pytest
from batch_plan.plans import resolve, small

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.batch_plan.table import plan_lines, print_plan
from hydraflow.compose.keys import known_keys
from hydraflow.compose.loading import load
from hydraflow.schema import PPOConfig, SFTConfig

ROOT = Path(__file__).parents[2]


def test_numbers_by_hand():
    plan = resolve(small(trainer__total_epochs=3, actor__ppo_epochs=2))
    assert (
        plan.prompts_per_step,
        plan.samples_per_prompt,
        plan.trajectories_per_step,
        plan.rollout_devices,
    ) == (64, 8, 512, 2)
    actor = plan.actor
    assert (actor.mini_batch_prompts, actor.mini_batch_trajectories, actor.rows_per_rank) == (32, 256, 128)
    assert actor.optimizer_steps_per_step == 4  # 64/32 mini-batches, twice
    # 9000 // 64 steps make an epoch.
    assert (plan.steps_per_epoch, plan.total_steps, actor.total_optimizer_steps) == (140, 420, 1680)
    assert (plan.critic, plan.ref, plan.values, plan.reward_model, plan.filter, plan.asynchronous) == (
        None,
    ) * 6
    assert (plan.placement, list(plan.layouts)) == ("colocated", ["actor", "rollout"])


@pytest.mark.parametrize(
    ("steps", "asked", "epochs", "expected"),
    [
        ([2, 100], 10, 1, "global_profiler.steps=[100]: the run has 10 training steps"),
        (
            [141],
            None,
            1,
            "global_profiler.steps=[141]: the run has 140 training steps",
        ),  # 9000 // 64
        ([141], None, 2, None),
        ([10], 10, 1, None),
    ],
)
def test_steps_that_are_never_profiled(steps, asked, epochs, expected):
    given = {"global_profiler__tool": "torch", "global_profiler__steps": steps}
    plan = resolve(small(**given, trainer__total_training_steps=asked, trainer__total_epochs=epochs))
    found = [note for note in plan.notes if note.startswith("global_profiler")]
    assert [note.partition(",")[0] for note in found] == ([expected] if expected else [])
    unknown = resolve_plan(small(**given), prompts=None)
    assert not [note for note in unknown.notes if note.startswith("global_profiler")]


def test_ranks_that_are_never_profiled():
    """The default has no number of devices, so it is the machine's: 2."""
    given = {"global_profiler__tool": "torch", "global_profiler__ranks": [0, 3]}
    [note] = [one for one in resolve(small(**given)).notes if one.startswith("global_profiler")]
    assert note.startswith("global_profiler.ranks=[3]: ranks count from 0, and no role has more than 2 of")
    four = resolve(small(**given, trainer__n_gpus_per_node=4))
    assert not [one for one in four.notes if one.startswith("global_profiler")]


def test_a_warm_up_of_the_critic_takes_steps_from_the_actor():
    """verl's meaning: the actor learns from step critic_warmup on, so 10 leaves the first 9 to the critic."""
    gae = {"algorithm__adv_estimator": "gae", "trainer__total_training_steps": 12}
    plan = resolve(small(**gae, trainer__critic_warmup=10))
    assert (plan.actor.first_step, plan.actor.total_optimizer_steps) == (10, 3 * 2)
    assert plan.critic is not None
    assert (plan.critic.first_step, plan.critic.total_optimizer_steps) == (1, 12 * 2)
    [line] = [one for one in plan.quantities if one.name == "actor: optimizer steps"]
    assert (line.value, line.formula) == (6, "(training steps - critic_warmup + 1)·K = (12 - 10 + 1)·2")
    assert resolve(small(**gae, trainer__critic_warmup=1)).actor.total_optimizer_steps == 12 * 2


@pytest.mark.parametrize(
    ("warmup", "steps", "words"),
    [
        (11, 2 * 2, None),
        (12, 2, "learns only in the last step"),
        (13, 0, "never learns"),
        (1000, 0, "never learns"),
    ],
)
def test_a_warm_up_that_takes_the_whole_run_is_noted(warmup, steps, words):
    gae = {"algorithm__adv_estimator": "gae", "trainer__total_training_steps": 12}
    plan = resolve(small(**gae, trainer__critic_warmup=warmup))
    assert plan.actor.total_optimizer_steps == steps
    said = [note for note in plan.notes if note.startswith(f"trainer.critic_warmup={warmup}: the actor")]
    assert [words in note and "the run has 12 training steps" in note for note in said] == [True] * bool(
        words
    )


def test_total_training_steps_overrides_the_epochs():
    assert resolve(small(trainer__total_training_steps=7)).total_steps == 7
    unknown = resolve(small(), prompts=None)
    assert (unknown.steps_per_epoch, unknown.total_steps) == (0, 0)


def test_static_micro_batches_that_were_not_given_are_the_largest_divisor_that_fits():
    # g = 32·8/2 = 128 rows of 24 tokens; 250 tokens hold 10 rows, of which 8 divide 128. Forward passes need
    # no divisor.
    plan = resolve(small(actor__ppo_max_token_len_per_gpu=250, actor__use_kl_loss=True))
    assert (plan.actor.micro, plan.actor.accumulation_steps) == (MicroPlan(rows=8, max_tokens=None), 16)
    assert plan.old_log_prob == plan.ref == MicroPlan(rows=10, max_tokens=None)


def test_forward_passes_have_their_own_micro_batches():
    config = small(
        actor__use_dynamic_bsz=True,
        actor__use_kl_loss=True,
        actor__ppo_max_token_len_per_gpu=500,
        rollout__log_prob_use_dynamic_bsz=False,
        rollout__log_prob_micro_batch_size_per_gpu=7,
        ref__log_prob_max_token_len_per_gpu=900,
    )
    plan = resolve(config)
    assert (plan.actor.micro, plan.actor.accumulation_steps) == (MicroPlan(rows=None, max_tokens=500), None)
    assert plan.old_log_prob == MicroPlan(rows=7, max_tokens=None)
    assert plan.ref == MicroPlan(rows=None, max_tokens=900)


def test_the_critic_follows_the_actor_where_it_says_nothing():
    follower = resolve(
        small(critic__enable=True, actor__ppo_epochs=3, actor__shuffle=True, actor__use_dynamic_bsz=True)
    )
    assert follower.critic.mini_batch_prompts == 32
    assert (follower.critic.epochs, follower.critic.shuffle) == (3, True)
    assert follower.critic.micro == follower.values == MicroPlan(rows=None, max_tokens=32768)
    own = dict(critic__ppo_mini_batch_size=16, critic__ppo_epochs=1, critic__ppo_micro_batch_size_per_gpu=4)
    plan = resolve(small(critic__enable=True, **own))
    assert (plan.critic.rows_per_rank, plan.critic.optimizer_steps_per_step) == (64, 4)
    assert plan.critic.micro == plan.values == MicroPlan(rows=4, max_tokens=None)


def test_a_reference_with_adapters_has_no_weights_of_its_own():
    plan = resolve(small(actor__use_kl_loss=True))
    assert list(plan.layouts) == ["actor", "ref", "rollout"]
    config = small(actor__use_kl_loss=True)
    config.actor_rollout_ref.model.lora_rank = 8
    assert list(resolve(config).layouts) == ["actor", "rollout"]
    assert resolve(config).ref is not None


def test_validation_numbers():
    plan = resolve(small(data__val_batch_size=50, rollout__val_kwargs__n=4))
    assert (plan.validation.prompts_per_call, plan.validation.samples_per_prompt) == (50, 4)
    assert resolve(small()).validation.prompts_per_call is None


def test_warm_up_and_decay_in_steps_or_as_a_share():
    plan = resolve(small(actor__optim__lr_warmup_steps=5))
    assert (plan.actor.warmup_steps, plan.actor.decay_steps) == (5, 135)
    assert resolve(small(actor__optim__lr_warmup_steps_ratio=0.1)).actor.warmup_steps == 14  # of 140
    assert (
        resolve(
            small(actor__optim__lr_warmup_steps=0, actor__optim__lr_warmup_steps_ratio=0.1)
        ).actor.warmup_steps
        == 0
    )
    lines = {quantity.name: quantity for quantity in plan.quantities}
    assert lines["actor: warm-up"].formula == "5·K = 10 optimizer steps"


def test_sampling_numbers():
    config = small(
        rollout__name="vllm",
        rollout__tensor_model_parallel_size=2,
        rollout__data_parallel_size=2,
        rollout__max_num_seqs=100,
        rollout__agent__num_workers=3,
    )
    plan = resolve(config, devices=8)
    rollout = plan.rollout
    # 8/(2·2) replicas, 2 ranks in each.
    assert (rollout.replicas, rollout.engines, rollout.concurrent_sequences) == (2, 4, 400)
    assert (rollout.trajectories_per_engine, rollout.waves) == (128, 2)  # 64·8/4, in engines of 100
    assert (rollout.max_model_len, plan.agent.trajectories_per_worker) == (24, 171)  # 512/3


def test_agent_workers_are_shown_to_who_names_them_or_takes_an_engine_that_has_them():
    def shown(**settings):
        return {
            one.name
            for one in resolve(small(**settings), devices=2).quantities
            if one.name.startswith("agent workers")
        }

    both = {"agent workers", "agent workers: trajectories each"}
    assert shown() == set()
    assert shown(rollout__agent__num_workers=3) == shown(rollout__name="vllm") == both


def test_dynamic_sampling_numbers():
    config = small(
        algorithm__filter_groups__enable=True,
        data__gen_batch_size=48,
        algorithm__filter_groups__max_num_gen_batches=5,
    )
    plan = resolve(config).filter
    # 64 prompts need two calls of 48.
    assert (plan.prompts_per_call, plan.least_prompts, plan.most_prompts) == (48, 96, 240)
    config.algorithm.filter_groups.max_num_gen_batches = 0
    assert resolve(config).filter.most_prompts is None


def test_asynchronous_numbers():
    # Q = P·R·M = 2·1·32 = 64; one and a half times that may be in flight.
    config = small(async_training__staleness_threshold=0.5, async_training__trigger_parameter_sync_step=2)
    one = resolve(config).asynchronous
    assert (one.rounds_per_sync, one.mini_batches_per_round, one.prompts_per_round) == (2, 1, 32)
    assert (one.prompts_in_flight, one.trajectories_in_flight, one.stale_trajectories) == (96, 768, 256)
    config = small(data__train_batch_size=100, actor__ppo_mini_batch_size=100)
    config.async_training.staleness_threshold = 0.15
    assert resolve(config).asynchronous.prompts_in_flight == 115, "1.15 in binary is less"


def test_reward_model_numbers():
    config = small(reward__reward_model__enable=True, reward__reward_model__max_token_len_per_gpu=100)
    config.reward.reward_model.tensor_model_parallel_size = 2
    plan = resolve(config, devices=4)
    assert plan.reward_model == MicroPlan(rows=4, max_tokens=None)  # 100 // 24
    assert plan.layouts["reward_model"].data_ranks == 2


def test_prompts_that_no_step_takes_are_said():
    assert resolve(small(), prompts=69).notes == (
        "5 of 69 training prompts do not fill a step of 64: each epoch leaves that many out",
    )
    assert resolve(small(), prompts=128).notes == ()


def test_quantities_say_where_a_number_comes_from():
    config = small(actor__use_kl_loss=True, critic__enable=True)
    plan = resolve(
        config,
        origins={"data.train_batch_size": "command line", "actor_rollout_ref.rollout.n": "config/mine.yaml"},
    )
    lines = {quantity.name: quantity for quantity in plan.quantities}
    assert lines["prompts per step Q"].provenance == "command line"
    assert lines["trajectories per prompt n"].provenance == "config/mine.yaml"
    assert lines["actor: prompts per optimizer step M"].provenance == "file"
    assert lines["validation batch"].provenance == "default"
    assert lines["trajectories per step S"].formula == "Q·n = 64·8"
    assert lines["actor: rows per data rank g"].formula == "G/dp = 256/2"
    assert len(lines) == len(plan.quantities), "names are unique"
    assert all(quantity.unit or quantity.name == "placement" for quantity in plan.quantities)
    assert len(plan_lines(plan.quantities, 500)) == len(plan.quantities) + 2


def test_plan_json_holds_all_of_it():
    saved = json.loads(resolve(small()).to_json())
    assert saved["actor"]["rows_per_rank"] == 128
    assert saved["layouts"]["rollout"]["devices"]["ranges"] == [[0, 2]]


def test_the_plan_is_printed_with_its_notes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    print_plan(resolve(small(), prompts=69))
    lines = capsys.readouterr().out.splitlines()
    assert any("Q·n = 64·8" in line for line in lines)
    assert "note: 5 of 69 training prompts" in "\n".join(lines)
    assert max(map(len, lines)) <= 60 and not [line for line in lines if line != line.rstrip()]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_arithmetic_recipe_has_a_plan(devices):
    config = load("ppo", PPOConfig)
    plan = resolve(config, devices=devices, prompts=config.recipe.train_problems)
    assert plan.total_steps == config.trainer.total_training_steps


def test_a_hundred_thousand_devices_and_ten_million_prompts_are_planned_at_once():
    config = small(
        trainer__nnodes=12500,
        trainer__n_gpus_per_node=8,
        data__train_batch_size=1_000_000,
        actor__ppo_mini_batch_size=500_000,
        actor__device_mapping="0-99999",
        critic__enable=True,
        actor__use_kl_loss=True,
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        plan = resolve_plan(config, prompts=10_000_000)
        seconds.append(time.perf_counter() - start)
    assert (plan.actor.data_ranks, plan.actor.rows_per_rank, plan.steps_per_epoch) == (100_000, 40, 10)
    assert min(seconds) < 0.05


# --- the only reader --------------------------------------------------

READERS = {
    f"hydraflow/batch_plan/{name}.py"
    for name in ("request", "handles", "roles", "topology", "sft", "generate")
}
JUDGES = {
    "hydraflow/compose/runnable.py",
    "hydraflow/compose/rules.py",
    "hydraflow/compose/algorithm_rules.py",
    "hydraflow/compose/effects.py",
} | {"hydraflow/compose/advice.py"}
"""They only look whether a value is legal, can be run yet, or has an effect."""
MEGATRON_SIZES = {f"{part}_model_parallel_size" for part in ("tensor", "pipeline", "expert")}
MEGATRON_SIZES |= {"context_parallel_size"}
ENGINES = {
    "hydraflow/engine/fsdp/groups.py": {"fsdp_size", "ulysses_sequence_parallel_size"},
    "hydraflow/batch_plan/stages.py": {"pipeline_model_parallel_size"},
} | {
    f"hydraflow/engine/megatron/{name}.py": MEGATRON_SIZES
    for name in ("architecture", "core_arguments", "core_config", "parallel")
}
"""What an engine reads in its own section, or what judges that section, where the plan has seen that they
divide the ranks."""
SIZE_ENDINGS = (
    "batch_size",
    "batch_size_per_gpu",
    "use_dynamic_bsz",
    "token_len_per_gpu",
    "ppo_epochs",
    "parallel_size",
    "fsdp_size",
)
SIZES = {
    "device_mapping",
    "gradient_accumulation_steps",
    "optimizer_steps_per_step",
    "global_batch_trajectories",
    "trajectories_per_step",
    "staleness_threshold",
    "trigger_parameter_sync_step",
    "require_batches",
    "max_num_gen_batches",
}
"""Sizes whose names say nothing of it."""
OF_THE_PLAN = {"trajectories_per_step", "optimizer_steps_per_step"}
"""Fields of the plan have these names, too: only `batch.` before them is the configuration."""


def size_keys():
    keys = [key for schema in (PPOConfig, SFTConfig) for key in known_keys(schema)]
    return {
        key.rpartition(".")[2]
        for key in keys
        if key.endswith(SIZE_ENDINGS) or key.rpartition(".")[2] in SIZES
    }


def reads(tree):
    """Size keys that a module reads as attributes (`x.rollout.n` and `x.val_kwargs.n` too)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if node.attr in OF_THE_PLAN and owner != "batch":
            continue
        if node.attr in size_keys() or (node.attr == "n" and owner in ("rollout", "val_kwargs")):
            yield node.attr


def test_no_other_module_reads_size_keys():
    assert {
        "train_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz",
        "ppo_epochs",
    } <= size_keys()
    assert {
        "tensor_model_parallel_size",
        "fsdp_size",
        "ulysses_sequence_parallel_size",
        "gen_batch_size",
    } | SIZES <= size_keys()
    found = {
        (name := str(path.relative_to(ROOT))): set(reads(ast.parse(path.read_text())))
        - ENGINES.get(name, set())
        for path in (ROOT / "hydraflow").rglob("*.py")
        if path.name != "config.py"  # says when a key counts
    }
    assert {path: keys for path, keys in found.items() if keys and path not in READERS | JUDGES} == {}
    assert all(found[reader] for reader in READERS)
