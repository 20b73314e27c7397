"""main_sft: its losses are those that Hugging Face's model gives for the assistant's tokens, and it
learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs.command import LOCAL, assert_refused, completed, hydraflow, read_steps
from jobs.conftest import LEARNT, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from hydraflow.compose.loading import load
from hydraflow.errors import ConfigError
from hydraflow.jobs.sft import run_sft
from hydraflow.schema import SFTConfig

Turns = list[tuple[str, str]]
"""(question, answer) of one conversation."""


def loss_by_hand(model: str | Path, conversations: list[Turns]) -> float:
    """Mean negative log-probability of every token of an answer and of the end token after it, without
    batching."""
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    losses = []
    for turns in conversations:
        ids: list[int] = []
        trained: list[bool] = []
        for question, answer in turns:
            asked, said = (
                tokenizer(question)["input_ids"],
                [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id],
            )
            ids, trained = ids + asked + said, trained + [False] * len(asked) + [True] * len(said)
        with torch.no_grad():
            log_probs = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-float(log_probs[t - 1, ids[t]]) for t in range(1, len(ids)) if trained[t]]
    return sum(losses) / len(losses)


def turns_of(path: Path) -> list[Turns]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if "prompt" in rows[0]:
        return [[(row["prompt"], row["response"])] for row in rows]
    said = [[message["content"] for message in row["messages"]] for row in rows]
    return [list(zip(texts[::2], texts[1::2])) for texts in said]


@pytest.mark.slow
def test_the_loss_is_that_of_the_assistants_tokens(
    sft_run: Path, tiny: str, conversations: Path, pairs: Path
) -> None:
    steps = read_steps(sft_run)
    assert [row["step"] for row in steps] == list(range(1, 61))
    assert steps[0]["train/loss"] == pytest.approx(loss_by_hand(tiny, turns_of(conversations)), rel=1e-5)
    assert steps[-1]["val/loss"] == pytest.approx(
        loss_by_hand(sft_run / "final_model", turns_of(pairs)), rel=1e-4, abs=1e-6
    )
    assert [row["step"] for row in steps if "val/loss" in row] == [30, 60]


@pytest.mark.slow
def test_it_learns_and_leaves_what_it_promises(sft_run: Path) -> None:
    assert read_steps(sft_run)[-1]["val/accuracy"] == 1.0, (
        "every answer's every token is the most probable one"
    )
    assert json.loads((sft_run / "summary.json").read_text())["why_it_ended"] == "all steps done"
    assert json.loads((sft_run / "plan.json").read_text())["conversations_per_step"] == 4
    assert AutoTokenizer.from_pretrained(sft_run / "final_model").chat_template


@pytest.mark.slow
def test_padding_and_the_number_of_processes_change_nothing(
    sft_run: Path, sft_keys: list[str], tmp_path: Path
) -> None:
    keys = [*sft_keys, *LOCAL, "model.use_remove_padding=false", "data.use_dynamic_bsz=false"]
    keys += [
        "data.micro_batch_size_per_gpu=2",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir={tmp_path}",
    ]
    keys += ["trainer.save_final_model=false", "trainer.logger=[file]"]
    completed("main_sft", *keys, cwd=tmp_path)
    packed, padded = read_steps(sft_run)[:3], read_steps(tmp_path)
    assert len(padded) == 3 and not (tmp_path / "final_model").exists()
    for name in ("train/loss", "train/grad_norm"):
        assert [row[name] for row in padded] == pytest.approx([row[name] for row in packed], rel=1e-4)


@pytest.mark.slow
def test_a_command_line_of_verl_trains(tiny: str, tmp_path: Path) -> None:
    """One of fsdp_sft_trainer, with the columns of verl's GSM8K files."""
    rows = [{"extra_info": {"question": asked, "answer": said}} for asked, said in LEARNT.items()]
    file = write_lines(tmp_path / "train.jsonl", rows)
    words = [
        f"data.train_files={file}",
        f"data.val_files={file}",
        "data.prompt_key=extra_info",
        "data.response_key=extra_info",
        "data.prompt_dict_keys=['question']",
        "+data.response_dict_keys=['answer']",
        "data.train_batch_size=4",
        "data.micro_batch_size=2",
        "data.max_length=32",
        f"model.partial_pretrain={tiny}",
        "model.strategy=fsdp",
        "model.fsdp_config.cpu_offload=false",
        "optim.lr=0.01",
        "optim.lr_scheduler=cosine",
        "ulysses_sequence_parallel_size=1",
        "use_remove_padding=true",
        "trainer.default_local_dir=out",
        "trainer.default_hdfs_dir=null",
        "trainer.project_name=gsm8k-sft",
        "trainer.total_epochs=2",
        "trainer.test_freq=after_each_epoch",
        "trainer.save_freq=after_each_epoch",
        "trainer.logger=['console']",
    ]
    ours = ["fsdp_config.dtype=fp32", "data.val_max_samples=3", *LOCAL]
    done = completed("main_sft", *words, *ours, cwd=tmp_path)
    assert "note: model.partial_pretrain: taken as model.path=" in done.stderr
    steps, turns = read_steps(tmp_path / "out"), [[pair] for pair in LEARNT.items()]
    assert [sorted(row.keys() & {"val/loss"}) for row in steps] == [["val/loss"], ["val/loss"]]
    assert steps[0]["train/loss"] == pytest.approx(loss_by_hand(tiny, turns), rel=1e-5)
    final = loss_by_hand(tmp_path / "out" / "final_model", turns[:3])
    assert steps[-1]["val/loss"] == pytest.approx(final, rel=1e-4)
    saved = sorted(path.name for path in (tmp_path / "out").glob("global_step_*"))
    assert saved == ["global_step_1", "global_step_2"]


@pytest.mark.slow
def test_a_mistake_is_one_message(tmp_path: Path) -> None:
    assert_refused(
        hydraflow("main_sft", cwd=tmp_path), "2 problems", "model.path=null", "data.train_files=null"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train_files=nowhere.parquet", "data.train_files=nowhere.parquet: no such file"),
        ("data.val_files=nowhere.parquet", "data.val_files=nowhere.parquet: no such file"),
        ("model.path=./nowhere", "model.path=./nowhere: there is no such directory"),
        ("data.messages_key=turns", "has no value in column prompt, response; it has messages"),
        ("data.response_key=reply", "has no value in column reply; it has prompt, response"),
        ("data.max_length=12", "data.max_length"),
        (
            "data.train_batch_size=6",
            "data.train_batch_size=6: is more than the 4 available training conversations",
        ),
        (
            "trainer.default_local_dir=/dev/null/out",
            "trainer.default_local_dir=/dev/null/out: the run folder cannot be written",
        ),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    override: str, words: str, sft_keys: list[str], tmp_path: Path
) -> None:
    config = load("sft", SFTConfig, [*sft_keys, f"trainer.default_local_dir={tmp_path}", override])
    with pytest.raises(ConfigError) as caught:
        run_sft(config)
    assert words in str(caught.value)
