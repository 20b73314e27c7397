"""The run folder: where it is made, what is refused, and that its files are whole."""

import json
import re
from datetime import date
from pathlib import Path

import pytest
import yaml

from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.tracking.history import read_metrics
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.tracking.summary import Summary

SUMMARY = Summary(0.25, 0.5, float("nan"), 10, 61.5, "all steps done")


def start(directory: str | None, experiment_name: str) -> RunFolder:
    """The folder of a run that starts from scratch."""
    folder = RunFolder.make(directory, experiment_name)
    folder.move_earlier_run()
    return folder


def test_default_is_named_after_experiment_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = start(None, "ppo/tiny run")
    second = start(None, "ppo/tiny run")
    assert re.fullmatch(r"ppo-tiny-run-\d{8}-\d{6}", first.path.name)
    assert first.path.parent == tmp_path / "runs"
    assert first.path.is_dir() and second.path.is_dir() and first.path != second.path


@pytest.mark.parametrize("directory", ["/proc/hydraflow", "file/inside"])
def test_a_folder_that_cannot_be_written_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="trainer.default_local_dir=.*cannot be written") as caught:
        start(directory, "ppo")
    assert caught.value.exit_code == 2


def test_an_earlier_run_is_set_aside_not_mixed_in(tmp_path: Path) -> None:
    for content in ("one\n", "two\n", "three\n"):
        folder = start(str(tmp_path / "run"), "ppo")
        assert not folder.metrics.exists()
        folder.metrics.write_text(content)
    assert (folder.path / "earlier-1" / "metrics.jsonl").read_text() == "one\n"
    assert (folder.path / "earlier-2" / "metrics.jsonl").read_text() == "two\n"
    assert folder.metrics.read_text() == "three\n"


def test_a_trained_model_is_set_aside_with_its_run(tmp_path: Path) -> None:
    folder = start(str(tmp_path / "run"), "ppo")
    folder.metrics.write_text("")
    folder.final_model.mkdir()
    (folder.final_model / "config.json").write_text("{}")
    start(str(tmp_path / "run"), "ppo")
    assert not folder.final_model.exists()
    assert (folder.path / "earlier-1" / "final_model" / "config.json").exists()


def test_files_of_the_users_own_are_not_moved(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "notes.txt").touch()
    folder = RunFolder.make(str(tmp_path), "ppo")
    assert not folder.was_used()
    with pytest.raises(ConfigError, match="holds code, which no run of hydraflow wrote"):
        folder.require_movable({}, used=False)
    (tmp_path / ".lock").touch()
    assert folder.was_used()
    folder.require_movable({}, used=True)


def test_files_that_the_run_reads_are_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.make(str(tmp_path / "run"), "ppo")
    model = folder.final_model / "actor"
    model.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder.path)
    (folder.path / "train.jsonl").touch()
    values = {"data.train_files": [str(folder.path / "train.jsonl")], "trainer.seed": 1, "x": "y" * 9999}
    folder.require_movable(values | {"model.path": "none/final_model"}, used=True)
    monkeypatch.chdir(tmp_path)
    relative = "run/final_model"
    for value in (str(model), [str(model)], f"{relative}/actor", "link/final_model", {"a": relative}):
        with pytest.raises(ConfigError, match="model.path=.*final_model.*: is in the run folder"):
            folder.require_movable(values | {"actor_rollout_ref.model.path": value}, used=True)


def test_an_address_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="s3://bucket/x: is an address"):
        RunFolder.prove_writable("s3://bucket/x")


def test_a_link_to_nothing_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFolder.prove_writable(str(tmp_path / "link"))


def test_config_reads_back_as_it_was(tmp_path: Path) -> None:
    config = {
        "trainer": {"logger": ["console"], "seed": 1, "max_wall_time": None},
        "actor": {"optim": {"lr": 1e-6}},
    }
    folder = start(str(tmp_path), "ppo")
    folder.write_config(config, {"trainer.seed": "default", "actor.optim.lr": "command line"})
    assert yaml.safe_load(folder.config.read_text()) == config
    assert json.loads(folder.config_origins.read_text()) == {
        "trainer.seed": {"value": 1, "from": "default"},
        "actor.optim.lr": {"value": 1e-6, "from": "command line"},
    }


def test_summary_replaces_the_old_one_whole_and_holds_no_nan(tmp_path: Path) -> None:
    folder = start(str(tmp_path), "ppo")
    folder.summary.write_text("{")
    folder.write_summary(SUMMARY)
    assert json.loads(folder.summary.read_text()) == {
        "first_val_accuracy": 0.25,
        "last_val_accuracy": 0.5,
        "best_val_accuracy": "nan",
        "steps": 10,
        "seconds": 61.5,
        "why_it_ended": "all steps done",
        "first_val_step": None,
        "symptoms": [],
    }
    assert [path.name for path in folder.path.iterdir()] == ["summary.json"]


