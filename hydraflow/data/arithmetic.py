"""Two-digit addition: a generated task that a tiny model learns in minutes on a CPU.

In: the number of problems and a seed. Out: Parquet files of training and held-out problems in verl's schema,
and the training problems with their answers as conversations for a warm start. There are 10,000 problems.
Held-out problems are drawn first, so they depend only on the seed and on how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hydraflow.data.files import write_rows
from hydraflow.recipes.config import PROBLEMS

DATA_SOURCE = "arithmetic"


@dataclass(frozen=True)
class ArithmeticFiles:
    """Paths of the written problems."""

    train: Path
    """Training problems, for reinforcement learning."""
    val: Path
    """Held-out problems."""
    sft: Path
    """The training problems with answers, column `messages`."""


def question(a: int, b: int) -> str:
    """The prompt; both numbers are written with two digits.

    >>> question(7, 25), answer(7, 25)
    ('07+25=', '032')
    """
    return f"{a:02d}+{b:02d}="


def answer(a: int, b: int) -> str:
    """The correct answer, in three digits."""
    return f"{a + b:03d}"


def split_problems(
    train_problems: int, val_problems: int, seed: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Training and held-out pairs of numbers, none in both; at most PROBLEMS together."""
    drawn = np.random.default_rng(seed).permutation(PROBLEMS)[: val_problems + train_problems].tolist()
    pairs = [(number // 100, number % 100) for number in drawn]
    return pairs[val_problems:], pairs[:val_problems]


def prompt_rows(pairs: Sequence[tuple[int, int]], split: str) -> list[dict[str, Any]]:
    """Rows for `PromptDataset`."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question(a, b)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer(a, b)},
            "extra_info": {"index": index, "split": split},
        }
        for index, (a, b) in enumerate(pairs)
    ]


def conversation_rows(pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows for `ConversationDataset`."""
    rows = []
    for a, b in pairs:
        asked = {"role": "user", "content": question(a, b)}
        answered = {"role": "assistant", "content": answer(a, b)}
        rows.append({"messages": [asked, answered], "data_source": DATA_SOURCE})
    return rows


def write_arithmetic(
    directory: str | Path, *, train_problems: int, val_problems: int, seed: int
) -> ArithmeticFiles:
    """Writes train.parquet, val.parquet and sft.parquet to `directory` (created if missing)."""
    train, val = split_problems(train_problems, val_problems, seed)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    files = ArithmeticFiles(folder / "train.parquet", folder / "val.parquet", folder / "sft.parquet")
    write_rows(files.train, prompt_rows(train, "train"))
    write_rows(files.val, prompt_rows(val, "val"))
    write_rows(files.sft, conversation_rows(train))
    return files
