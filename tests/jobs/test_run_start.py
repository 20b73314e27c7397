"""Where a run begins: which folder, which checkpoint, and what of an earlier start stays. No worker runs
here."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.foreign import REFUSED, Payload, seal
from torch.distributed.checkpoint.metadata import Metadata

from hydraflow.data.loader import PromptLoader
from hydraflow.engine.base import CHECKPOINT_FACTS
from hydraflow.engine.dcp_index import INDEX, SHARDS
from hydraflow.errors import ConfigError
from hydraflow.jobs import run_start
from hydraflow.jobs.run_start import RunStart
from hydraflow.protocol.batch import DataProto
from hydraflow.tracking.endings import DONE
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.tracking.summary import Summary
from hydraflow.trainer import checkpoint_store
from hydraflow.trainer.checkpoint import RoleCheckpoints
from hydraflow.trainer.checkpoint_store import CheckpointStore
from hydraflow.trainer.config import TrainerConfig
from hydraflow.trainer.identity import Identity
from hydraflow.trainer.resume import CheckpointRequirements
from hydraflow.trainer.run_state import RunState
from hydraflow.workers.config import CheckpointConfig
from hydraflow.workers.saving import file_facts, read_part, save_part

IDENTITY = {"actor.lr": 0.5, "data.train_batch_size": 8}
CONTENTS = ["model", "optimizer", "extra"]
VALIDATES = "trainer.val_only"


class Snapshot:
    def __init__(self, contents: list[str]):
        self.contents = contents

    def write(self, directory: Path) -> list[Path]:
        (directory / CHECKPOINT_FACTS).write_text(json.dumps({"contents": self.contents, "world_size": 1}))
        (directory / SHARDS).mkdir()
        (directory / SHARDS / INDEX).write_bytes(pickle.dumps(Metadata({}, storage_data={})))
        return [directory / CHECKPOINT_FACTS, directory / SHARDS / INDEX]


def save(folder: Path, step: int, *, contents: list[str] = CONTENTS, **state: Any) -> Path:
    store = CheckpointStore(folder)
    facts = RunState(step, 8, "run-1", {}, state.pop("data", {}), IDENTITY, "", **state)
    unfinished = store.begin(step, {"actor": 1}, asdict(facts))
    save_part(Snapshot(contents), unfinished, "actor", 0, background=False)
    part = read_part(unfinished, "actor", 0)
    assert part is not None
    store.seal(unfinished, step, part.files)
    store.name(unfinished, step)
    store.point_to(step)
    return store.path(step)


def spoil(checkpoint: Path) -> None:
    (checkpoint / "actor" / CHECKPOINT_FACTS).write_text("x")


def log(folder: Path, steps: int) -> None:
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "seconds": 1.0}) + "\n" for step in range(steps + 1))
    )


def required(values: dict[str, Any] = IDENTITY, total: int = 8, **options: Any) -> CheckpointRequirements:
    config = CheckpointConfig(**options.pop("contents", {}))
    return CheckpointRequirements(
        Identity(values), {"actor": RoleCheckpoints("actor.checkpoint", config, None, "")}, total, **options
    )


def begin(
    want: CheckpointRequirements | None = None, values: dict[str, Any] | None = None, **trainer: Any
) -> RunStart:
    """As a session does it."""
    want = want or required()
    start = run_start.begin(TrainerConfig(**trainer), want, values or {})
    start.lock.release()
    return run_start.take_back(start) if start.found and not start.is_done(want.total_steps) else start


def resume(path: Path) -> dict[str, Any]:
    return {"resume_mode": "resume_path", "resume_from_path": str(path)}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a run that was interrupted after step 5, with checkpoints of steps 2 and 4."""
    folder = tmp_path / "out"
    folder.mkdir()
    save(folder, 2)
    save(folder, 4)
    log(folder, 5)
    return folder


def records(folder: Path) -> int:
    return len((folder / "metrics.jsonl").read_text().splitlines())


def test_nothing_is_moved_that_the_run_reads_or_that_is_not_of_a_run(out: Path) -> None:
    """Nor is anything that a resumed run reads: it moves nothing."""
    (out / "final_model").mkdir()
    values = {"actor_rollout_ref.model.path": str(out / "final_model")}
    with pytest.raises(ConfigError, match="final_model: is in the run folder"):
        begin(values=values, default_local_dir=str(out), resume_mode="disable")
    assert begin(values=values, default_local_dir=str(out)).step == 4
    for mark in (".lock", "metrics.jsonl"):
        (out / mark).unlink()
    for _ in range(2):  # a refusal leaves no lock behind, by which it would pass for a run's folder
        with pytest.raises(ConfigError, match="which no run of hydraflow wrote"):
            begin(default_local_dir=str(out), resume_mode="disable")
    assert begin(default_local_dir=str(out)).step == 4, "copied checkpoints can be resumed from"


