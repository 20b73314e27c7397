"""Messages that users of other trainers ask about: each mistake is found before anything starts, with numbers
and a remedy.

The console blocks of `docs/faq.md` are run, and must print what the document shows; every remedy in them
repairs its command.
"""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from batch_plan.overrides import alternatives, plan_of, refusal

from hydraflow.errors import Problem
from hydraflow.plan import main as plan_main

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
PROGRAM = "$ python -m hydraflow.plan "
OMITTED = "..."
POLICY = "actor_rollout_ref"
ACTOR, REF, ROLLOUT = f"{POLICY}.actor", f"{POLICY}.ref", f"{POLICY}.rollout"
GRPO = {"algorithm.adv_estimator": "grpo"}


# --- the document --------------------------------------------------


def blocks() -> list[tuple[str, list[str]]]:
    """Command and the lines that it prints, for each console block."""
    found = [block.splitlines() for block in re.findall(r"```console\n(.*?)```", DOCUMENT, re.DOTALL)]
    return [(lines[0], lines[1:]) for lines in found]


def printed(command: str) -> tuple[int, list[str]]:
    """Exit code and lines of a command."""
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["plan", *shlex.split(command.removeprefix(PROGRAM))])
        patch.setenv("COLUMNS", "1000")  # the page wraps long lines itself
        code = plan_main()
    return code, [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(("command", "shown"), blocks(), ids=[f"block {k}" for k, _ in enumerate(blocks())])
def test_the_document_shows_what_is_printed(command: str, shown: list[str]) -> None:
    """All of it, with exit code 2; or where a block has lines of `...`, the lines around them, with 0, or 1
    where the plan does not fit."""
    assert command.startswith(PROGRAM)
    code, lines = printed(command)
    if OMITTED in shown:
        assert code == any("DOES NOT FIT" in line for line in shown)
        assert [line for line in lines if line in shown] == [line for line in shown if line != OMITTED]
    else:
        assert (code, lines) == (2, shown)


@pytest.mark.parametrize("command", [command for command, shown in blocks() if "1 problem found" in shown[0]])
def test_pasting_the_first_remedy_repairs_the_command(command: str) -> None:
    (remedy,) = [
        line.partition("-> ")[2] for line in dict(blocks())[command] if line.lstrip().startswith("-> ")
    ]
    assert printed(f"{command} {remedy.partition(' or ')[0]}")[0] == 0


def test_the_table_points_to_sections() -> None:
    headings = {
        re.sub(r"[^a-z -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^### (.*)$", DOCUMENT, re.MULTILINE)
    }
    links = re.findall(r"\]\(#([a-z-]+)\)", DOCUMENT)
    assert len(links) > 10
    assert set(links) == headings


# --- the messages, one by one --------------------------------------------------


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def repairs(settings: dict[str, Any], problems: list[Problem]) -> None:
    """The first remedies together give a plan."""
    assert not refusal(
        settings | {key: value for problem in problems for key, value in alternatives(problem)[0].items()}
    )


@pytest.mark.parametrize(
    ("mapping", "nodes", "numbers"),
    [
        ("0-15", 1, ["8-15", "0-7"]),  # beyond: ROLL asks for a second machine that is not there
        ("list(range(0,16))", 1, ["8-15", "0-7"]),  # as ROLL writes it
        ("0-7", 2, ["8-15", "0-15"]),  # below: the second machine has no role
        (["0-3", "6-7"], 1, ["4-5", "0-7"]),  # a hole
        ("1-8", 1, ["8", "0-7"]),  # counted from one
    ],
)
def test_roll_node2pg_key_error(mapping: object, nodes: int, numbers: list[str]) -> None:
    settings = GRPO | {
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": 8,
        f"{ACTOR}.device_mapping": mapping,
    }
    problem = only(refusal(settings))
    assert problem.field == f"{ACTOR}.device_mapping"
    assert all(number in problem.rule for number in numbers)
    repairs(settings, [problem])


def test_roll_lr_decay_steps() -> None:
    """64 devices, p=1, g=32, 32 prompts, n=1, 10 steps: ROLL's nested divisions give a schedule of 0
    steps."""
    settings = GRPO | {
        "trainer.nnodes": 8,
        "trainer.n_gpus_per_node": 8,
        "trainer.total_training_steps": 10,
        "data.train_batch_size": 32,
        f"{ROLLOUT}.n": 1,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
        "batch.gradient_accumulation_steps": 32,
    }
    problems = refusal(settings)
    assert any("32" in problem.rule and "64" in problem.rule for problem in problems)
    repairs(settings, problems)


def test_a_plan_has_optimizer_steps_and_says_how_many() -> None:
    """2048 rows a step, 10 steps, 1 optimizer step each: 10 steps for the schedule, none lost by rounding."""
    plan = plan_of(
        GRPO
        | {
            "trainer.total_training_steps": 10,
            "data.train_batch_size": 2048,
            f"{ACTOR}.ppo_mini_batch_size": 2048,
        }
    )
    assert (plan.total_steps, plan.actor.total_optimizer_steps, plan.actor.decay_steps) == (10, 10, 10)
    problem = only(refusal(GRPO | {"data.train_batch_size": 1024}, prompts=1000))
    assert (problem.field, "1000" in problem.rule) == ("data.train_batch_size", True)


SIXTY_FOUR = {
    "trainer.nnodes": 8,
    "trainer.n_gpus_per_node": 8,
    "data.train_batch_size": 32,
    f"{ROLLOUT}.n": 1,
    f"{ACTOR}.ppo_mini_batch_size": 32,
}
SPLIT_ACTOR = {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2}
SPLIT_ROLLOUT = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("role", "settings"),
    [
        ("actor", GRPO | SPLIT_ROLLOUT),
        ("rollout", GRPO | SPLIT_ACTOR),
        ("critic", {"algorithm.adv_estimator": "gae"} | SPLIT_ACTOR | SPLIT_ROLLOUT),
        (
            "ref",
            GRPO
            | SPLIT_ACTOR
            | SPLIT_ROLLOUT
            | {f"{ACTOR}.use_kl_loss": True, f"{REF}.fsdp_config.ulysses_sequence_parallel_size": 1},
        ),
        (
            "reward_model",
            GRPO
            | SPLIT_ACTOR
            | SPLIT_ROLLOUT
            | {"reward.reward_model.enable": True, "reward.reward_model.model_path": "model"},
        ),
    ],
)
def test_roll_batch_size_32_below_chunks_64(role: str, settings: dict[str, Any]) -> None:
    """32 rows; only the named role has 64 data ranks, the others share a row between two devices."""
    settings = SIXTY_FOUR | settings
    problem = only(refusal(settings))
    assert "32" in problem.rule and "64" in problem.rule and role in problem.rule
    repairs(settings, [problem])


