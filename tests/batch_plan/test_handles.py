"""Numbers that follow from others, defaults that yield, and contradictions."""

import pytest
from batch_plan.plans import ACTOR, ROLLOUT, broken, configured, resolve

DEFAULTS = dict(algorithm__adv_estimator="grpo")


def given(**values):
    return configured(**DEFAULTS, **values)


@pytest.mark.parametrize(
    ("values", "q", "n", "mini", "rows"),
    [
        (dict(batch__trajectories_per_step=512, rollout__n=8), 64, 8, 64, None),  # Q = 512/8, M fits
        (dict(batch__global_batch_trajectories=256, rollout__n=8), 1024, 8, 32, None),
        (dict(batch__optimizer_steps_per_step=8), 1024, 1, 128, None),
        (dict(batch__optimizer_steps_per_step=8, actor__ppo_epochs=2), 1024, 1, 256, None),
        (dict(batch__trajectories_per_step=512, data__train_batch_size=64), 64, 8, 64, None),
        (dict(batch__gradient_accumulation_steps=16), 1024, 1, 256, 8),  # 256/2 ranks/16
        (
            dict(batch__gradient_accumulation_steps=16, actor__ppo_micro_batch_size_per_gpu=4),
            1024,
            1,
            128,
            4,
        ),  # ROLL: 16·4·2
        (dict(data__train_batch_size=96), 96, 1, 96, None),
        (dict(actor__ppo_mini_batch_size=100), 1000, 1, 100, None),
    ],
)
def test_the_rest_follows(values, q, n, mini, rows):
    plan = resolve(given(**values))
    assert (plan.prompts_per_step, plan.samples_per_prompt, plan.actor.mini_batch_prompts) == (q, n, mini)
    if rows:
        assert plan.actor.micro.rows == rows


def test_a_default_that_yields_is_said():
    plan = resolve(given(data__train_batch_size=96), prompts=96)
    assert plan.notes == (
        f"{ACTOR}.ppo_mini_batch_size=96: the default 256 yields to data.train_batch_size=96, 2 data ranks",
    )
    lines = {quantity.name: quantity for quantity in plan.quantities}
    assert lines["actor: prompts per optimizer step M"].provenance == "derived"


def test_a_file_yields_to_a_handle_on_the_command_line_and_to_nothing_else():
    values = dict(data__train_batch_size=64, rollout__n=8, actor__ppo_mini_batch_size=32)
    config = given(batch__global_batch_trajectories=128, **values)
    command_line = {"batch.global_batch_trajectories": "command line"}
    assert resolve(config, origins=command_line).actor.mini_batch_prompts == 16
    rule = broken(config)["batch.global_batch_trajectories"].rule
    assert "32·8 = 256 trajectories per optimizer step, not 128" in rule
    config = given(**(values | dict(data__train_batch_size=80)))
    assert f"{ACTOR}.ppo_mini_batch_size" in broken(config, origins={"data.train_batch_size": "command line"})


def test_responses_per_prompt_are_no_matter_of_divisibility():
    config = given(data__train_batch_size=32, actor__ppo_mini_batch_size=32)
    assert set(broken(config, devices=64)) == {"data.train_batch_size"}


@pytest.mark.parametrize(
    ("values", "key", "said", "remedy"),
    [
        (
            dict(batch__trajectories_per_step=500, data__train_batch_size=64, rollout__n=8),
            "batch.trajectories_per_step",
            f"{ROLLOUT}.n=8, data.train_batch_size=64: 64·8 = 512 trajectories per step, not 500",
            "batch.trajectories_per_step=512",
        ),
        (
            dict(
                batch__trajectories_per_step=512,
                batch__global_batch_trajectories=128,
                batch__optimizer_steps_per_step=3,
            ),
            "batch.trajectories_per_step",
            "512/128 = 4 mini-batches per step; 1·4 = 4 optimizer steps per step, not 3",
            "batch.optimizer_steps_per_step=4",
        ),
        (
            dict(batch__global_batch_trajectories=256, data__train_batch_size=100, rollout__n=8),
            "batch.global_batch_trajectories",
            "256/8 = 32 prompts per optimizer step; 100/32 mini-batches per step is not an integer",
            "batch.global_batch_trajectories=200",
        ),
        (
            dict(batch__global_batch_trajectories=7),
            "batch.global_batch_trajectories",
            "7 trajectories cannot be shared equally by 2 data ranks",
            "",
        ),
        (
            dict(batch__gradient_accumulation_steps=4, actor__use_dynamic_bsz=True),
            "batch.gradient_accumulation_steps",
            "as many as the rows need",
            f"{ACTOR}.use_dynamic_bsz=false",
        ),
    ],
)
def test_a_contradiction_names_both_sides(values, key, said, remedy):
    problems = broken(given(**values))
    assert list(problems) == [key]
    assert said in problems[key].rule
    assert remedy in problems[key].remedy


def test_rounds_that_were_not_given_fill_the_step():
    # 64 prompts are 2 rounds of 32: with 2 rounds asked for, one mini-batch each.
    config = given(
        data__train_batch_size=64,
        actor__ppo_mini_batch_size=16,
        async_training__trigger_parameter_sync_step=2,
    )
    assert resolve(config).asynchronous.mini_batches_per_round == 2
    config.async_training.require_batches = 3
    problem = broken(config)["async_training.require_batches"]
    assert "async_training.require_batches=2" in problem.remedy


def test_accumulation_beside_dynamic_micro_batches_hides_and_adds_nothing():
    """The rest is judged as if it were not given: no default mini-batch of 256 is held against 64 prompts,
    and a contradiction of other handles is reported too."""
    values = dict(
        batch__gradient_accumulation_steps=4, actor__use_dynamic_bsz=True, data__train_batch_size=64
    )
    assert set(broken(given(**values))) == {"batch.gradient_accumulation_steps"}
    problems = broken(given(batch__trajectories_per_step=500, rollout__n=8, **values))
    assert set(problems) == {"batch.gradient_accumulation_steps", "batch.trajectories_per_step"}


def test_a_step_too_small_for_its_micro_batches_grows():
    """3 prompts in one mini-batch on 2 ranks with micro-batches of 4: 8 is the nearest step that comes out
    even."""
    values = dict(data__train_batch_size=3, batch__optimizer_steps_per_step=1)
    problems = broken(given(actor__ppo_micro_batch_size_per_gpu=4, **values))
    assert all("data.train_batch_size=8" in problem.remedy.split(" or ")[0] for problem in problems.values())


def test_a_step_that_no_mini_batch_fits_is_reported_instead_of_the_critics_micro_batch():
    """6 rows are the fewest that the critic's 2 ranks cut into micro-batches of 3, and 4 is no multiple."""
    config = configured(data__train_batch_size=4, critic__enable=True, critic__ppo_micro_batch_size_per_gpu=3)
    problems = broken(config)
    assert list(problems) == ["data.train_batch_size"]
    assert problems["data.train_batch_size"].remedy.startswith("data.train_batch_size=6")


def test_a_contradiction_names_the_responses_that_are_part_of_its_reason():
    # 12 prompts in 3 mini-batches are 4·7 = 28 rows each; the critic's 2 ranks need a multiple of 3·2
    values = dict(data__train_batch_size=12, batch__optimizer_steps_per_step=3, rollout__n=7)
    config = configured(critic__enable=True, critic__ppo_micro_batch_size_per_gpu=3, **values)
    problem = broken(config, origins={f"{ROLLOUT}.n": "default"})["batch.optimizer_steps_per_step"]
    assert "4·7 = 28" in problem.rule and f"{ROLLOUT}.n=7" in problem.rule
