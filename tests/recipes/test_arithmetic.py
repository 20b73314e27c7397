"""The embedded recipe: made once for each set of parameters, by one run at a time, with held-out problems
that nobody trains on."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

import pyarrow.parquet
import pytest
from filelock import FileLock

from hydraflow.data.arithmetic import answer, question
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.runtime import Runtime
from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.recipes import arithmetic
from hydraflow.recipes.arithmetic import ArithmeticAssets, cache_folder, is_made
from hydraflow.recipes.config import RecipeConfig
from hydraflow.trainer.clock import Clock
from hydraflow.trainer.config import RunConfig
from hydraflow.trainer.machine import Machine, open_runtime, training_pool

MACHINE = Machine("cpu", nodes=1, processes_per_node=1, threads=1)
SEED = 3
RIGHT = {question(a, b): answer(a, b) for a in range(100) for b in range(100)}


def small(cache: Path) -> RecipeConfig:
    """Three supervised steps."""
    return RecipeConfig(
        "arithmetic",
        str(cache),
        warm_start_steps=3,
        warm_start_accuracy=1.0,
        train_problems=160,
        val_problems=16,
    )


def no_runtime() -> NoReturn:
    raise AssertionError("something is trained again")


def prepare(recipe: RecipeConfig, scratch: Path, *, seconds: float | None = None) -> ArithmeticAssets:
    """Makes, with a worker process, what is missing."""
    runtimes: list[Runtime] = []

    def runtime() -> Runtime:
        runtimes.append(open_runtime(RunConfig(), RayInitConfig(), MACHINE, [training_pool(MACHINE)]))
        return runtimes[0]

    try:
        return arithmetic.prepare(
            recipe, SEED, MACHINE, Clock(seconds), runtime=runtime, scratch=scratch, logger=[]
        )
    finally:
        for started in runtimes:
            started.stop()


def reuse(recipe: RecipeConfig, scratch: Path) -> ArithmeticAssets:
    """What is there; training would fail."""
    return arithmetic.prepare(recipe, SEED, MACHINE, Clock(), runtime=no_runtime, scratch=scratch, logger=[])


@dataclass(frozen=True)
class Made:
    recipe: RecipeConfig
    assets: ArithmeticAssets
    scratch: Path


@pytest.fixture(scope="module")
def made(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    home = tmp_path_factory.mktemp("recipe")
    recipe = small(home / "cache")
    return Made(recipe, prepare(recipe, home / "scratch"), home / "scratch")


def problems(file: Path) -> set[str]:
    """The questions of a file of prompts or of conversations; every answer in it is right."""
    rows = pyarrow.parquet.read_table(file).to_pylist()
    asked = {}
    for row in rows:
        if "messages" in row:
            said, reported = row["messages"]
            asked[said["content"]] = reported["content"]
        else:
            asked[row["prompt"][0]["content"]] = row["reward_model"]["ground_truth"]
    assert all(RIGHT[said] == reported for said, reported in asked.items())
    assert len(asked) == len(rows), "no problem is in a file twice"
    return set(asked)


def test_held_out_problems_are_not_trained_on(made: Made) -> None:
    folder = cache_folder(made.recipe, SEED)
    train, val = problems(made.assets.train), problems(made.assets.val)
    assert (len(train), len(val), len(train & val)) == (160, 16, 0)
    assert problems(folder / "sft.parquet") == train
    assert problems(folder / "sft_val.parquet") == val


def test_the_warm_start_is_logged_with_the_run_and_the_model_is_kept(made: Made) -> None:
    assert made.assets.model.parent == cache_folder(made.recipe, SEED) and is_made(made.assets.model.parent)
    assert (made.scratch / "metrics.jsonl").read_text().count("\n") == 3


def test_the_second_time_nothing_is_trained(made: Made, tmp_path: Path) -> None:
    before = (made.assets.model / "config.json").stat().st_mtime_ns
    assert reuse(made.recipe, tmp_path) == made.assets
    assert (made.assets.model / "config.json").stat().st_mtime_ns == before
    assert not list(tmp_path.iterdir())


def test_what_is_made_is_taken_from_a_folder_that_cannot_be_written(made: Made, tmp_path: Path) -> None:
    with FileLock(made.assets.model.parent / "lock"):  # which would keep a writer waiting
        assert reuse(made.recipe, tmp_path) == made.assets


def test_without_a_home_folder_a_place_must_be_named() -> None:
    with pytest.raises(
        ConfigError,
        match="recipe.cache_dir: must be given: ~nobody-at-all/x is in the home folder, which is not known",
    ):
        cache_folder(small(Path("~nobody-at-all/x")), SEED)


def test_a_second_run_waits_for_the_first_and_takes_what_it_made(made: Made, tmp_path: Path) -> None:
    recipe = small(tmp_path / "cache")
    folder = cache_folder(recipe, SEED)
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool:
        with FileLock(folder / "lock"):
            second = pool.submit(reuse, recipe, tmp_path / "scratch")
            with pytest.raises(TimeoutError):
                second.result(timeout=0.3)
            shutil.copytree(made.assets.model, folder / "model")
        assert second.result(timeout=30).model == folder / "model"


def test_a_run_that_waits_too_long_says_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "LOCK_SECONDS", 0.1)
    recipe = small(tmp_path)
    folder = cache_folder(recipe, SEED)
    folder.mkdir(parents=True)
    with (
        FileLock(folder / "lock"),
        pytest.raises(EnvironmentFault, match=f"another run has been making {folder}"),
    ):
        reuse(recipe, tmp_path / "scratch")


def test_a_warm_start_that_the_clock_cut_short_is_not_kept_for_others(
    ray_session: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = small(tmp_path / "cache")
    assets = prepare(recipe, tmp_path / "scratch", seconds=0.0)
    assert (assets.model / "config.json").is_file() and (tmp_path / "scratch") in assets.model.parents
    assert not is_made(cache_folder(recipe, SEED))
    assert "the warm start ended at" not in caplog.text, "it was not too short, but interrupted"


@pytest.mark.parametrize("name", sorted({field.name for field in fields(RecipeConfig)} - {"cache_dir"}))
def test_every_parameter_has_its_own_folder(tmp_path: Path, name: str) -> None:
    recipe = small(tmp_path)
    value = getattr(recipe, name)
    other = replace(
        recipe,
        **{
            name: "another"
            if isinstance(value, str)
            else value / 2
            if isinstance(value, float)
            else value + 1
        },
    )
    assert cache_folder(other, SEED) != cache_folder(recipe, SEED)


def test_every_seed_has_its_own_folder_and_the_place_of_the_cache_does_not_matter(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    assert cache_folder(recipe, SEED + 1) != cache_folder(recipe, SEED)
    assert (
        cache_folder(replace(recipe, cache_dir=str(tmp_path / "b")), SEED).name
        == cache_folder(recipe, SEED).name
    )


def test_a_cache_on_a_disk_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, how: int) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(
        ConfigError, match="(?s)files cannot be locked there: .*No locks available.*local disk"
    ):
        arithmetic.prepare(
            small(tmp_path), SEED, MACHINE, Clock(None), runtime=no_runtime, scratch=tmp_path, logger=[]
        )