def test_roll_accumulation_after_the_first_rollout() -> None:
    """(S/DP) % (p·g): 64·8/16 = 32 rows a rank, 1·24 do not divide them."""
    settings = GRPO | {
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 8,
        "data.train_batch_size": 64,
        f"{ROLLOUT}.n": 8,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
        "batch.gradient_accumulation_steps": 24,
    }
    problem = only(refusal(settings))
    assert "batch.gradient_accumulation_steps=24" in str(problem)
    repairs(settings, [problem])


def test_slime_devices_that_do_not_add_up() -> None:
    """Training on 8 and sampling on 8 more, on one machine of 8: Ray waits for ever."""
    settings = GRPO | {
        "cluster.nodes": 1,
        "cluster.devices_per_node": 8,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 8,
        f"{ROLLOUT}.nnodes": 1,
        f"{ROLLOUT}.n_gpus_per_node": 8,
        f"{ROLLOUT}.name": "vllm",
    }
    problem = only(refusal(settings))
    assert "trainer 1 + rollout 1 = 2" in problem.rule
    for alternative in alternatives(problem):
        assert not refusal(settings | alternative)


def test_slime_trailing_rollouts() -> None:
    """100·8 = 800 rollouts make 3 steps of 256; slime drops the other 32 in silence."""
    settings = GRPO | {
        "trainer.n_gpus_per_node": 8,
        "data.train_batch_size": 100,
        f"{ROLLOUT}.n": 8,
        "batch.global_batch_trajectories": 256,
    }
    problem = only(refusal(settings))
    assert "batch.global_batch_trajectories=256" in str(problem)
    assert "100" in problem.rule
    repairs(settings, [problem])


