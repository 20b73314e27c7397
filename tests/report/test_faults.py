"""What went wrong is reported: how it ended, restarts, skipped steps, numbers that are none, damaged
checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report.runs import record, write_run

from hydraflow.report.faults import FINE, NOTABLE, SERIOUS, ending, findings
from hydraflow.report.reading import read_run


@pytest.mark.parametrize(
    ("why", "weight", "label"),
    [
        ("all steps done", FINE, "done"),
        ("trainer.max_wall_time reached", NOTABLE, "stopped"),
        ("SIGTERM received", NOTABLE, "stopped"),
        ("interrupted", NOTABLE, "stopped"),
        ("actor rank 1 on node a failed in update: killed", SERIOUS, "failed"),
        (None, NOTABLE, "no recorded end"),
    ],
)
def test_how_it_ended(tmp_path: Path, why: str | None, weight: str, label: str) -> None:
    end = ending(read_run(write_run(tmp_path / "run", [record(1)], why=why)))
    assert (end.weight, end.what) == (weight, label)


def test_a_run_in_which_all_is_well_has_one_line(tmp_path: Path) -> None:
    run = read_run(
        write_run(
            tmp_path / "run",
            [record(1, **{"reward/failed_rows": 0.0, "actor/skipped_steps": 0.0})],
            starts=[{"host": "a"}],
        )
    )
    assert [finding.what for finding in findings(run)] == ["Ended: all steps done"]


def test_everything_that_can_go_wrong(tmp_path: Path) -> None:
    rows = [record(step) for step in range(1, 21)]
    rows[3] |= {"actor/skipped_steps": 2.0, "critic/oom_splits": 4.0, "actor/grad_norm": "nan"}
    rows[9] |= {"actor/skipped_steps": 1.0, "reward/failed_rows": 7.0, "training/restarts": 1.0}
    del rows[15]
    starts = [{"after_step": 0}, {"after_step": 8, "started": "2025-01-31T12:00:00", "host": "node7"}]
    folder = write_run(tmp_path / "run", rows, starts=starts)
    for name in ("global_step_6.damaged", "global_step_9.unfinished", "earlier-1", "skipped"):
        (folder / name).mkdir()
    (folder / "skipped" / "step_4_actor_0_rank_0.safetensors").write_bytes(b"")
    (folder / "requeue").write_text(json.dumps({"step": 20, "why": "SIGUSR1 received"}))
    found = {finding.what: finding for finding in findings(read_run(folder))}
    reported = "Optimizer steps skipped for a gradient that is not finite: 3"
    assert found[reported].detail == "actor/skipped_steps, steps 4, 10" and found[reported].weight == SERIOUS
    assert found["Forward passes split after running out of memory: 4"].detail == "critic/oom_splits, step 4"
    assert found["Rows that the reward function could not score: 7"].detail == "reward/failed_rows, step 10"
    assert found["actor/grad_norm was not a finite number, once"].detail == "step 4"
    assert found["Start 2: resumed after step 8"].detail == "2025-01-31T12:00:00 on node7"
    assert {
        "Waits to resume after step 20",
        "Restarted automatically after a worker failed, once in one start",
        "Damaged checkpoint: global_step_6.damaged",
        "Checkpoint that was never finished: global_step_9.unfinished",
        "An earlier run of this folder was moved to earlier-1/",
        "Rows of skipped steps are kept in skipped/: 1 files",
        "metrics.jsonl has no line for 1 steps between its first and its last",
    } <= set(found)


def test_steps_that_teach_nothing_are_said(tmp_path: Path) -> None:
    nothing = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0}
    run = read_run(write_run(tmp_path / "run", [record(step, **nothing) for step in range(1, 6)]))
    [found] = [finding for finding in findings(run) if finding.what.startswith("Every advantage is the same")]
    assert (found.weight, found.detail) == (SERIOUS, "steps 1 to 3")


def test_many_steps_are_shortened(tmp_path: Path) -> None:
    run = read_run(
        write_run(tmp_path / "run", [record(step, **{"actor/lr": "inf"}) for step in range(1, 101)])
    )
    [finding] = [finding for finding in findings(run) if finding.what.startswith("actor/lr")]
    assert finding.what.endswith("100 times") and finding.detail.endswith("10, 11, 12 and 88 more")
