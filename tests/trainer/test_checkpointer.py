"""When a run saves, what the best is, and what happens when the disk is full. The workers here write a byte
each."""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from hydraflow.dispatch.head import HeadLost
from hydraflow.errors import ConfigError, EnvironmentFault, GuardStop, WorkerError
from hydraflow.trainer import checkpoint
from hydraflow.trainer.checkpoint import Checkpointer, RoleCheckpoints
from hydraflow.trainer.checkpoint_store import CheckpointStore
from hydraflow.trainer.config import TrainerConfig
from hydraflow.workers.config import CheckpointConfig
from hydraflow.workers.engine_worker import EngineWorker
from hydraflow.workers.saving import save_part

METRIC = "val-core/x/acc/mean@1"
STORE = "hydraflow.trainer.checkpoint_store.CheckpointStore"


class Snapshot:
    def write(self, directory: Path) -> list[Path]:
        (directory / "weights").write_bytes(b"1")
        return [directory / "weights"]


class FullDisk:
    def write(self, directory: Path) -> list[Path]:
        raise OSError(28, "No space left on device")


class Group:
    """Two ranks of a role."""

    world_size = 2

    def __init__(self) -> None:
        self.snapshot: Any = Snapshot()
        self.silent = False
        self.bytes = 1

    def call(self, method: Callable, *args: Any) -> Any:
        if method is EngineWorker.checkpoint_bytes:
            return [self.bytes, self.bytes]
        checkpoint, role, contents, background = args
        assert (role, contents, background) == ("actor", ["model", "optimizer", "extra"], True)
        for rank in range(0 if self.silent else self.world_size):
            save_part(self.snapshot, Path(checkpoint), role, rank, background=False)


@pytest.fixture
def group() -> Iterator[Group]:
    yield Group()


def checkpointer(folder: Path, group: Group, keep: int | None = None, **options: Any) -> Checkpointer:
    roles = {
        "actor": RoleCheckpoints(
            "actor_rollout_ref.actor.checkpoint", CheckpointConfig(), keep, "trainer.max_actor_ckpt_to_keep"
        )
    }
    groups: Any = {"actor": group}
    return Checkpointer(
        TrainerConfig(**options), CheckpointStore(folder), groups, roles, lambda step: {"step": step}
    )


def run(saver: Checkpointer, values: list[float], *, preempted_at: int | None = None) -> None:
    """One step for each value of the metric."""
    with saver as checkpoints:
        for step, value in enumerate(values, 1):
            preempted = step == preempted_at
            checkpoints.after(
                step, {METRIC: value}, last=preempted or step == len(values), preempted=preempted
            )


def test_only_a_save_after_a_preemption_waits_for_no_other_role(tmp_path: Path, group: Group) -> None:
    saver, call, seen = checkpointer(tmp_path, group, save_freq=1), group.call, list[str]()

    @contextmanager
    def undisturbed() -> Iterator[None]:
        seen.append("begins")
        yield
        seen.append("ends")

    def noted(method: Callable, *args: Any) -> Any:
        seen.append(method.__name__)
        return call(method, *args)

    saver.undisturbed, group.call = undisturbed, noted  # type: ignore[method-assign]
    run(saver, [0.0] * 3, preempted_at=3)
    assert seen == ["save_checkpoint"] * 2 + ["begins", "save_checkpoint", "ends"]


def test_every_so_many_steps_and_at_the_end(tmp_path: Path, group: Group) -> None:
    run(checkpointer(tmp_path, group, save_freq=2), [0.0] * 5)
    store = CheckpointStore(tmp_path)
    assert (store.steps(), store.pointer()) == ([2, 4, 5], 5)
    assert json.loads((store.path(4) / "trainer.json").read_text()) == {"step": 4}


def test_without_a_frequency_only_a_signal_saves(tmp_path: Path, group: Group) -> None:
    run(checkpointer(tmp_path, group), [0.0] * 5)
    assert not list(tmp_path.iterdir())
    run(checkpointer(tmp_path, group), [0.0] * 5, preempted_at=3)
    assert CheckpointStore(tmp_path).pointer() == 3


