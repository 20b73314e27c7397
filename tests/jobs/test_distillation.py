"""Teachers judge every sampled token: their term of the loss is that of Hugging Face's models, each row has
the teacher of its data source, and the policy comes nearer to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from jobs.command import LOCAL, assert_refused, completed, hydraflow, read_numbers, read_steps
from jobs.conftest import write_lines
from transformers import AutoModelForCausalLM

from hydraflow.models.tiny import make_model
from hydraflow.trainer.recorded import read_dump

LOSS = "distillation.distillation_loss"
SUMS = ["1+1=", "17+25=", "60+60=", "9+9="]


@pytest.fixture
def keys(tiny: str, tmp_path: Path) -> list[str]:
    """Rows of two data sources, in turn."""
    truth = {"style": "rule", "ground_truth": "2"}
    rows = [
        {"prompt": text, "data_source": source, "reward_model": truth}
        for text, source in zip(SUMS, ["arithmetic", "openai/gsm8k"] * 2, strict=True)
    ]
    return [
        f"actor_rollout_ref.model.path={tiny}",
        f"data.train_files={write_lines(tmp_path / 'prompts.jsonl', rows)}",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
        "actor_rollout_ref.ref.fsdp_config.dtype=fp32",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "algorithm.adv_estimator=grpo",
        "trainer.default_local_dir=out",
        "trainer.save_final_model=false",
        "distillation.enabled=true",
        "distillation.distillation_loss.use_task_rewards=false",
        "distillation.distillation_loss.loss_mode=k1+",
    ]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Another model with the policy's tokenizer."""
    return make_model(tmp_path / "teacher", hidden=16, layers=1, heads=2, kv_heads=1, seed=7)


@torch.no_grad()
def log_probs(network, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    logits = network(torch.cat([prompt, response])[None]).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, response[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("in_advantages", [False, True])
def test_the_term_is_that_of_both_models_and_falls(
    in_advantages: bool, keys: list[str], teacher: Path, tiny: str, tmp_path: Path
) -> None:
    """The policy itself teaches one data source: there the term is 0."""
    given = [f"+distillation.teachers={{openai/gsm8k:{tiny},default:{teacher}}}"]
    given += ["trainer.debug.save_rollouts=dump", "trainer.total_training_steps=8"]
    given += [f"distillation.distillation_loss.use_policy_gradient={in_advantages}".lower()]
    completed("main_ppo", *keys, *given, *LOCAL, cwd=tmp_path)
    steps = [row for row in read_steps(tmp_path / "out") if row["step"]]
    rows = read_dump(tmp_path / "dump" / "step_1.safetensors")[0]
    policy, other = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny, teacher))
    gaps, names = [], ("prompts", "responses")
    sources = rows.non_tensor_batch["data_source"].tolist()
    for prompt, response, source in zip(*(rows.get(name).unbind() for name in names), sources, strict=True):
        gap = log_probs(policy, prompt, response) - log_probs(other, prompt, response)
        gaps.append(gap if source == "arithmetic" else torch.zeros_like(gap))
    expected = float(torch.cat(gaps).mean())
    assert all(row["perf/mfu/teacher_infer"] > 0 for row in steps)
    if in_advantages:
        assert steps[0]["critic/advantages/mean"] == pytest.approx(-expected, rel=1e-4)
        return
    terms = [row["actor/distillation_loss"] for row in steps]
    assert terms[0] == pytest.approx(expected, rel=1e-4)
    assert terms[-1] < 0.8 * terms[0]


@pytest.mark.slow
def test_teachers_alone_need_no_reward_function(keys: list[str], teacher: Path, tmp_path: Path) -> None:
    rows = [{"prompt": text, "data_source": "mine", "reward_model": {"ground_truth": ""}} for text in SUMS]
    given = [f"data.train_files={write_lines(tmp_path / 'mine.jsonl', rows)}"]
    given += [f"+distillation.teachers.default={teacher}", "trainer.total_training_steps=1"]
    completed("main_ppo", *keys, *given, *LOCAL, cwd=tmp_path)
    (step,) = [row for row in read_steps(tmp_path / "out") if row["step"]]
    assert step["critic/score/mean"] == 0 and step["actor/grad_norm"] > 0
    rewarded = hydraflow("main_ppo", *keys, *given, f"{LOSS}.use_task_rewards=true", *LOCAL, cwd=tmp_path)
    assert_refused(rewarded, "data_source=mine: has no built-in reward function")


