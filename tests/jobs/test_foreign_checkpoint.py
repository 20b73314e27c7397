"""A whole run that is given a foreign checkpoint runs nothing of it, and resumes from an honest one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from engine.foreign import OBJECT, REFUSED, put_into_index, put_into_shard, seal
from jobs.command import LOCAL, ONE_RANK, SMALL_RECIPE, assert_refused, completed, hydraflow, read_steps

pytestmark = pytest.mark.slow

RESUME = [
    "trainer.resume_mode=resume_path",
    "trainer.resume_from_path=checkpoint/global_step_1",
    "trainer.default_local_dir=out",
]
WAYS = pytest.mark.parametrize("way", [[], ["trainer.val_only=true"]], ids=["trained", "validated"])


@pytest.fixture(scope="module")
def keys(recipe_cache: Path) -> list[str]:
    """What every run here is given: two steps, and a checkpoint after each."""
    every = [
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.save_final_model=false",
        "trainer.logger=[file]",
    ]
    return [*SMALL_RECIPE, *every, f"recipe.cache_dir={recipe_cache}"]


@pytest.fixture(scope="module")
def made(keys: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a run."""
    home = tmp_path_factory.mktemp("made")
    completed("main_ppo", *keys, *LOCAL, "trainer.default_local_dir=out", cwd=home)
    return home / "out"


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path) -> Path:
    """A copy of its first checkpoint."""
    return Path(shutil.copytree(made / "global_step_1", tmp_path / "checkpoint" / "global_step_1"))


@WAYS
@pytest.mark.parametrize("where", ["index", "object"])
def test_code_in_it_is_refused_before_anything_starts(
    checkpoint: Path, keys: list[str], tmp_path: Path, way: list[str], where: str
) -> None:
    if where == "index":
        put_into_index(checkpoint / "actor", tmp_path / "hacked")
    else:
        put_into_shard(checkpoint / "actor", tmp_path / "hacked", as_object=True)
    seal(checkpoint)
    done = hydraflow("main_ppo", *keys, *RESUME, *way, cwd=tmp_path)
    assert_refused(
        done, REFUSED if where == "index" else OBJECT, str(checkpoint / "actor" / "dcp" / ".metadata")
    )
    assert not (tmp_path / "hacked").exists() and not (tmp_path / "out" / "metrics.jsonl").exists()


def test_code_in_a_shard_is_not_run(checkpoint: Path, keys: list[str], tmp_path: Path) -> None:
    """Only the workers open shards."""
    put_into_shard(checkpoint / "actor", tmp_path / "hacked", as_object=False)
    seal(checkpoint)
    one = ["trainer.val_only=true", *ONE_RANK]
    done = hydraflow("main_ppo", *keys, *RESUME, *one, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 4, said[-3000:]
    assert "a shard holds more than tensors, which was not executed" in said, said[-3000:]
    assert not (tmp_path / "hacked").exists()


@WAYS
def test_an_honest_one_is_gone_on_from(
    checkpoint: Path, keys: list[str], tmp_path: Path, way: list[str]
) -> None:
    completed("main_ppo", *keys, *LOCAL, *RESUME, *way, cwd=tmp_path)
    assert max(row["step"] for row in read_steps(tmp_path / "out")) == (1 if way else 2)