def test_so_many_are_kept(tmp_path: Path, group: Group) -> None:
    run(checkpointer(tmp_path, group, keep=2, save_freq=1), [0.0] * 4)
    assert CheckpointStore(tmp_path).steps() == [3, 4]


def test_the_best_is_kept_apart_with_its_value(tmp_path: Path, group: Group) -> None:
    run(
        checkpointer(tmp_path, group, keep=1, save_freq=2, keep_best=METRIC),
        [0.1, 0.5, 0.7, 0.6, float("nan"), 0.7],
    )
    store = CheckpointStore(tmp_path)
    assert store.best() == {"metric": METRIC, "value": 0.7, "step": 3}
    assert (store.steps(), store.pointer()) == ([6], 6), (
        "a best step between two regular ones is no regular one"
    )
    assert (tmp_path / "best" / "global_step_3" / "manifest.json").exists()
    run(checkpointer(tmp_path, group, save_freq=2, keep_best=METRIC), [0.6, 0.65])
    assert store.best() == {"metric": METRIC, "value": 0.7, "step": 3}, (
        "a later start knows the value to beat"
    )


def test_of_a_loss_the_least_is_best(tmp_path: Path, group: Group) -> None:
    with checkpointer(tmp_path, group, keep_best="val/loss") as checkpoints:
        for step, loss in enumerate([0.6, 0.5, 0.5, 0.7], 1):
            checkpoints.after(step, {"val/loss": loss}, last=False, preempted=False)
    assert CheckpointStore(tmp_path).best() == {"metric": "val/loss", "value": 0.5, "step": 2}


def test_a_full_disk_costs_the_new_checkpoint_only(
    tmp_path: Path, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(tmp_path, group, save_freq=1) as checkpoints:
        checkpoints.after(1, {}, last=False, preempted=False)
        checkpoints.settle()
        group.snapshot = FullDisk()
        checkpoints.after(2, {}, last=False, preempted=False)
        checkpoints.settle()
        assert (
            "step 2 could not be saved: actor rank 0: [Errno 28] No space left on device; training continues"
            in caplog.text
        )
        assert "the last one is of step 1" in caplog.text
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step_1"], (
            "the half written one gives its room back"
        )
        group.snapshot = Snapshot()
        checkpoints.after(3, {}, last=True, preempted=False)
    assert CheckpointStore(tmp_path).steps() == [1, 3]