@pytest.mark.slow
def test_teachers_alone_teach_rows_whose_reward_function_fails(
    keys: list[str], teacher: Path, tmp_path: Path
) -> None:
    """All fail, which would end another run; the numbers are those of a run whose function returns 0."""
    start = "def compute_score(data_source, solution_str, ground_truth, extra_info):"
    (tmp_path / "fails.py").write_text(f"{start}\n    raise ValueError('no such thing')\n")
    (tmp_path / "works.py").write_text(f"{start}\n    return 0.0\n")
    given = [f"+distillation.teachers.default={teacher}", "trainer.total_training_steps=2"]
    found = {}
    for name in ("fails", "works"):
        own = [f"reward.custom_reward_function.path={name}.py", f"trainer.default_local_dir={name}"]
        done = completed("main_ppo", *keys, *given, *own, *LOCAL, cwd=tmp_path)
        assert ("scoring failed on 16 of 16 rows, and 0 have no score" in done.stderr) == (name == "fails")
        found[name] = [row for row in read_numbers(tmp_path / name) if row["step"]]
    assert [row.pop("reward/failed_rows") for row in found["fails"]] == [16, 16]
    assert [row.pop("reward/failed_rows") for row in found["works"]] == [0, 0]
    assert found["fails"] == found["works"] and found["fails"][0]["actor/grad_norm"] > 0


