"""python -m hydraflow.doctor, as a user calls it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from checkup.given import parquet, row
from jobs.command import assert_refused, hydraflow

from hydraflow.checkup.table import CHECKS

SMALL = [
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "algorithm.adv_estimator=grpo",
    "trainer.device=cpu",
]


def test_a_healthy_configuration(tiny: str, tmp_path: Path) -> None:
    data = parquet(tmp_path / "d.parquet", [row()] * 8)
    given = [
        f"actor_rollout_ref.model.path={tiny}",
        f"data.train_files={data}",
        *SMALL,
        "data.max_response_length=64",
    ]
    done = hydraflow("doctor", "--json", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    assert list(dict.fromkeys(found["check"] for found in rows)) == [check.name for check in CHECKS]
    assert set(rows[0]) == {"check", "state", "evidence", "remedy", "seconds"}
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


def test_problems_are_shown_with_remedies_and_exit_code_2(tiny: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    (model / "model.safetensors").unlink()
    data = parquet(
        tmp_path / "d.parquet", [{**row(), "prompt": [{"role": "user", "content": "1" * 700}]}] * 8
    )
    given = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", *SMALL]
    done = hydraflow("doctor", *given, "actor_rollout_ref.actor.ppo_mini_batch_size=3", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    for words in (
        "no weights",
        "8 are longer than data.max_prompt_length=512",
        "-> data.max_prompt_length=700",
        "must divide",
    ):
        assert words in said, done.stdout


def test_main_ppo_makes_the_fast_checks_before_anything_starts(tiny: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    data = parquet(tmp_path / "d.parquet", [row("1+1=<|end|>")] * 8)
    done = hydraflow(
        "main_ppo", f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", *SMALL, cwd=tmp_path
    )
    assert_refused(done, "1 problem found before anything was started", "model.safetensors is truncated")
    assert "WARNING hydraflow.checkup.preflight: chat template: a prompt holds <|end|> already" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_default_recipe_without_its_assets(tmp_path: Path) -> None:
    done = hydraflow("doctor", "--json", f"recipe.cache_dir={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    states = {found["check"]: found["state"] for found in json.loads(done.stdout)}
    assert (states["model files"], states["data files"], states["reward function"]) == (
        "skipped",
        "skipped",
        "ok",
    )
