"""Every tracker at once in a real run that is interrupted and resumed, and what is kept with the run."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs.command import LOCAL, SMALL_RECIPE, completed, read_steps

INSTALL = "pip install -c constraints.txt -e '.[dev]'"
# Not importorskip: that would import them all in every process of a test run, which takes three seconds.
pytestmark = [
    pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed: {INSTALL}")
    for package in ("wandb", "mlflow", "sqlalchemy", "swanlab")
]


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No login, no server and no home of the user's: everything stays in the run folder."""
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "MLFLOW_", "SWANLAB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@pytest.mark.slow
def test_all_trackers_follow_a_run_that_goes_on(tmp_path: Path, recipe_cache: Path) -> None:
    given = [
        *SMALL_RECIPE,
        *LOCAL,
        f"recipe.cache_dir={recipe_cache}",
        "trainer.default_local_dir=run",
        "trainer.save_freq=2",
    ]
    given += [
        "trainer.logger=[console,file,tensorboard,wandb,mlflow,swanlab]",
        "trainer.log_val_generations=3",
        "trainer.test_freq=2",
    ]
    given += [
        "trainer.rollout_data_dir=rollouts",
        "trainer.validation_data_dir=validations",
        "trainer.save_final_model=false",
    ]
    given += ["ray_init.runtime_env.env_vars={HYDRAFLOW_TEST_NOTE:kept}"]
    given += [
        "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    ]
    first = completed("main_ppo", *given, "trainer.total_training_steps=2", cwd=tmp_path)
    assert "wandb is installed, but there is no login: the run is kept offline" in first.stderr
    second = completed("main_ppo", *given, "trainer.total_training_steps=4", cwd=tmp_path)
    assert "were lost in total" not in first.stderr + second.stderr

    run = tmp_path / "run"
    scores = {
        step["step"]: step["critic/score/mean"] for step in read_steps(run) if "critic/score/mean" in step
    }
    assert sorted(scores) == [1, 2, 3, 4]
    assert mlflow_curve(run, "critic/score/mean") == pytest.approx(scores)
    assert len(list(run.glob("wandb/offline-run-*"))) == 2
    assert len({path.name.split("-", 4)[4] for path in run.glob("wandb/offline-run-*")}) == 1, "one identity"
    assert len({path.name.rpartition("-")[2] for path in run.glob("swanlab/run-*")}) == 1

    samples = [json.loads(line) for line in (run / "samples" / "step_000004.jsonl").read_text().splitlines()]
    assert [sorted(sample) for sample in samples] == [["ground_truth", "input", "output", "score"]] * 3
    assert all(sample["input"].endswith("=") for sample in samples)
    assert sorted(path.name for path in (tmp_path / "validations").iterdir()) == [
        "0.jsonl",
        "2.jsonl",
        "4.jsonl",
    ]
    assert len((tmp_path / "validations" / "4.jsonl").read_text().splitlines()) == 32
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "3.jsonl").read_text().splitlines()]
    assert len(rows) == 8 * 4
    assert sum(row["score"] for row in rows) / len(rows) == pytest.approx(scores[3])
    assert all(
        len({row["input"] for row in rows if row["uid"] == uid}) == 1 for uid in {row["uid"] for row in rows}
    )

    assert "HYDRAFLOW_TEST_NOTE: kept\n" in (run / "config.yaml").read_text()
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert [start["after_step"] for start in starts] == [0, 2]
    assert (
        "hydraflow.main_ppo" in starts[1]["command"]
        and "trainer.total_training_steps=4" in starts[1]["command"]
    )
    assert starts[0]["versions"]["torch"] and (
        starts[0]["git"] is None or len(starts[0]["git"]["commit"]) == 40
    )


def mlflow_curve(run: Path, name: str) -> dict[int, float]:
    """Step -> value, read by MLflow itself."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run}/mlflow/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("hydraflow").experiment_id])
    assert found.info.status == "FINISHED"
    return {point.step: point.value for point in client.get_metric_history(found.info.run_id, name)}