def in_buckets(probabilities: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(N, K + 1): of the chosen tokens, and of all others together."""
    found = probabilities.gather(1, chosen)
    return torch.cat([found, 1 - found.sum(1, keepdim=True)], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "most"),
    [("forward_kl_topk", 5), ("reverse_kl_topk", 5), ("forward_kl", None), ("reverse_kl", None)],
)
def test_a_divergence_and_its_gradient_are_those_of_both_models(
    mode: str, most: int | None, keys: list[str], teacher: Path, tiny: str, tmp_path: Path
) -> None:
    """The first step's, against Hugging Face's models and autograd; then the policy comes nearer."""
    given = [f"+distillation.teachers={{openai/gsm8k:{tiny},default:{teacher}}}", f"{LOSS}.loss_mode={mode}"]
    given += ["trainer.debug.save_rollouts=dump", "trainer.total_training_steps=6"]
    given += ["actor_rollout_ref.actor.optim.lr=0.001"]
    given += [f"{LOSS}.topk={most}"] if most else []
    done = completed("main_ppo", *keys, *given, *LOCAL, cwd=tmp_path)
    assert "every advantage is the same" not in done.stdout + done.stderr
    steps = [row for row in read_steps(tmp_path / "out") if row["step"]]
    rows = read_dump(tmp_path / "dump" / "step_1.safetensors")[0]
    policy, other = (AutoModelForCausalLM.from_pretrained(path).double() for path in (tiny, teacher))
    found, names = [], ("prompts", "responses")
    sources = rows.non_tensor_batch["data_source"].tolist()
    for prompt, response, source in zip(*(rows.get(name).unbind() for name in names), sources, strict=True):
        models = policy, other if source == "arithmetic" else policy
        logits = [one(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] for one in models]
        p, q = logits[0].softmax(-1), logits[1].detach().softmax(-1)
        if most:
            chosen = q.topk(most).indices
            p, q = (in_buckets(one, chosen) for one in (p, q))
        p, q = (q, p) if mode.startswith("forward") else (p, q)
        found.append((p * (p.log() - q.log())).sum(-1))
    loss = torch.cat(found).mean()
    gradient = torch.autograd.grad(loss, list(policy.parameters()))
    assert steps[0]["actor/distillation_loss"] == pytest.approx(loss.item(), rel=1e-4)
    norm = torch.cat([one.flatten() for one in gradient]).norm().item()
    assert steps[0]["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert steps[-1]["actor/distillation_loss"] < 0.9 * steps[0]["actor/distillation_loss"]
    assert "actor/pg_loss" not in steps[0] and 0 < steps[0]["actor/distillation_policy_mass"] <= 1.0001


@pytest.mark.slow
def test_a_teacher_may_have_more_tokens_than_the_policy_but_not_fewer(
    keys: list[str], tiny: str, tmp_path: Path
) -> None:
    """Families fill up their vocabularies differently. What the teacher gives to tokens that the policy does
    not have is in the bucket."""
    wide = tmp_path / "wide"
    shutil.copytree(tiny, wide)
    other = AutoModelForCausalLM.from_pretrained(tiny)
    other.resize_token_embeddings(24)
    other.save_pretrained(wide)
    whole = [f"{LOSS}.loss_mode=reverse_kl", "trainer.debug.save_rollouts=dump"]
    given = [*whole, f"+distillation.teachers.default={wide}", "trainer.total_training_steps=1"]
    completed("main_ppo", *keys, *given, *LOCAL, cwd=tmp_path)
    rows = read_dump(tmp_path / "dump" / "step_1.safetensors")[0]
    policy, found = AutoModelForCausalLM.from_pretrained(tiny).double(), []
    for prompt, response in zip(rows.get("prompts").unbind(), rows.get("responses").unbind(), strict=True):
        text, places = torch.cat([prompt, response])[None], slice(len(prompt) - 1, -1)
        p, q = (one(text).logits[0, places].softmax(-1) for one in (policy, other.double()))
        found.append((p * (p / q[:, : p.shape[1]]).log()).sum(-1))
    step = next(row for row in read_steps(tmp_path / "out") if row["step"])
    assert step["actor/distillation_loss"] == pytest.approx(torch.cat(found).mean().item(), rel=1e-3)
    narrow = [f"actor_rollout_ref.model.path={wide}", f"+distillation.teachers.default={tiny}"]
    for mode in ("k1", "reverse_kl_topk"):
        refused = hydraflow("main_ppo", *keys, *narrow, f"{LOSS}.loss_mode={mode}", *LOCAL, cwd=tmp_path)
        assert_refused(refused, "has 17 tokens, and the policy may sample one of 24", "teachers.default=")


@pytest.mark.slow
def test_a_teacher_makes_an_untrained_student_right(
    keys: list[str], prompts: Path, sft_run: Path, tmp_path: Path
) -> None:
    """The teacher knows four sums by heart; nothing else says which answer is right."""
    given = [f"+distillation.teachers.default={sft_run / 'final_model'}", f"{LOSS}.loss_mode=forward_kl"]
    given += [f"data.train_files={prompts}", f"data.val_files={prompts}", "trainer.test_freq=-1"]
    given += ["actor_rollout_ref.rollout.n=8", "trainer.total_training_steps=60", "trainer.logger=[file]"]
    completed("main_ppo", *keys, *given, *LOCAL, cwd=tmp_path)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["first_val_accuracy"] <= 0.25 and summary["last_val_accuracy"] >= 0.75


@pytest.mark.slow
def test_a_mistake_is_one_message(keys: list[str], teacher: Path, tmp_path: Path) -> None:
    def refused(*words: str, given: list[str]) -> None:
        assert_refused(hydraflow("main_ppo", *keys, *given, *LOCAL, cwd=tmp_path), *words)

    refused("distillation.teachers={}", "+distillation.teachers.default=path", given=[])
    alone = [f"+distillation.teachers={{openai/gsm8k:{teacher}}}"]
    refused("there is no teacher for data source arithmetic", given=alone)
    refused("distillation.teachers.default=nowhere", given=["+distillation.teachers.default=nowhere"])
    right = f"+distillation.teachers.default={teacher}"
    whole = [right, f"{LOSS}.loss_mode=reverse_kl"]
    refused("is not an estimate from the sampled token", given=[*whole, f"{LOSS}.use_policy_gradient=true"])
    many = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=2000000", "data.max_response_length=40"]
    refused("GiB for", f"{LOSS}.loss_mode=reverse_kl_topk", given=[*whole, *many])
    config = teacher / "tokenizer.json"
    config.write_text(config.read_text().replace('"+"', '"&"'))
    refused("its tokenizer differs from the policy's", given=[f"+distillation.teachers.default={teacher}"])