def test_samples_of_a_step_are_one_json_object_a_line(tmp_path: Path) -> None:
    folder = start(str(tmp_path), "ppo")
    samples = [
        {"output": "4\n2", "ground_truth": "042", "score": 0.0},
        {"output": "é", "ground_truth": None, "score": 1.0},
    ]
    folder.write_samples(20, samples)
    lines = (tmp_path / "samples" / "step_000020.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == samples


def test_samples_that_cannot_be_written_do_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = start(str(tmp_path), "ppo")
    folder.samples.touch()
    folder.write_samples(20, [{"output": "42"}])
    assert "the samples of step 20 are lost: " in caplog.text


def test_a_summary_that_cannot_be_written_is_an_environment_fault(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "gone")
    with pytest.raises(EnvironmentFault, match="summary.json"):
        folder.write_summary(SUMMARY)


def test_going_back_forgets_what_came_after(tmp_path: Path) -> None:
    folder = start(str(tmp_path), "ppo")
    lines = [json.dumps({"step": step, "seconds": 1.0 * step}) + "\n" for step in range(6)]
    folder.metrics.write_text("".join(lines) + '{"step": 6, "sec')
    for step in (0, 3, 5):
        folder.write_samples(step, [])
    folder.write_summary(SUMMARY)
    folder.write_requeue(3, "SIGTERM received")
    assert folder.ended_with() == ("all steps done", 10)
    assert folder.go_back_to(3) == 3, "two whole lines, and the one that was cut"
    assert folder.metrics.read_text() == "".join(lines[:4])
    assert sorted(path.name for path in folder.samples.iterdir()) == [
        "step_000000.jsonl",
        "step_000003.jsonl",
    ]
    assert not folder.requeue.exists()
    assert folder.ended_with() == ("", 0)


def test_torn_lines_are_dropped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a machine that lost its power leaves them, in the middle of what is gone on from."""
    folder = start(str(tmp_path), "ppo")
    lines = [json.dumps({"step": step, "seconds": 1.0 * step}) + "\n" for step in range(4)]
    torn = [
        '{"step": 1, "sec\n',
        "\0" * 40 + "\n",
        "[" * 100_000 + "\n",
        "3\n",
        '{"step": "nan", "seconds": 1}\n',
    ]
    folder.metrics.write_text("".join([*lines[:2], *torn, *lines[2:]]))
    with folder.metrics.open("ab") as file:
        file.write(b"\xff\xfe\n" + lines[3].encode())
    assert [record["step"] for record in read_metrics(folder.path)] == [0, 1, 2, 3]
    assert folder.go_back_to(2) == 8
    assert folder.metrics.read_text() == "".join(lines[:3])
    assert "6 of 11 lines are torn; they are dropped" in caplog.text


def test_files_that_only_look_like_a_steps_are_kept(tmp_path: Path) -> None:
    folder = start(str(tmp_path), "ppo")
    names = ["step_old.jsonl", "step_.jsonl", "step_9x.jsonl", "step_000009.jsonl"]
    folder.samples.mkdir()
    folder.skipped.mkdir()
    for name in names:
        (folder.samples / name).touch()
    for name in ("step_9_actor_1_rank_0.safetensors", "step_mine.safetensors"):
        (folder.skipped / name).touch()
    folder.go_back_to(3)
    assert {path.name for path in folder.samples.iterdir()} == {*names[:3]}
    assert [path.name for path in folder.skipped.iterdir()] == ["step_mine.safetensors"]


def test_the_folders_of_an_experiment_come_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunFolder.of_experiment("ppo") == []
    for name in (
        "ppo-20250101-101010",
        "ppo-20250102-090909",
        "ppo-20250102-090909-2",
        "ppo-long-20250103-101010",
        "ppo-notes",
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
    found = [folder.path.name for folder in RunFolder.of_experiment("ppo")]
    assert found == ["ppo-20250102-090909-2", "ppo-20250102-090909", "ppo-20250101-101010"]


def test_checkpoints_of_an_earlier_run_are_set_aside_with_it(tmp_path: Path) -> None:
    (tmp_path / "global_step_4").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4\n")
    start(str(tmp_path), "ppo")
    assert sorted(path.name for path in (tmp_path / "earlier-1").iterdir()) == [
        "global_step_4",
        "latest_checkpointed_iteration.txt",
    ]


def test_samples_of_whatever_the_data_have(tmp_path: Path) -> None:
    """A reference from Parquet may be a date or bytes, one from JSON half of a character pair; neither ends a
    run."""
    folder = RunFolder.make(str(tmp_path / "run"), "e")
    folder.write_samples(
        3, [{"input": "a", "ground_truth": date(2026, 1, 2)}, {"input": "\ud800", "ground_truth": b"x"}]
    )
    rows = [json.loads(line) for line in (folder.samples / "step_000003.jsonl").read_text().splitlines()]
    assert rows == [{"input": "a", "ground_truth": "2026-01-02"}, {"input": "?", "ground_truth": "b'x'"}]