def test_the_same_command_goes_on(out: Path) -> None:
    start = begin(default_local_dir=str(out))
    assert start.step == 4 and start.run_id == "run-1"
    assert start.found is not None and start.found.checkpoint == out / "global_step_4"
    assert records(out) == 5, "steps 0 to 4"
    assert start.notes == ("metrics: 1 line after step 4 dropped",)


def test_disable_starts_anew_and_keeps_the_old_run_apart(out: Path) -> None:
    start = begin(default_local_dir=str(out), resume_mode="disable")
    assert start.found is None and start.run_id.startswith("out-")
    assert (out / "earlier-1" / "global_step_4").is_dir() and (out / "earlier-1" / "metrics.jsonl").exists()
    assert begin(default_local_dir=str(out)).found is None, "files that were moved away are not resumed from"


def test_a_folder_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    log(tmp_path, 3)
    CheckpointStore(tmp_path).begin(2, {"actor": 1}, {})
    start = begin(default_local_dir=str(tmp_path))
    assert start.found is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "earlier-1"], (
        "and what was started is gone"
    )


def test_another_configuration_is_refused_and_nothing_changes(out: Path) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        begin(required({"actor.lr": 0.25, "data.train_batch_size": 8}), default_local_dir=str(out))
    assert caught.value.exit_code == 2
    assert "actor.lr=0.25: " in str(caught.value) and "was trained with 0.5" in str(caught.value)
    assert "trainer.resume_mode=disable" in str(caught.value)
    assert {
        path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"
    } == before


def test_a_damaged_checkpoint_is_passed_over_and_said_to_be(out: Path) -> None:
    spoil(out / "global_step_4")
    start = begin(default_local_dir=str(out))
    assert start.step == 2
    assert "global_step_4 is skipped: actor/checkpoint.json has 1 bytes instead of" in start.notes[0]
    assert (out / "global_step_4.damaged").is_dir() and not (out / "global_step_4").exists()
    assert CheckpointStore(out).pointer() == 2 and records(out) == 3


def test_when_all_are_damaged_the_run_is_refused(out: Path) -> None:
    for step in (2, 4):
        spoil(out / f"global_step_{step}")
    with pytest.raises(ConfigError, match="2 problems") as caught:
        begin(default_local_dir=str(out))
    assert "global_step_2 cannot be used" in str(caught.value)


def test_a_pointer_that_was_set_back_is_obeyed(out: Path) -> None:
    CheckpointStore(out).point_to(2)
    start = begin(default_local_dir=str(out))
    assert start.step == 2
    assert (out / "earlier-1" / "global_step_4").is_dir(), (
        "newer checkpoints would be mistaken for this run's"
    )


def rewrite(file: Path, content: str | bytes) -> None:
    """Changes a file of a checkpoint, and the manifest with it."""
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    seal(next(folder for folder in file.parents if folder.name.startswith("global_step_")))


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"of_the_future": 1}, "has of_the_future, which this version of hydraflow does not know"),
        ({"run_id": None}, "is of another version: .*'run_id'"),
        ("[]", "holds no JSON object"),
        (DEEP, "cannot be read"),
        ({"step": "4"}, "has step='4', which is no number"),
        ({"configuration": []}, "has no mapping in configuration"),
    ],
    ids=["newer", "lacks", "list", "deep", "text", "no-mapping"],
)
def test_a_state_of_another_version_is_refused(out: Path, change: Any, message: str) -> None:
    state = out / "global_step_4" / "trainer.json"
    if isinstance(change, dict):
        found = {**json.loads(state.read_text()), **change}
        change = json.dumps(
            {name: value for name, value in found.items() if value is not None or name == "origin"}
        )
    rewrite(state, change)
    with pytest.raises(ConfigError, match=message) as caught:
        begin(default_local_dir=str(out))
    assert (
        caught.value.exit_code == 2
        and f"{state}: " in str(caught.value)
        and "trainer.resume_mode=disable" in str(caught.value)
    )
    assert begin(default_local_dir=str(out), resume_mode="disable").found is None


