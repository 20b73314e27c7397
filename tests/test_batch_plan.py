"""The batch plan against hand-computed numbers and against a brute-force split of rows."""

import ast
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hydraflow import compose
from hydraflow.batch_plan import resolve_plan
from hydraflow.batch_plan_parts import MicroPlan
from hydraflow.batch_plan_sft import resolve_sft_plan
from hydraflow.batch_plan_table import plan_table, print_plan
from hydraflow.compose_keys import known_keys
from hydraflow.errors import ConfigError
from hydraflow.schema import PPOConfig, SFTConfig

ROOT = Path(__file__).parent.parent
ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def configured(schema=PPOConfig, **values):
    """A configuration with `section__key=value` set; `actor`, `rollout` and `ref` stand for their whole path."""
    config = schema()
    for name, value in values.items():
        *sections, key = name.split("__")
        target = config.actor_rollout_ref if sections[0] in ("actor", "rollout", "ref") else config
        for section in sections:
            target = getattr(target, section)
        setattr(target, key, value)
    return config


def small(**values):
    """Q=64, n=8, M=32, P=16, R=8."""
    base = dict(data__train_batch_size=64, rollout__n=8, actor__ppo_mini_batch_size=32)
    return configured(**(base | dict(data__max_prompt_length=16, data__max_response_length=8) | values))


def resolve(config, processes=2, prompts=9000, critic=False, reference=False, **options):
    return resolve_plan(config, processes=processes, prompts=prompts, critic=critic, reference=reference, **options)


def broken(config, **options):
    with pytest.raises(ConfigError) as caught:
        resolve(config, **options)
    return {problem.field: problem for problem in caught.value.problems}


def test_numbers_by_hand():
    plan = resolve(small(trainer__total_epochs=3, actor__ppo_epochs=2))
    assert (plan.prompts_per_step, plan.samples_per_prompt, plan.trajectories_per_step, plan.rollout_ranks) == (64, 8, 512, 2)
    actor = plan.actor
    assert (actor.mini_batch_prompts, actor.mini_batch_trajectories, actor.rows_per_rank) == (32, 256, 128)
    assert actor.optimizer_steps_per_step == 4  # 64/32 mini-batches, twice
    assert (plan.steps_per_epoch, plan.total_steps) == (140, 420)  # 9000 // 64
    assert (plan.critic, plan.ref, plan.values) == (None, None, None)


def test_total_training_steps_overrides_the_epochs():
    assert resolve(small(trainer__total_training_steps=7)).total_steps == 7
    unknown = resolve(small(), prompts=None)
    assert (unknown.steps_per_epoch, unknown.total_steps) == (0, 0)


def test_static_micro_batches_that_were_not_given_are_the_largest_divisor_that_fits():
    # g = 32·8/2 = 128 rows of 24 tokens; 250 tokens hold 10 rows, of which 8 divide 128. Forward passes need no divisor.
    plan = resolve(small(actor__ppo_max_token_len_per_gpu=250), reference=True)
    assert plan.actor.micro == MicroPlan(rows=8, max_tokens=None)
    assert plan.old_log_prob == plan.ref == MicroPlan(rows=10, max_tokens=None)


def test_forward_passes_have_their_own_micro_batches():
    config = small(
        actor__use_dynamic_bsz=True,
        actor__ppo_max_token_len_per_gpu=500,
        rollout__log_prob_use_dynamic_bsz=False,
        rollout__log_prob_micro_batch_size_per_gpu=7,
        ref__log_prob_max_token_len_per_gpu=900,
    )
    plan = resolve(config, reference=True)
    assert plan.actor.micro == MicroPlan(rows=None, max_tokens=500)
    assert plan.old_log_prob == MicroPlan(rows=7, max_tokens=None)
    assert plan.ref == MicroPlan(rows=None, max_tokens=900)


def test_the_critic_follows_the_actor_where_it_says_nothing():
    follower = resolve(small(actor__ppo_epochs=3, actor__shuffle=True, actor__use_dynamic_bsz=True), critic=True)
    assert follower.critic.mini_batch_prompts == 32
    assert (follower.critic.epochs, follower.critic.shuffle) == (3, True)
    assert follower.critic.micro == follower.values == MicroPlan(rows=None, max_tokens=32768)
    own = small(critic__ppo_mini_batch_size=16, critic__ppo_epochs=1, critic__ppo_micro_batch_size_per_gpu=4)
    plan = resolve(own, critic=True)
    assert (plan.critic.rows_per_rank, plan.critic.optimizer_steps_per_step) == (64, 4)
    assert plan.critic.micro == plan.values == MicroPlan(rows=4, max_tokens=None)


def test_validation_numbers():
    plan = resolve(small(data__val_batch_size=50, rollout__val_kwargs__n=4))
    assert (plan.validation.prompts_per_call, plan.validation.samples_per_prompt) == (50, 4)
    assert resolve(small()).validation.prompts_per_call is None


