"""Trackers, by using them."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest
from checkup.given import configured, findings, states

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import State
from hydraflow.checkup.preflight import require_trackers
from hydraflow.checkup.trackers import ON_SERVERS, TRACKER_CHECKS, judge_login, judge_mlflow
from hydraflow.errors import ConfigError
from hydraflow.tracking.trackers import TRACKERS
from hydraflow.trainer.config import LOGGERS, SupervisedTrainerConfig

REMEDY = "trainer.logger=[console]"


def test_every_tracker_has_a_check() -> None:
    assert set(TRACKER_CHECKS) == set(TRACKERS) == set(LOGGERS)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    file, *others = findings(
        CheckContext(configured(trainer__default_local_dir=str(blocked / "run"))), "trackers"
    )
    assert file.state is State.PROBLEM and "trainer.default_local_dir" in file.remedy
    assert states(others) == [State.OK, State.OK]
    assert not (tmp_path / "run").exists()


def test_trackers_write_what_they_are_given(tmp_path: Path) -> None:
    found = findings(
        CheckContext(configured(trainer__default_local_dir=str(tmp_path / "run"))), "trackers, used"
    )
    assert [(finding.state, finding.evidence.split()[0]) for finding in found] == [
        (State.OK, "file"),
        (State.OK, "tensorboard"),
    ]
    assert not (tmp_path / "run").exists(), "nothing is left behind"


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has none of the trackers' packages."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("name", ON_SERVERS)
def test_a_missing_package_is_answered_before_the_start(without_packages: None, name: str) -> None:
    trainer = SupervisedTrainerConfig(logger=["console", name])
    with pytest.raises(ConfigError) as caught:
        require_trackers(trainer)
    [problem] = caught.value.problems
    assert problem.rule == f"trainer.logger has {name}, which is not installed"
    assert problem.remedy == f"pip install 'hydraflow-trainer[{name}]', or {REMEDY}"


def test_a_missing_login_is_a_warning_unless_offline_was_asked_for() -> None:
    reported = judge_login("wandb", "there is no login", "wandb login")
    assert (reported.state, reported.remedy) == (State.WARNING, "wandb login")
    assert "kept offline in <run folder>/wandb" in reported.evidence
    assert judge_login("wandb", "WANDB_MODE=offline", "wandb login").state is State.OK
    assert judge_login("wandb", None, "wandb login").state is State.OK


def test_mlflow_servers_that_answer_and_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert judge_mlflow({"MLFLOW_TRACKING_URI": address}, without=REMEDY).state is State.OK
    silent = judge_mlflow({"MLFLOW_TRACKING_URI": address}, without=REMEDY)
    assert (
        silent.state is State.PROBLEM
        and "nothing answers there" in silent.evidence
        and REMEDY in silent.remedy
    )


def test_an_mlflow_server_behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the proxy can be reached from here; what is behind it is seen when the run starts."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "inside.invalid")
        assert (
            judge_mlflow({"MLFLOW_TRACKING_URI": "http://mlflow.invalid"}, without=REMEDY).state is State.OK
        )
        assert (
            judge_mlflow({"MLFLOW_TRACKING_URI": "http://inside.invalid"}, without=REMEDY).state
            is State.PROBLEM
        )


def test_mlflow_stores(without_packages: None) -> None:
    bare = judge_mlflow({}, without=REMEDY)
    assert bare.state is State.PROBLEM and "sqlalchemy and alembic" in bare.evidence
    assert judge_mlflow({"MLFLOW_TRACKING_URI": "file:///tmp/x"}, without=REMEDY).state is State.PROBLEM
    allowed = {"MLFLOW_TRACKING_URI": "/tmp/x", "MLFLOW_ALLOW_FILE_STORE": "true"}
    assert judge_mlflow(allowed, without=REMEDY).state is State.OK


def test_a_folder_for_responses_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    keys = {
        "trainer__rollout_data_dir": str(tmp_path / "file" / "deep"),
        "trainer__validation_data_dir": str(tmp_path / "val"),
    }
    keys["trainer__debug__save_rollouts"] = keys["trainer__rollout_data_dir"]
    *_, rollouts, validations, dumps = findings(CheckContext(configured(**keys)), "trackers")
    assert rollouts.state is State.PROBLEM and "trainer.rollout_data_dir=<a folder" in rollouts.remedy
    assert dumps.state is State.PROBLEM and "trainer.debug.save_rollouts=<a folder" in dumps.remedy
    assert validations.state is State.OK and not (tmp_path / "val").exists()
