"""Dumps of responses: one file a step, whole, under the names that verl's have; a full disk does not end a
run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hydraflow.dispatch.shards import CompletedFuture
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.pieces import Column, LocalColumn
from hydraflow.protocol.remote import RemoteBatch, materialise
from hydraflow.trainer.generations import GenerationDump, ScoredResponses, read_scored
from hydraflow.trainer.source import Trajectories

SCORED = ScoredResponses(
    sources=np.array(["sums", "sums"]),
    scores=np.array([1.0, 0.0], dtype=np.float32),
    accuracies=np.array([1.0, 0.0], dtype=np.float32),
    failed=np.array([False, True]),
    prompts=["17+25=", "1+1="],
    texts=["042", "\ud800 é\n"],
    truths=["042", None],
    uids=["a", "b"],
)


def test_a_row_for_each_response(tmp_path: Path) -> None:
    dump = GenerationDump.to(str(tmp_path / "deep" / "rollouts"), "trainer.rollout_data_dir")
    assert dump is not None
    dump.write(3, list(SCORED.rows(3)))
    first, second = (
        json.loads(line) for line in (tmp_path / "deep" / "rollouts" / "3.jsonl").read_text().splitlines()
    )
    assert first == {
        "step": 3,
        "uid": "a",
        "data_source": "sums",
        "input": "17+25=",
        "output": "042",
        "gts": "042",
        "score": 1.0,
        "acc": 1.0,
        "failed": False,
    }
    assert second["failed"]
    assert (second["output"], second["gts"]) == ("? é\n", None), "half a character cannot be written"
    dump.write(3, [first])
    assert [path.name for path in (tmp_path / "deep" / "rollouts").iterdir()] == ["3.jsonl"], (
        "a step that is done again replaces it"
    )


def test_the_accuracy_of_a_row_without_a_function_is_its_score() -> None:
    objects = {
        "data_source": np.array(["sums", "essays", "essays"], dtype=object),
        "reward_model": np.array([{"ground_truth": "7"}, {}, {}], dtype=object),
        "uid": np.array(["a", "b", "c"], dtype=object),
    }
    columns = {
        "score": torch.tensor([0.5, 2.5, torch.nan]),
        "acc": torch.tensor([1.0, torch.nan, 1.0]),
        "failed": torch.zeros(3, dtype=torch.bool),
    }
    scored = RemoteBatch.from_local(DataProto.from_dict(columns))
    texts = Column((LocalColumn(np.array(["x", "y", "z"], dtype=object)),))
    scored.columns |= {"text": texts, "prompt_text": texts}

    class Here:
        def fetch(self, batch: RemoteBatch) -> DataProto:
            return materialise(batch, lambda refs: [])

    taken = Trajectories(RemoteBatch({}, objects), CompletedFuture(scored))
    read = read_scored(Here(), taken)  # type: ignore[arg-type]
    assert read.scores.tolist()[:2] == [0.5, 2.5] and read.accuracies.tolist() == [1.0, 2.5, 1.0]
    assert read.failed.tolist() == [False, False, True], "a reward model's score may be no number"


def test_nothing_is_dumped_unasked() -> None:
    assert GenerationDump.to(None, "trainer.rollout_data_dir") is None


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    dump = GenerationDump(tmp_path / "file", "trainer.rollout_data_dir")
    for step in (1, 2):
        dump.write(step, [])
    assert len(caplog.records) == 1
    assert "trainer.rollout_data_dir" in caplog.text and "training continues without" in caplog.text