@pytest.mark.parametrize("content", [DEEP, "{}", '{"contents": 3, "world_size": 1}', "[]"])
def test_facts_that_say_nothing_are_refused(out: Path, content: str) -> None:
    file = out / "global_step_4" / "actor" / CHECKPOINT_FACTS
    rewrite(file, content)
    with pytest.raises(ConfigError, match=f"{file}: (cannot be read|lacks the checkpoint's contents)"):
        begin(default_local_dir=str(out))


@pytest.mark.parametrize("way", ["auto", "resume_path", "validated"])
def test_a_foreign_index_is_refused_before_anything_starts(out: Path, tmp_path: Path, way: str) -> None:
    index = out / "global_step_4" / "actor" / SHARDS / INDEX
    rewrite(index, pickle.dumps(Payload(tmp_path / "hacked")))
    given: dict[str, Any] = {"default_local_dir": str(out if way == "auto" else tmp_path / "other")}
    if way != "auto":
        given |= resume(out / "global_step_4")
    with pytest.raises(ConfigError, match=REFUSED) as caught:
        begin(required({}, looks_only=VALIDATES if way == "validated" else None), **given)
    assert caught.value.exit_code == 2 and not (tmp_path / "hacked").exists()


def test_a_checkpoint_without_the_optimizer_cannot_give_one(out: Path) -> None:
    save(out, 6, contents=["model"])
    with pytest.raises(
        ConfigError,
        match=r"was saved without optimizer, extra(.|\n)*actor.checkpoint.load_contents=\[model\]",
    ):
        begin(default_local_dir=str(out))
    assert begin(required(contents={"load_contents": ["model"]}), default_local_dir=str(out)).step == 6


def test_done_is_done(out: Path) -> None:
    save(out, 8)
    log(out, 8)
    start = begin(default_local_dir=str(out))
    assert start.step == 8 and not start.is_done(8), "its model is not written yet"
    RunFolder(out).write_summary(Summary(None, None, None, 8, 1.0, DONE))
    assert begin(default_local_dir=str(out)).is_done(8)
    assert begin(required(total=12), default_local_dir=str(out)).step == 8, "a longer run goes on"
    assert RunFolder(out).ended_with() == ("", 0)
    for text in ("[]", '{"why_it_ended": "done", "steps": null}'):
        RunFolder(out).summary.write_text(text)
        assert RunFolder(out).ended_with() == ("", 0)


def test_a_path_in_another_folder_begins_a_run_of_its_own(out: Path, tmp_path: Path) -> None:
    path = resume(out / "global_step_2") | {"default_local_dir": str(tmp_path / "new")}
    start = begin(**path)
    assert start.step == 2 and start.run_id != "run-1" and start.folder.path == tmp_path / "new"
    assert records(out) == 6 and CheckpointStore(out).pointer() == 4, "the other run stays as it is"
    save(tmp_path / "new", 6, origin=str(out / "global_step_2"))
    assert begin(**path).step == 6, "the same command again resumes from its own checkpoint"


def test_a_path_in_the_same_folder_goes_back(out: Path) -> None:
    start = begin(default_local_dir=str(out), **resume(out / "global_step_2"))
    assert start.step == 2 and start.run_id == "run-1" and records(out) == 3
    assert (out / "earlier-1" / "global_step_4").is_dir()


@pytest.mark.parametrize(
    ("path", "why"), [("nowhere", "is not a folder"), (".", "is not a complete checkpoint")]
)
def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path, path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        begin(default_local_dir=str(tmp_path / "run"), **resume(tmp_path / path))


def test_looking_at_a_checkpoint_leaves_its_run_alone(out: Path, tmp_path: Path) -> None:
    look = required({}, 0, looks_only=VALIDATES, contents={"load_contents": ["model"]})
    path = resume(out / "global_step_2")
    assert begin(look, default_local_dir=str(tmp_path / "new"), **path).step == 2
    for options in (path, {}):
        with pytest.raises(
            ConfigError,
            match=f"a run with checkpoints; {VALIDATES}(.|\n)*=<another folder> .*{out}/global_step_",
        ):
            begin(look, default_local_dir=str(out), **options)
    assert records(out) == 6 and (out / "global_step_4").is_dir(), "nothing was moved away"
    assert begin(look, default_local_dir=str(tmp_path / "plain")).found is None