def test_a_disk_that_is_full_before_or_after_the_parts_costs_no_room(
    tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with checkpointer(tmp_path, group, save_freq=1, keep=1) as checkpoints:
        checkpoints.after(1, {}, last=False, preempted=False)
        checkpoints.settle()
        for step, name in ((2, "hydraflow.trainer.checkpoint_store.expect_part"), (3, f"{STORE}.point_to")):
            with monkeypatch.context() as patch:
                patch.setattr(name, full)
                checkpoints.after(step, {}, last=False, preempted=False)
                checkpoints.settle()
            assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step_1"], name
        checkpoints.after(4, {}, last=True, preempted=False)
    assert CheckpointStore(tmp_path).steps() == [4]


def test_a_step_that_the_pointer_names_stays_when_the_best_cannot_be_kept(
    tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved again by a later start, to which a resume would go back."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run(checkpointer(tmp_path, group, save_freq=1), [0.0])
    monkeypatch.setattr(f"{STORE}.publish_best", full)
    with checkpointer(tmp_path, group, save_freq=1, keep_best=METRIC) as checkpoints:
        checkpoints._save(1, True, 0.5)
        checkpoints.settle()
    assert CheckpointStore(tmp_path).newest_whole(["actor"]) == (1, {})


def test_a_full_disk_ends_the_run_where_that_is_wanted(tmp_path: Path, group: Group) -> None:
    group.snapshot = FullDisk()
    with pytest.raises(EnvironmentFault, match="stop_on_failed_save=true"):
        run(checkpointer(tmp_path, group, save_freq=1, stop_on_failed_save=True), [0.0])


def test_a_best_value_that_was_not_saved_does_not_count(tmp_path: Path, group: Group) -> None:
    with checkpointer(tmp_path, group, keep_best=METRIC) as checkpoints:
        group.snapshot = FullDisk()
        checkpoints.after(1, {METRIC: 0.9}, last=False, preempted=False)
        checkpoints.settle()
        group.snapshot = Snapshot()
        checkpoints.after(2, {METRIC: 0.4}, last=True, preempted=False)
    assert CheckpointStore(tmp_path).best() == {"metric": METRIC, "value": 0.4, "step": 2}


DIED = WorkerError(role="actor", rank=0, node="here", method="update", cause="the process died")


@pytest.mark.parametrize(
    "end",
    [DIED, HeadLost("Ray's control service is gone"), KeyboardInterrupt()],
    ids=lambda end: type(end).__name__,
)
def test_nobody_waits_for_workers_that_died(tmp_path: Path, group: Group, end: BaseException) -> None:
    group.silent = True
    started = time.monotonic()
    with pytest.raises(type(end)), checkpointer(tmp_path, group, save_freq=1, rpc_timeout=30) as checkpoints:
        checkpoints.after(1, {}, last=False, preempted=False)
        raise end
    assert time.monotonic() - started < 10
    assert CheckpointStore(tmp_path).steps() == []


def test_workers_that_do_not_finish_are_named(
    tmp_path: Path, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.silent = True
    run(checkpointer(tmp_path, group, save_freq=1, rpc_timeout=0.2), [0.0])
    assert "actor rank 0 did not finish in 0.2 seconds" in caplog.text


class Stale:
    """A file system on which some files cannot be read: all reports, that many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int):
        self.left, self._read = times, Path.read_text
        monkeypatch.setattr(Path, "read_text", lambda path, **options: self.read(path, **options))

    def read(self, path: Path, **options: Any) -> str:
        if path.parent.name == "parts" and self.left:
            self.left -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return self._read(path, **options)


def test_a_read_error_of_a_moment_costs_nothing(
    tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = Stale(monkeypatch, times=5)
    run(checkpointer(tmp_path, group, save_freq=1), [0.0])
    assert stale.left == 0 and CheckpointStore(tmp_path).pointer() == 1


@pytest.mark.parametrize("report", ["", "[1]"])
def test_a_report_that_stays_unreadable_costs_the_save(
    tmp_path: Path,
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    report: str,
) -> None:
    monkeypatch.setattr(checkpoint, "READ_RETRY_SECONDS", 0.2)
    group.silent = True
    with checkpointer(tmp_path, group, save_freq=1) as checkpoints:
        checkpoints.after(1, {}, last=False, preempted=False)
        parts = next(tmp_path.glob("global_step_1.*.unfinished/parts"))
        for rank in range(group.world_size):
            (parts / f"actor-{rank}.json").write_text(report)
        checkpoints.settle()
        # Either: the reader may come between the two writes.
        assert re.search("the checkpoint of step 1 could not be saved: actor rank [01]: ", caplog.text)
        group.silent = False
        checkpoints.after(2, {}, last=True, preempted=False)
    assert CheckpointStore(tmp_path).steps() == [2]


def test_a_rank_that_wrote_nothing_is_looked_at_again_first(tmp_path: Path, group: Group) -> None:
    group.silent = True
    with checkpointer(tmp_path, group, save_freq=1) as checkpoints:
        checkpoints.after(1, {}, last=True, preempted=False)
        parts = next(tmp_path.glob("global_step_1.*.unfinished/parts"))
        for rank in range(group.world_size):
            (parts / f"actor-{rank}.pending").unlink()
        time.sleep(0.3)
        for rank in range(group.world_size):
            save_part(group.snapshot, parts.parent, "actor", rank, background=False)
    assert CheckpointStore(tmp_path).steps() == [1]


def test_a_disk_that_does_not_answer_is_not_waited_for_without_end(
    tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(CheckpointStore, "seal", lambda *args: answers.wait(60))
    with pytest.raises(
        EnvironmentFault, match="is not on the disk after 1 seconds: the disk does not answer"
    ):
        run(checkpoints := checkpointer(tmp_path, group, save_freq=1, rpc_timeout=0.5), [0.0])
    assert checkpoints._pending is None, "it is waited for once"
    answers.set()


@pytest.mark.parametrize(
    ("free", "keep", "expected"),
    [(100, None, "refused"), (250, None, "warned"), (250, 1, ""), (2000, None, "")],
)
def test_room_is_looked_for_before_the_first_step(
    tmp_path: Path,
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
    keep: int | None,
    expected: str,
) -> None:
    """Two ranks write 50 bytes each, ten times."""
    group.bytes = 50
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    saver = checkpointer(tmp_path, group, keep=keep, save_freq=2)
    with caplog.at_level(logging.WARNING):
        if expected == "refused":
            with pytest.raises(ConfigError, match="10 are planned, and .* has room for 1"):
                saver.require_space(20, 0)
        else:
            saver.require_space(20, 0)
    assert ("keep fewer (trainer.max_actor_ckpt_to_keep=1)" in caplog.text) == (expected == "warned")


@pytest.mark.parametrize(
    ("keep", "there", "free", "has_room"),
    [(1, 1, 100, True), (1, 1, 99, False), (1, 3, 100, True), (2, 1, 199, False), (None, 1, 199, False)],
)
def test_a_checkpoint_that_will_be_removed_makes_room(
    tmp_path: Path,
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
    keep: int | None,
    there: int,
    free: int,
    has_room: bool,
) -> None:
    """A resumed run: one of its checkpoints takes 100 bytes."""
    group.bytes = 50
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    for step in range(there):
        (tmp_path / f"global_step_{step + 1}").mkdir()
    saver = checkpointer(tmp_path, group, keep=keep, save_freq=2)
    with nullcontext() if has_room else pytest.raises(ConfigError, match="has room for"):
        saver.require_space(20, 2)


def test_a_worse_model_does_not_replace_the_best_after_a_failed_save(tmp_path: Path, group: Group) -> None:
    """The save of step 1 fails while step 2, the best, is being compared."""
    saver = checkpointer(tmp_path, group, keep_best=METRIC)
    hangs, finish = threading.Event(), saver._finish

    def failing(unfinished: Path, step: int, *rest: Any) -> str:
        if step == 1:
            hangs.wait(30)
            return "no space left"
        return finish(unfinished, step, *rest)

    saver._finish = failing  # type: ignore[method-assign]
    with saver as checkpoints:
        checkpoints.after(1, {METRIC: 0.6}, last=False, preempted=False)
        threading.Timer(0.3, hangs.set).start()
        checkpoints.after(2, {METRIC: 0.7}, last=False, preempted=False)
        checkpoints.after(3, {METRIC: 0.65}, last=True, preempted=False)
    best = saver.store.best()
    assert best is not None and best["value"] == 0.7


def test_a_validation_that_is_made_up_for_is_compared(tmp_path: Path, group: Group) -> None:
    """The checkpoint of an earlier start is linked as the best, and stays where it is."""
    run(checkpointer(tmp_path, group, keep_best=METRIC, save_freq=2), [0.5, math.nan])
    saver = checkpointer(tmp_path, group, keep_best=METRIC, save_freq=2)
    saver.compare(2, {METRIC: 0.4})
    assert saver.store.best() == {"metric": METRIC, "value": 0.5, "step": 1}
    saver.compare(2, {METRIC: 0.6})
    assert saver.store.best() == {"metric": METRIC, "value": 0.6, "step": 2}
    assert (tmp_path / "best" / "global_step_2").is_dir() and saver.store.steps() == [2]


def test_a_save_that_failed_is_said_when_another_error_ends_the_run(
    tmp_path: Path, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.snapshot = FullDisk()
    with pytest.raises(GuardStop), checkpointer(tmp_path, group, save_freq=1) as checkpoints:
        checkpoints.after(1, {}, last=False, preempted=False)
        raise GuardStop("enough")
    assert "step 1 could not be saved: actor rank 0: [Errno 28] No space left on device" in caplog.text


class Odd:
    """Raises an error of a library's own, as safetensors does for a full disk."""

    def write(self, directory: Path) -> list[Path]:
        raise SafetensorError("I/O error: No space left on device (os error 28)")


def test_whatever_a_library_raises_is_reported(
    tmp_path: Path, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.snapshot = Odd()
    run(checkpointer(tmp_path, group, save_freq=1), [0.0])
    assert "actor rank 0: I/O error: No space left on device (os error 28)" in caplog.text
