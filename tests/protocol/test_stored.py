"""Batches on the disk: what is read is what was written, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch

from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.columns import first_difference
from hydraflow.protocol.stored import read_batch, write_batch


def a_batch() -> DataProto:
    shared = {"style": "rule", "ground_truth": "042"}
    objects = {
        "uid": ["a", "b", "a"],
        "reward_model": [shared, {"ground_truth": None}, shared],
        "words": [["x"], [], ["y", 1.5]],
    }
    tensors = {
        "responses": ragged.from_rows(
            [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])]
        ),
        "old_log_probs": ragged.from_rows(
            [torch.tensor([-0.1, float("nan")]), torch.empty(0), torch.tensor([float("-inf")])]
        ),
        "half": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
    }
    return DataProto.from_dict(tensors, objects)


def test_every_kind_of_column_comes_back(tmp_path: Path) -> None:
    batch, path = a_batch(), tmp_path / "new" / "step_3.safetensors"
    write_batch(path, batch, {"step": 3, "why": None})
    read, facts = read_batch(path)
    assert facts == {"step": 3, "why": None}
    assert sorted(dict(read.items())) == sorted(dict(batch.items()))
    assert {
        name: found for name, column in batch.items() if (found := first_difference(column, read.get(name)))
    } == {}
    assert read.get("half").dtype == torch.bfloat16 and isinstance(read.get("uid"), np.ndarray)
    assert read.get("reward_model")[0] is read.get("reward_model")[2], (
        "rows that share an object share it again"
    )
    assert [entry.name for entry in path.parent.iterdir()] == ["step_3.safetensors"], (
        "no half written file is left"
    )


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"not a file of ours")
    with pytest.raises(safetensors.SafetensorError):
        read_batch(tmp_path / "bad")
