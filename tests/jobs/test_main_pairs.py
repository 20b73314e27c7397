"""main_dpo and main_rm: losses and scores are those of Hugging Face's models, row by row and without
batching; they learn, and a reward model is one that transformers opens."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from jobs.command import LOCAL, assert_refused, completed, hydraflow, read_steps
from jobs.conftest import write_lines
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hydraflow.compose.loading import load
from hydraflow.recipes.arithmetic import with_made_assets
from hydraflow.schema import PPOConfig
from hydraflow.trainer.recorded import read_dump

BETA = 0.1


def sums(seed: int, count: int) -> list[dict]:
    """Sums with the right answer and one that is close to it."""
    drawn = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b, off = drawn.randint(1, 99), drawn.randint(1, 99), drawn.choice([-2, -1, 1, 2])
        rows.append(pair(a, b, rejected=a + b + off))
    return rows


def pair(a: int, b: int, *, rejected: int) -> dict:
    return {"prompt": f"{a}+{b}=", "chosen": f"{a + b:03d}", "rejected": f"{rejected:03d}"}


def far_apart(count: int) -> list[dict]:
    """Different sums, each with the right answer and one that is at least 10 away from it."""
    drawn = random.Random(1)
    operands = drawn.sample([(a, b) for a in range(1, 100) for b in range(1, 100)], count)
    rows = []
    for a, b in operands:
        wrong = [answer for answer in range(200) if abs(answer - a - b) >= 10]
        rows.append(pair(a, b, rejected=drawn.choice(wrong)))
    return rows


TRAIN, HELD_OUT = sums(0, 16), sums(1, 5)


@pytest.fixture
def keys(tiny: str, tmp_path: Path) -> list[str]:
    train = write_lines(tmp_path / "train.jsonl", TRAIN)
    val = write_lines(tmp_path / "val.jsonl", HELD_OUT)
    return [
        f"model.path={tiny}",
        f"data.train_files={train}",
        f"data.val_files={val}",
        "data.train_batch_size=8",
        "data.max_length=32",
        "optim.lr=0.003",
        "fsdp_config.dtype=fp32",
        "trainer.total_training_steps=6",
        "trainer.default_local_dir=out",
        "trainer.logger=[file]",
    ]


def tokens(tokenizer, row: dict, side: str) -> tuple[list[int], list[int]]:
    """Prompt and response, with the end token."""
    return tokenizer(row["prompt"])["input_ids"], [
        *tokenizer(row[side])["input_ids"],
        tokenizer.eos_token_id,
    ]


@torch.no_grad()
def log_prob(network, prompt: list[int], response: list[int]) -> float:
    logp = network(torch.tensor([prompt + response])).logits[0].double().log_softmax(-1)
    return sum(float(logp[len(prompt) + i - 1, token]) for i, token in enumerate(response))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_is_that_of_both_models_row_by_row(kind: str, keys: list[str], tiny: str, tmp_path: Path) -> None:
    chosen = [f"dpo.loss_type={kind}", f"dpo.beta={BETA}"]
    completed("main_dpo", *keys, *chosen, *LOCAL, cwd=tmp_path)
    steps = read_steps(tmp_path / "out")
    at_start = math.log(2) if kind == "sigmoid" else (1 / (2 * BETA)) ** 2
    assert steps[0]["train/loss"] == pytest.approx(at_start, rel=1e-6)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    trained = [step for step in steps if "train/loss" in step]
    assert all(0 < step["perf/mfu/ref_infer"] < 1 and step["perf/mfu/train"] > 0 for step in trained)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final_model")
    ref, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    gaps = []
    for row in HELD_OUT:
        good, bad = (tokens(tokenizer, row, side) for side in ("chosen", "rejected"))
        gaps.append(
            log_prob(policy, *good) - log_prob(ref, *good) - log_prob(policy, *bad) + log_prob(ref, *bad)
        )
    ipo = [(gap - 1 / (2 * BETA)) ** 2 for gap in gaps]
    dpo = [math.log1p(math.exp(-BETA * gap)) for gap in gaps]
    expected = dpo if kind == "sigmoid" else ipo
    assert steps[-1]["val/loss"] == pytest.approx(sum(expected) / len(gaps), rel=1e-5)
    assert steps[-1]["val/margin"] == pytest.approx(BETA * sum(gaps) / len(gaps), rel=1e-3, abs=1e-6)
    assert steps[-1]["val/accuracy"] == sum(gap > 0 for gap in gaps) / len(gaps)


@pytest.mark.slow
def test_no_number_depends_on_how_pairs_are_split(keys: list[str], tmp_path: Path) -> None:
    """Micro-batches of as many tokens as one pair has; two processes, and micro-batches of one pair."""
    of_one_pair = ["data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=1"]
    splits = {
        "whole": LOCAL,
        "tokens": [*LOCAL, "data.max_token_len_per_gpu=64"],
        "ranks": ["trainer.n_gpus_per_node=2", "trainer.threads_per_process=1", *of_one_pair],
    }
    found = {}
    for name, more in splits.items():
        given = [*keys, *more, f"trainer.default_local_dir={name}", "trainer.save_final_model=false"]
        completed("main_dpo", *given, cwd=tmp_path)
        found[name] = read_steps(tmp_path / name)
    for name in ("train/loss", "train/grad_norm", "train/margin"):
        whole = [row[name] for row in found["whole"]]
        for other in found.values():
            assert [row[name] for row in other] == pytest.approx(whole, rel=2e-4, abs=1e-6)


@pytest.fixture
def reward_model(keys: list[str], tmp_path: Path) -> Path:
    """The run folder of main_rm on rows with margins, which it also measures; it learns them."""
    rows = [row | {"margin": 0.25} for row in TRAIN]
    write_lines(tmp_path / "train.jsonl", rows)
    write_lines(tmp_path / "val.jsonl", rows)
    given = [*keys, *LOCAL, "optim.lr=0.01", "trainer.total_training_steps=80"]
    completed("main_rm", *given, cwd=tmp_path)
    return tmp_path / "out"


def score(model, ids: list[int]) -> float:
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


@pytest.mark.slow
def test_a_reward_model_scores_as_transformers_does(reward_model: Path, tiny: str, tmp_path: Path) -> None:
    """On the pairs that it was trained on, and on the responses of a run of reinforcement learning whose data
    source has no reward function."""
    steps, folder = read_steps(reward_model), reward_model / "final_model"
    assert steps[-1]["val/accuracy"] >= 0.9 > 0.75 >= steps[0]["train/accuracy"]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chosen, rejected = (
        torch.tensor([score(model, sum(tokens(tokenizer, row, side), [])) for row in TRAIN])
        for side in ("chosen", "rejected")
    )
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - 0.25).mean()
    assert steps[-1]["val/loss"] == pytest.approx(float(loss), rel=1e-3)
    assert steps[-1]["val/chosen_score"] == pytest.approx(float(chosen.mean()), rel=1e-4, abs=1e-5)

    truth = {"style": "model", "ground_truth": ""}
    asked = [{"prompt": row["prompt"], "data_source": "sums", "reward_model": truth} for row in TRAIN]
    write_lines(tmp_path / "prompts.jsonl", asked)
    given = [
        f"actor_rollout_ref.model.path={tiny}",
        "data.train_files=prompts.jsonl",
        "data.train_batch_size=16",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={folder}",
        "trainer.total_training_steps=1",
        "trainer.default_local_dir=run",
        "trainer.debug.save_rollouts=dump",
        "trainer.save_final_model=false",
    ]
    completed("main_ppo", *given, *LOCAL, cwd=tmp_path)
    said = read_dump(tmp_path / "dump" / "step_1.safetensors")[0]
    whole = zip(said.get("prompts").unbind(), said.get("responses").unbind(), strict=True)
    expected = torch.tensor(
        [score(model, [*prompt.tolist(), *response.tolist()]) for prompt, response in whole]
    )
    scores = said.get("score")
    assert len(said) == 32 and said.get("acc").isnan().all()
    assert float((scores - expected).abs().max()) < 0.05 * float(expected.std())  # it computes in bf16
    assert read_steps(tmp_path / "run")[-1]["critic/score/mean"] == pytest.approx(
        float(scores.mean()), rel=1e-5
    )


@pytest.mark.slow
def test_a_reward_model_must_have_a_head_and_the_policys_tokens(tiny: str, tmp_path: Path) -> None:
    truth = {"style": "model", "ground_truth": ""}
    row = {"prompt": "1+1=", "data_source": "sums", "reward_model": truth}
    file = write_lines(tmp_path / "prompts.jsonl", [row])
    policy = [f"actor_rollout_ref.model.path={tiny}", f"data.train_files={file}"]
    policy += ["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1", *LOCAL]
    policy += ["reward.reward_model.enable=true"]
    for path, message in ((tiny, "has no score.weight"), ("nowhere", "nowhere")):
        done = hydraflow("main_ppo", *policy, f"reward.reward_model.model_path={path}", cwd=tmp_path)
        assert_refused(done, "reward.reward_model.model_path", message)
    assert_refused(hydraflow("main_ppo", *policy, cwd=tmp_path), "reward.reward_model.model_path=null")


@pytest.mark.slow
def test_with_adapters_the_model_is_its_own_reference(keys: list[str], tmp_path: Path) -> None:
    completed("main_dpo", *keys, "model.lora_rank=4", *LOCAL, cwd=tmp_path)
    steps = read_steps(tmp_path / "out")
    assert steps[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert steps[-1]["train/loss"] < math.log(2)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_last_bit(keys: list[str], tmp_path: Path) -> None:
    more = [*keys, *LOCAL, "trainer.save_freq=3"]
    assert hydraflow("main_dpo", *more, cwd=tmp_path).returncode == 0
    stopped = [*more, "trainer.default_local_dir=again"]
    assert hydraflow("main_dpo", *stopped, "trainer.total_training_steps=3", cwd=tmp_path).returncode == 0
    assert hydraflow("main_dpo", *stopped, cwd=tmp_path).returncode == 0
    names = ("train/loss", "train/grad_norm", "train/margin")
    whole, again = (
        [[row[name] for name in names] for row in read_steps(tmp_path / folder)]
        for folder in ("out", "again")
    )
    assert whole == again


@pytest.mark.slow
def test_a_mistake_is_one_message(keys: list[str], tmp_path: Path) -> None:
    rows = [dict(TRAIN[0]), TRAIN[1] | {"rejected": TRAIN[1]["chosen"]}]
    write_lines(tmp_path / "train.jsonl", rows)
    done = hydraflow("main_dpo", *keys, "data.train_batch_size=1", *LOCAL, cwd=tmp_path)
    assert_refused(done, "row 1", "chosen and rejected are the same")
    del rows[0]["rejected"]
    write_lines(tmp_path / "train.jsonl", rows)
    done = hydraflow("main_dpo", *keys, "data.train_batch_size=1", *LOCAL, cwd=tmp_path)
    assert_refused(done, "row 0", "has no value in column rejected; it has prompt, chosen")
    done = hydraflow("main_rm", *keys, "data.train_batch_size=9", "data.chosn_key=x", cwd=tmp_path)
    assert_refused(done, "data.chosn_key", "data.chosen_key")
    assert json.loads((tmp_path / "train.jsonl").read_text().splitlines()[1]) == rows[1]


def made_model(recipe: list[str]) -> str | None:
    """The recipe's model, if there is one."""
    return with_made_assets(load("ppo", PPOConfig, recipe)).actor_rollout_ref.model.path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("command", "rate", "steps"), [("main_dpo", 2e-4, 25), ("main_rm", 2e-4, 75)])
