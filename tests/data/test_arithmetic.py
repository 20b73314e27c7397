"""The addition task: right answers, no problem in both sets, and files that the datasets read."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hydraflow.data.arithmetic import answer, question, split_problems, write_arithmetic
from hydraflow.data.config import DataConfig, SFTDataConfig
from hydraflow.data.conversations import ConversationDataset
from hydraflow.data.prompts import PromptDataset
from hydraflow.protocol import ragged


def test_questions_and_answers_are_zero_padded() -> None:
    assert (question(17, 25), answer(17, 25)) == ("17+25=", "042")
    assert (question(3, 4), answer(3, 4)) == ("03+04=", "007")
    assert answer(99, 99) == "198"


@given(seed=st.integers(0, 2**32), val=st.integers(1, 50), train=st.integers(1, 50))
def test_no_problem_is_in_both_sets_and_none_twice(seed: int, val: int, train: int) -> None:
    trained, held_out = split_problems(train, val, seed)
    assert (len(trained), len(held_out)) == (train, val)
    assert len({*trained, *held_out}) == train + val


def test_all_problems_can_be_used_and_the_seed_decides() -> None:
    trained, held_out = split_problems(9500, 500, seed=3)
    assert len({*trained, *held_out}) == 10_000
    assert split_problems(9500, 500, seed=3) == (trained, held_out)
    assert split_problems(100, 500, seed=3)[1] == held_out
    assert split_problems(9500, 500, seed=4)[1] != held_out


def test_files_have_the_schema_and_the_datasets_read_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    files = write_arithmetic(tmp_path / "made", train_problems=20, val_problems=5, seed=0)
    rows = pyarrow.parquet.read_table(files.val).to_pylist()
    prompt = rows[4]["prompt"][0]["content"]
    assert rows[4] == {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": f"{int(prompt[:2]) + int(prompt[3:5]):03d}"},
        "extra_info": {"index": 4, "split": "val"},
    }
    assert len(PromptDataset(DataConfig(), files.train, tokenizer)) == 20
    conversations = ConversationDataset(SFTDataConfig(), files.sft, tokenizer)
    assert len(conversations) == 20
    batch = conversations.batch(range(20))
    assert ragged.lengths(batch.batch["prompts"]).tolist() == [6] * 20
    assert ragged.lengths(batch.batch["responses"]).tolist() == [4] * 20  # three digits and the end token


def test_the_warm_start_sees_training_problems_only(tmp_path: Path) -> None:
    files = write_arithmetic(tmp_path, train_problems=30, val_problems=30, seed=0)
    first = {name: pyarrow.parquet.read_table(path).to_pylist() for name, path in vars(files).items()}
    trained = [row["messages"][0]["content"] for row in first["sft"]]
    assert trained == [row["prompt"][0]["content"] for row in first["train"]]
    assert not set(trained) & {row["prompt"][0]["content"] for row in first["val"]}
