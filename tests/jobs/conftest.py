"""Runs that several files look at: one of the main job, and a model that learns four sums by heart (main_sft)
and is asked them (main_generate)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs.command import SMALL_RECIPE, completed, end_leftovers
from once import made_once

LEARNT = {"1+1=": "002", "17+25=": "042", "60+60=": "120", "9+9=": "018"}
"""What the model learns in the first turn of a conversation."""


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Runs that a failed test has left would take the processors from the next one."""
    yield
    end_leftovers()


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    """Runs in the process of the tests draw no curve, which takes a tenth of a second. `run` does: it has a
    process of its own."""
    from hydraflow.jobs import session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "draw_curve", lambda *_, **__: True)
        yield


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, recipe_cache: Path) -> Path:
    """The folder of a run of three steps on two ranks, with validation and a timeline, the second step
    profiled; started in a folder that has nothing to do with the project."""
    given = [*SMALL_RECIPE, f"recipe.cache_dir={recipe_cache}", "log.level=debug"]
    given += ["+trainer.total_training_steps=3", "++trainer.test_freq=2", "trainer.log_val_generations=4"]
    given += ["trainer.default_local_dir=out", "ray_init.timeline_file=out/timeline.json"]
    given += ["global_profiler.tool=torch", "global_profiler.steps=[2]"]

    def train(home: Path) -> None:
        done = completed("main_ppo", *given, cwd=home, fresh=True)
        assert "\x1b[" not in done.stdout, "piped to a file it prints plain lines"
        assert str(home / "out") in done.stdout, "the last line says where the run folder is"

    return made_once(tmp_path_factory, "run", train) / "out"


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four conversations, each with a second question that the user asks after the answer to the first."""
    rows = []
    for question, answer in LEARNT.items():
        said = [("user", question), ("assistant", answer), ("user", "0+0="), ("assistant", "000")]
        rows.append({"messages": [{"role": role, "content": content} for role, content in said]})
    return write_lines(tmp_path_factory.mktemp("conversations") / "train.jsonl", rows)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first turns alone, in the columns prompt and response."""
    rows = [{"prompt": question, "response": answer} for question, answer in LEARNT.items()]
    return write_lines(tmp_path_factory.mktemp("pairs") / "val.jsonl", rows)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The questions, and what main_eval needs to judge answers."""
    rows = [
        {
            "prompt": question,
            "data_source": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": answer},
        }
        for question, answer in LEARNT.items()
    ]
    return write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


@pytest.fixture(scope="session")
def sft_keys(tiny: str, conversations: Path, pairs: Path) -> list[str]:
    """The arguments of every supervised run here."""
    files = [f"model.path={tiny}", f"data.train_files={conversations}", f"data.val_files={pairs}"]
    return [
        *files,
        "data.train_batch_size=4",
        "data.max_length=32",
        "optim.lr=0.01",
        "trainer.test_freq=30",
        "fsdp_config.dtype=fp32",
    ]


@pytest.fixture(scope="session")
def sft_run(tmp_path_factory: pytest.TempPathFactory, sft_keys: list[str]) -> Path:
    """The run folder of main_sft."""
    given = [*sft_keys, "trainer.total_training_steps=60", "trainer.default_local_dir=out"]

    def train(home: Path) -> None:
        done = completed("main_sft", *given, cwd=home)
        assert "command line" in done.stdout, "the plan says where a number comes from"

    return made_once(tmp_path_factory, "sft", train) / "out"


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory, sft_run: Path, prompts: Path) -> Path:
    """What main_generate wrote: greedy answers of the trained model."""
    given = [f"model.path={sft_run}/final_model", f"data.path={prompts}", "output.path=deep/answers.parquet"]
    given += ["data.max_response_length=8", "rollout.temperature=0", "ray_init.timeline_file=t.json"]

    def generate(home: Path) -> None:
        done = completed("main_generate", *given, cwd=home)
        assert done.stdout == "4 prompts, 1 response each: deep/answers.parquet\n"

    return made_once(tmp_path_factory, "answers", generate) / "deep" / "answers.parquet"