def test_preferences_are_learned_from_the_recipes_model(
    command: str, rate: float, steps: int, recipe_cache: Path, tmp_path: Path
) -> None:
    """In one epoch. Held-out pairs of sums that the training set does not have; half of them are right by
    chance."""
    recipe = ["recipe=arithmetic", f"recipe.cache_dir={recipe_cache}", *LOCAL]
    if not (model := made_model(recipe)):
        only = ["trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.save_final_model=false"]
        completed("main_ppo", *recipe, *only, cwd=tmp_path, timeout=800)
        model = made_model(recipe)
    rows = far_apart(256 + 32 * steps)
    train = write_lines(tmp_path / "train.jsonl", rows[256:])
    val = write_lines(tmp_path / "val.jsonl", rows[:256])
    keys = [f"model.path={model}", f"data.train_files={train}", f"data.val_files={val}", f"optim.lr={rate}"]
    keys += ["data.train_batch_size=32", "data.max_length=32", "fsdp_config.dtype=fp32"]
    keys += [f"trainer.total_training_steps={steps}", "trainer.test_freq=-1", "trainer.logger=[file]"]
    keys += ["trainer.save_final_model=false", "trainer.default_local_dir=out"]
    completed(command, *keys, *LOCAL, cwd=tmp_path, timeout=800)
    accuracy = [row["val/accuracy"] for row in read_steps(tmp_path / "out") if "val/accuracy" in row]
    assert accuracy[-1] >= 0.75