def test_warm_up_in_steps_or_as_a_share():
    assert resolve(small(actor__optim__lr_warmup_steps=5)).actor.warmup_steps == 5
    assert resolve(small(actor__optim__lr_warmup_steps_ratio=0.1)).actor.warmup_steps == 14  # of 140
    assert resolve(small(actor__optim__lr_warmup_steps=0, actor__optim__lr_warmup_steps_ratio=0.1)).actor.warmup_steps == 0


@pytest.mark.parametrize(
    ("values", "options", "field", "remedy"),
    [
        (dict(actor__ppo_mini_batch_size=24), {}, f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size=16"),
        (dict(actor__ppo_mini_batch_size=128), {}, f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size=64"),
        (dict(rollout__n=1), {"processes": 3}, f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n=3"),
        (dict(actor__ppo_micro_batch_size_per_gpu=5), {}, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "_per_gpu=4 or "),
        (dict(actor__ppo_max_token_len_per_gpu=23), {}, f"{ACTOR}.ppo_max_token_len_per_gpu", "_per_gpu=24"),
        (dict(actor__optim__lr_warmup_steps=141), {}, f"{ACTOR}.optim.lr_warmup_steps", "lr_warmup_steps=14"),
        (dict(), {"prompts": 63}, "data.train_batch_size", "data.train_batch_size=32"),
        (dict(data__train_batch_size=2, actor__ppo_mini_batch_size=2), {"processes": 32}, "data.train_batch_size", "train_batch_size=4 "),
        (dict(), {"prompts": 20}, "data.train_batch_size", f"data.train_batch_size=20 {ACTOR}.ppo_mini_batch_size=20"),
        (dict(rollout__n=0), {}, f"{ROLLOUT}.n", f"{ROLLOUT}.n=1"),
    ],
)
def test_a_broken_rule_names_key_and_remedy(values, options, field, remedy):
    problems = broken(small(**values), **options)
    assert list(problems) == [field]
    assert remedy in problems[field].remedy


def test_a_decay_needs_a_step_after_the_warm_up():
    values = dict(trainer__total_training_steps=10, actor__optim__lr_warmup_steps=10)
    assert resolve(small(**values)).actor.warmup_steps == 10
    assert "linear decay" in str(broken(small(actor__optim__lr_scheduler_type="linear", **values)).popitem()[1])


def test_all_broken_rules_are_named_at_once():
    config = small(actor__ppo_mini_batch_size=24, critic__ppo_max_token_len_per_gpu=3, critic__ppo_micro_batch_size_per_gpu=5)
    problems = broken(config, prompts=10, critic=True)
    assert set(problems) == {f"{ACTOR}.ppo_mini_batch_size", "critic.ppo_micro_batch_size_per_gpu", "data.train_batch_size"}
    config.critic.use_dynamic_bsz = True
    assert "critic.ppo_max_token_len_per_gpu" in broken(config, critic=True)


def test_a_key_that_the_critic_takes_from_the_actor_is_reported_once():
    with pytest.raises(ConfigError) as caught:
        resolve(small(actor__ppo_mini_batch_size=24), critic=True)
    assert len(caught.value.problems) == 1


def test_a_size_without_effect_is_said():
    notes = resolve(small(actor__use_dynamic_bsz=True, actor__ppo_micro_batch_size_per_gpu=4)).notes
    assert [note.split(" has no effect")[0] for note in notes] == [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"]
    assert resolve(small()).notes == ()


def test_quantities_say_where_a_number_comes_from():
    plan = resolve(small(), given={"data.train_batch_size"}, critic=True, reference=True)
    lines = {quantity.name: quantity for quantity in plan.quantities}
    assert lines["prompts per step Q"].provenance == "command line"
    assert lines["trajectories per prompt n"].provenance == "file"
    assert lines["validation batch"].provenance == "default"
    assert lines["trajectories per step S"].formula == "Q·n = 64·8"
    assert lines["actor: rows per data rank g"].formula == "G/dp = 256/2"
    assert len(lines) == len(plan.quantities)
    assert json.loads(plan.to_json())["actor"]["rows_per_rank"] == 128
    assert plan_table(plan).row_count == len(plan.quantities)


def test_the_plan_is_printed_with_its_notes():
    text = io.StringIO()
    plan = resolve(small(actor__use_dynamic_bsz=True, actor__ppo_micro_batch_size_per_gpu=4))
    print_plan(plan, console=Console(file=text, width=200))
    assert "Q·n = 64·8" in text.getvalue()
    assert f"note: {ACTOR}.ppo_micro_batch_size_per_gpu=4 has no effect" in text.getvalue()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_arithmetic_recipe_has_a_plan(processes):
    config = compose.load("ppo", PPOConfig)
    plan = resolve(config, processes=processes, prompts=config.recipe.train_problems)
    assert plan.total_steps == config.trainer.total_training_steps


# --- against brute force ---------------------------------------------------------------------------------------------


def optimizer_steps_by_splitting(q, n, mini, micro, epochs, ranks):
    """Deals the rows of one step out one by one; None where a mini-batch, a rank or a micro-batch would not be full."""
    rows = [prompt for prompt in range(q) for _ in range(n)]
    steps = 0
    while rows:
        batch, rows = [row for row in rows if row < rows[0] + mini], [row for row in rows if row >= rows[0] + mini]
        shares = [batch[rank::ranks] for rank in range(ranks)]
        if len(set(batch)) != mini or len({len(share) for share in shares}) != 1:
            return None
        if micro is not None and any(
            len(share[start : start + micro]) != micro for share in shares for start in range(0, len(share), micro)
        ):
            return None
        steps += epochs
    return steps


numbers = st.integers(1, 12)


@settings(max_examples=300, deadline=None)
@given(numbers, st.integers(1, 4), numbers, st.none() | st.integers(1, 6), st.integers(1, 3), st.integers(1, 6))
def test_the_plan_is_legal_where_rows_can_be_dealt_out(q, n, mini, micro, epochs, ranks):
    config = small(
        data__train_batch_size=q,
        rollout__n=n,
        actor__ppo_mini_batch_size=mini,
        actor__ppo_micro_batch_size_per_gpu=micro,
        actor__ppo_epochs=epochs,
    )
    expected = optimizer_steps_by_splitting(q, n, mini, micro, epochs, ranks)
    if expected is None:
        broken(config, processes=ranks)
        return
    actor = resolve(config, processes=ranks).actor
    assert actor.optimizer_steps_per_step == expected
    assert actor.rows_per_rank % actor.micro.rows == 0


@settings(max_examples=200, deadline=None)
@given(numbers, st.integers(1, 4), numbers, st.integers(1, 6))
def test_the_first_remedy_of_a_lone_problem_is_legal(q, n, mini, ranks):
    config = small(data__train_batch_size=q, rollout__n=n, actor__ppo_mini_batch_size=mini)
    try:
        resolve(config, processes=ranks)
        return
    except ConfigError as error:
        if len(error.problems) > 1:
            return
        remedy = error.problems[0].remedy.split(" or ")[0]
    values = {}
    for override in remedy.split():
        key, _, value = override.partition("=")
        if key == "trainer.n_gpus_per_node":
            ranks = int(value)
        else:
            values[key.removeprefix("actor_rollout_ref.").replace(".", "__")] = int(value)
    base = dict(data__train_batch_size=q, rollout__n=n, actor__ppo_mini_batch_size=mini)
    resolve(small(**(base | values)), processes=ranks)


# --- supervised training ---------------------------------------------------------------------------------------------


def test_sft_numbers_by_hand():
    config = configured(SFTConfig, data__train_batch_size=24, data__max_length=100, data__max_token_len_per_gpu=550)
    plan = resolve_sft_plan(config, processes=2, conversations=100)
    assert (plan.role.rows_per_rank, plan.steps_per_epoch, plan.total_steps) == (12, 4, 4)
    assert plan.role.micro == MicroPlan(rows=None, max_tokens=550)
    config.data.use_dynamic_bsz = False
    assert resolve_sft_plan(config, processes=2, conversations=100).role.micro == MicroPlan(rows=4, max_tokens=None)  # 5 fit, 4 divide 12
    assert json.loads(plan.to_json())["conversations_per_step"] == 24


def test_sft_names_all_broken_rules_at_once():
    config = configured(SFTConfig, data__train_batch_size=9, data__max_length=100, data__max_token_len_per_gpu=50)
    with pytest.raises(ConfigError) as caught:
        resolve_sft_plan(config, processes=4, conversations=8)
    remedies = [problem.remedy for problem in caught.value.problems]
    assert remedies == [
        "data.train_batch_size=8 or data.train_batch_size=12",
        "data.max_token_len_per_gpu=100",
        "data.train_batch_size=8",
    ]


# --- the only reader -------------------------------------------------------------------------------------------------

READERS = {"hydraflow/batch_plan_request.py", "hydraflow/batch_plan_sft.py"}
NO_PLAN = {"hydraflow/jobs/generate.py": {"n"}}
"""Generation has no optimizer step and so no plan: it passes on how many responses a prompt gets."""
SIZE_ENDINGS = ("batch_size", "batch_size_per_gpu", "use_dynamic_bsz", "token_len_per_gpu", "ppo_epochs")


def size_keys():
    return {key.rpartition(".")[2] for schema in (PPOConfig, SFTConfig) for key in known_keys(schema) if key.endswith(SIZE_ENDINGS)}


def reads(tree):
    """Batch-size keys that a module reads as attributes (`x.rollout.n` and `x.val_kwargs.n` too)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if node.attr in size_keys() or (node.attr == "n" and owner in ("rollout", "val_kwargs")):
            yield node.attr


def test_no_other_module_reads_batch_size_keys():
    assert {"train_batch_size", "ppo_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "ppo_epochs"} <= size_keys()
    found = {str(path.relative_to(ROOT)): set(reads(ast.parse(path.read_text()))) for path in (ROOT / "hydraflow").rglob("*.py")}
    assert {path: keys for path, keys in found.items() if keys and path not in READERS} == NO_PLAN
    assert all(found[reader] for reader in READERS)
