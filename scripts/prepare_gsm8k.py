"""Converts GSM8K to files that hydraflow trains on.

    python scripts/prepare_gsm8k.py --output data/gsm8k                     # from the Hugging Face hub
    python scripts/prepare_gsm8k.py --train train.jsonl --test test.jsonl --output data/gsm8k  # from files

In: rows with `question` and `answer` (a solution that ends in `#### 42`), from the hub or from local Parquet
or JSONL files. Out: train.parquet and test.parquet with `prompt`, `data_source`, `ability`, `reward_model`
and `extra_info`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydraflow.data.files import FileRecord, raise_problems, read_records, write_rows
from hydraflow.errors import EnvironmentFault, HydraflowError
from hydraflow.system.paths import unwritable

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0; 2 for a mistake in the arguments or files; 3 if the hub
    cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        local = {"train": options.train, "test": options.test}
        splits = _from_files(local) if any(local.values()) else _from_hub()
        rows = {split: to_rows(records, split, options.instruction) for split, records in splits.items()}
        for split in rows:
            path = Path(options.output) / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_rows(path, rows[split])
            print(f"{path}: {len(rows[split])} problems")
    except OSError as error:
        print(unwritable(options.output, "--output", error), file=sys.stderr)
        return 2
    except HydraflowError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def to_rows(
    records: Sequence[FileRecord], split: str, instruction: str = INSTRUCTION
) -> list[dict[str, Any]]:
    """Rows in hydraflow's schema. ConfigError if an answer has no `####` and result, naming the rows."""
    raise_problems(
        [r.problem("its answer has no '#### number'") for r in records if not _result(r.values["answer"])]
    )
    return [
        _to_row(record.values["question"], record.values["answer"], index, split, instruction)
        for index, record in enumerate(records)
    ]


def _result(answer: object) -> str:
    """What follows the last `####`; empty without one."""
    _, mark, result = str(answer).rpartition("####")
    return result.strip().replace(",", "") if mark else ""


def _to_row(question: str, answer: str, index: int, split: str, instruction: str) -> dict[str, Any]:
    return {
        "data_source": HUB_NAME,
        "prompt": [{"role": "user", "content": f"{question} {instruction}".strip()}],
        "ability": "math",
        "reward_model": {
            "style": "rule",
            "ground_truth": _result(answer),
        },
        "extra_info": {"index": index, "split": split, "question": question, "answer": answer},
    }


def _from_files(paths: dict[str, str | None]) -> dict[str, list[FileRecord]]:
    columns = {"question": "", "answer": ""}
    return {
        split: read_records(path, key=f"--{split}", columns=columns) for split, path in paths.items() if path
    }


def _from_hub() -> dict[str, list[FileRecord]]:
    import datasets

    try:
        loaded = datasets.load_dataset(HUB_NAME, "main")
    except (OSError, ValueError) as error:  # no network, no such data set, a corrupt cache
        remedy = "Give local copies with --train and --test."
        raise EnvironmentFault(f"{HUB_NAME} cannot be read from the hub: {error}\n{remedy}") from error
    return {
        split: [FileRecord(dict(row), Path(HUB_NAME), i) for i, row in enumerate(rows)]
        for split, rows in loaded.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Converts GSM8K to files that hydraflow trains on.")
    parser.add_argument("--output", required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument(
        "--train",
        help="local copy of the training split (Parquet or JSONL); without --train and --test, the hub's",
    )
    parser.add_argument("--test", help="local copy of the test split")
    parser.add_argument("--instruction", default=INSTRUCTION, help="text to append to each question")
    return parser


if __name__ == "__main__":
    sys.exit(main())