class TestWithoutAFolder:
    """default_local_dir=null."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def cut_off(self, stamp: str, **state: Any) -> Path:
        folder = Path("runs") / f"ppo-20250101-{stamp}"
        folder.mkdir(parents=True)
        save(folder, 4, **state)
        log(folder, 5)
        return folder.resolve()

    def test_the_newest_run_that_was_cut_off_goes_on(self) -> None:
        self.cut_off("101010")
        newest = self.cut_off("111111")
        start = begin(experiment_name="ppo")
        assert (start.folder.path, start.step) == (newest, 4)

    def test_a_finished_one_does_not(self) -> None:
        older, newest = self.cut_off("101010"), self.cut_off("111111")
        save(newest, 8)
        RunFolder(newest).write_summary(Summary(None, None, None, 8, 1.0, DONE))
        assert begin(experiment_name="ppo").folder.path == older

    def test_nor_one_of_another_configuration_or_experiment(self) -> None:
        self.cut_off("101010")
        assert begin(required({"actor.lr": 0.25}), experiment_name="ppo").found is None
        assert begin(experiment_name="other").found is None
        assert begin(experiment_name="ppo", resume_mode="disable").found is None

    def test_runs_that_are_of_no_use_are_not_read_byte_by_byte(self, monkeypatch: pytest.MonkeyPatch) -> None:
        finished = self.cut_off("101010")
        RunFolder(finished).write_summary(Summary(None, None, None, 8, 1.0, DONE))
        spoiled = self.cut_off("101011")
        (spoiled / "global_step_4" / "trainer.json").write_text("{")
        verified: list[Path] = []
        monkeypatch.setattr(checkpoint_store, "damage", lambda path, roles: verified.append(path) or "spoilt")
        assert begin(experiment_name="ppo").found is None
        assert begin(required({"actor.lr": 0.25}), experiment_name="ppo").found is None
        assert {path.parent for path in verified} == {spoiled}, "it may have a whole one before that"

    def test_nor_one_that_is_at_work(self) -> None:
        self.cut_off("101010")
        at_work = run_start.begin(TrainerConfig(experiment_name="ppo"), required(), {})
        assert at_work.step == 4
        assert begin(experiment_name="ppo").found is None
        at_work.lock.release()


def test_two_runs_in_one_folder_are_refused(out: Path) -> None:
    first = run_start.begin(TrainerConfig(default_local_dir=str(out)), required(), {})
    with pytest.raises(ConfigError, match="another run is using it: process"):
        begin(default_local_dir=str(out))
    first.lock.release()
    assert file_facts(out / "global_step_4" / "trainer.json").bytes > 0


def test_a_run_that_is_found_by_search_is_looked_at_as_closely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "ppo-20260101-120000"
    folder.mkdir(parents=True)
    save(folder, 4, contents=["model"])
    log(folder, 4)
    for _ in range(2):  # and is left unlocked
        with pytest.raises(ConfigError, match="was saved without optimizer, extra"):
            begin()
    assert begin(required(contents={"load_contents": ["model"]})).folder.path.samefile(folder)


def test_contents_that_a_checkpoint_has_and_no_run_loads_are_not_advised(out: Path) -> None:
    save(out, 6, contents=["extra", "hf_model", "model"])
    with pytest.raises(ConfigError, match=r"load_contents=\[model,extra\]"):
        begin(default_local_dir=str(out))


def test_the_end_of_another_run_in_the_folder_says_nothing_of_a_path(out: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", 8)
    RunFolder(out).write_summary(Summary(None, None, None, 8, 1.0, DONE))
    start = run_start.begin(TrainerConfig(default_local_dir=str(out), **resume(other)), required(), {})
    start.lock.release()
    assert start.step == 8 and not start.is_done(8)


def test_other_rows_are_refused_before_anything_changes(out: Path) -> None:
    save(out, 6, data=PromptLoader(Rows(9), 4, shuffle=True, seed=1).identity())
    RunFolder(out).write_summary(Summary(None, None, None, 6, 1.0, "interrupted"))
    with pytest.raises(ConfigError, match="rows of data.train_files=8: the checkpoint was written with 9"):
        begin(required(loader=PromptLoader(Rows(8), 4, shuffle=True, seed=1)), default_local_dir=str(out))
    assert RunFolder(out).summary.exists()
    assert begin(required(loader=PromptLoader(Rows(9), 4, shuffle=True, seed=1)), default_local_dir=str(out))


class Rows:
    """So many rows that nobody reads."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, rows: np.ndarray) -> DataProto:
        raise AssertionError


def test_a_refused_start_leaves_no_folder(tmp_path: Path) -> None:
    path = resume(tmp_path / "nowhere")
    with pytest.raises(ConfigError):
        begin(default_local_dir=str(tmp_path / "new"), **path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError):
        begin(default_local_dir=str(tmp_path / "mine"), **path)
    assert (tmp_path / "mine").is_dir(), "the user's own stays"
