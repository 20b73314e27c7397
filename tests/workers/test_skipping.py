"""A gradient that is not finite: no rank takes the step, the rows are kept, and three in a row end the
run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from engine.pool import Ranks
from workers import fault_jobs as jobs

from hydraflow.workers.skipping import MOST_FILES, SkipGuard, SkipLimits, read_skipped

PREFIX = {"policy": "actor", "value": "critic"}


@pytest.mark.parametrize("head", PREFIX)
def test_the_step_is_as_if_it_had_not_been(tiny: str, ranks: Ranks, tmp_path: Path, head: str) -> None:
    results = ranks.run(jobs.update_with_bad_rows, tiny, head, str(tmp_path / "skipped"))
    for result in results:
        assert result["reported"][f"{PREFIX[head]}/skipped_steps"] == 2.0, (
            "the second mini-batch in both epochs"
        )
        for part in ("weights", "moments"):
            assert result["wanted"][part].keys() == result["found"][part].keys()
            assert all(
                torch.equal(result["found"][part][name], value)
                for name, value in result["wanted"][part].items()
            )
    names = {
        f"step_7_{PREFIX[head]}_{number}_rank_{rank}.safetensors" for number in (1, 3) for rank in (0, 1)
    }
    assert {path.name for path in (tmp_path / "skipped").iterdir()} == names
    for rank, result in enumerate(results):
        rows, facts = read_skipped(tmp_path / "skipped" / f"step_7_{PREFIX[head]}_1_rank_{rank}.safetensors")
        assert str(jobs.columns(rows)) == str(result["bad"]), "NaN is not equal to itself, but reads the same"
        assert (facts["step"], facts["role"], facts["optimizer_step"], facts["rank"]) == (
            7,
            PREFIX[head],
            1,
            rank,
        )
        loss = facts[{"policy": "actor/pg_loss", "value": "critic/vf_loss"}[head]]
        assert math.isnan(facts["grad_norm"]) and math.isnan(loss) == (rank == 1), (
            "the rank whose rows are bad shows"
        )


def test_three_in_a_row_stop_the_run(tiny: str, ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(jobs.give_up, tiny, str(tmp_path))
    assert first == second
    reported, moved, skipped = first
    assert reported.startswith(
        "the gradient of the actor was not finite in 3 optimizer steps in a row, the last one in step 2 "
    )
    assert "trainer.max_skipped_steps=3" in reported and str(tmp_path) in reported
    assert (moved, skipped) == (False, 2.0)


def test_a_disk_that_is_full_of_them(tmp_path: Path) -> None:
    skip_guard = SkipGuard(SkipLimits(10**6, str(tmp_path)), "actor", 0)
    for step in range(MOST_FILES + 5):
        skip_guard.note(jobs.make_batch(), skipped=True, step=step, number=0, facts={})
    assert len(list(tmp_path.iterdir())) == MOST_FILES


def test_rows_that_cannot_be_written_do_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    SkipGuard(SkipLimits(3, str(tmp_path / "file")), "actor", 0).note(
        jobs.make_batch(), skipped=True, step=1, number=0, facts={}
    )
    assert "cannot be written" in caplog.text