def test_prompts_that_fill_no_step_are_said() -> None:
    """1000 prompts in steps of 64: 15 steps, 40 prompts are left over."""
    settings = GRPO | {"data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 64}
    notes = [note for note in plan_of(settings, prompts=1000).notes if "40" in note and "1000" in note]
    assert len(notes) == 1
    assert not [note for note in plan_of(settings, prompts=960).notes if "prompts" in note]


def test_trinity_mini_batch_is_not_overwritten() -> None:
    """128 experiences an update are 32 prompts of 4: a ppo_mini_batch_size of 64 contradicts, and is not
    replaced in silence."""
    settings = GRPO | {
        "trainer.n_gpus_per_node": 4,
        "data.train_batch_size": 64,
        f"{ROLLOUT}.n": 4,
        "batch.global_batch_trajectories": 128,
        f"{ACTOR}.ppo_mini_batch_size": 64,
    }
    problem = only(refusal(settings))
    assert "batch.global_batch_trajectories=128" in str(problem)
    assert f"{ACTOR}.ppo_mini_batch_size=64" in str(problem)
    for alternative in alternatives(problem):
        assert not refusal(settings | alternative)


def test_trinity_per_device_semantics() -> None:
    """128 experiences on 4 data ranks are 32 each, 4 micro-batches of 8; 84 cannot be shared by 8."""
    settings = GRPO | {
        "trainer.n_gpus_per_node": 4,
        "data.train_batch_size": 64,
        f"{ROLLOUT}.n": 4,
        "batch.global_batch_trajectories": 128,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
    }
    actor = plan_of(settings).actor
    assert (actor.mini_batch_prompts, actor.rows_per_rank, actor.accumulation_steps) == (32, 32, 4)
    broken = settings | {
        "trainer.n_gpus_per_node": 8,
        "data.train_batch_size": 63,
        "batch.global_batch_trajectories": 84,
    }
    problems = refusal(broken)
    assert any("84" in str(problem) and "8 data ranks" in problem.rule for problem in problems)
    repairs(broken, problems)


@pytest.mark.parametrize(
    ("changed", "numbers"),
    [
        (
            {"data.train_batch_size": 100, f"{ACTOR}.ppo_mini_batch_size": 64},
            ["100"],
        ),  # verl pads the second of two optimizer steps
        (
            {f"{ACTOR}.ppo_mini_batch_size": 12, "data.train_batch_size": 60, f"{ROLLOUT}.n": 5},
            ["60", "8 data ranks"],
        ),  # 12·5 on 8
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 12}, ["32·8/8 = 32"]),
        ({"data.train_batch_size": 128, f"{ACTOR}.ppo_mini_batch_size": 256}, ["128"]),
    ],
)
def test_verl_train_mini_micro(changed: dict[str, Any], numbers: list[str]) -> None:
    """64 prompts, 8 responses, mini-batches of 32 prompts, 8 data ranks; each case breaks one division."""
    even = GRPO | {
        "trainer.n_gpus_per_node": 8,
        "data.train_batch_size": 64,
        f"{ROLLOUT}.n": 8,
        f"{ACTOR}.ppo_mini_batch_size": 32,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    }
    plan = plan_of(even)
    assert (
        plan.trajectories_per_step,
        plan.actor.optimizer_steps_per_step,
        plan.actor.accumulation_steps,
    ) == (512, 2, 8)
    problem = only(refusal(even | changed))
    assert all(number in problem.rule for number in numbers)
    for alternative in alternatives(problem):
        assert not refusal(even | changed | alternative)


def test_verl_agent_workers_need_no_divisor() -> None:
    """512 trajectories for 7 workers: verl's chunk fails, here the largest share is 74."""
    settings = GRPO | {
        "data.train_batch_size": 64,
        f"{ROLLOUT}.n": 8,
        f"{ACTOR}.ppo_mini_batch_size": 64,
        f"{ROLLOUT}.agent.num_workers": 7,
    }
    agent = plan_of(settings).agent
    assert (agent.workers, agent.trajectories_per_worker) == (7, 74)


def test_a_row_above_the_token_budget() -> None:
    """ROLL meets it after the first rollout, verl in the worker: 1024 + 8192 tokens in a budget of 1024."""
    settings = GRPO | {
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 1024,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 8192,
    }
    problem = only(refusal(settings))
    assert "1024 + 8192 = 9216" in problem.rule
    repairs(settings, [problem])
