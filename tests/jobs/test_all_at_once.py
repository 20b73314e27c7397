"""Everything that is wrong with files, models and the machine comes in one report, before anything is
started, and each thing once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from checkup.given import configured, jsonl, parquet, row
from jobs.command import assert_refused, hydraflow
from transformers import AutoConfig

from hydraflow.errors import ConfigError
from hydraflow.jobs.generate import run_generate
from hydraflow.jobs.inputs import Reader, require_context
from hydraflow.jobs.ppo import run_ppo
from hydraflow.jobs.saving import require_metric
from hydraflow.jobs.sft import run_sft
from hydraflow.schema import DPOConfig, GenerateConfig, RMConfig, SFTConfig

Mistake = tuple[dict[str, Any], str]
"""Keys with their wrong values, and what the report says."""


@pytest.fixture(autouse=True)
def no_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing may be started, and run folders would be made here."""

    def refuse(*given: object, **options: object) -> None:
        raise AssertionError("Ray must not be started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hydraflow.jobs.session.open_runtime", refuse)
    monkeypatch.setattr("hydraflow.jobs.generate.open_runtime", refuse)
    monkeypatch.setenv("PATH", str(tmp_path))  # without Nsight Systems
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")


@pytest.fixture
def mistakes(tmp_path: Path, tiny: str) -> dict[str, Mistake]:
    """Things of which each alone keeps a run from starting."""
    (tmp_path / "file").write_text("")
    (tmp_path / "reward.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "broken.parquet").write_text("this is no parquet")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    jsonl(tmp_path / "columns.jsonl", [{name: value for name, value in row().items() if name != "prompt"}])
    jsonl(tmp_path / "source.jsonl", [row(source="my/own")])
    other = copied(tiny, tmp_path / "other", hidden_size=48)
    return {
        "model folder": (
            {"actor_rollout_ref__model__path": "/nowhere/model"},
            "/nowhere/model: there is no such directory",
        ),
        "training file": (
            {"data__train_files": str(tmp_path / "broken.parquet")},
            "is not a readable Parquet file",
        ),
        "held-out file": ({"data__val_files": str(tmp_path / "gone.jsonl")}, "gone.jsonl: no such file"),
        "reward file": (
            {"reward__custom_reward_function__path": str(tmp_path / "reward.py")},
            "no_such_module_anywhere",
        ),
        "run folder": (
            {"trainer__default_local_dir": str(tmp_path / "file" / "run")},
            "the run folder cannot be written",
        ),
        "timeline": (
            {"ray_init__timeline_file": str(tmp_path / "file" / "t.json")},
            "ray_init.timeline_file=",
        ),
        "device": ({"trainer__device": "cuda"}, "this machine has no such device"),
        "profiler": (
            {"global_profiler__tool": "nsys", "global_profiler__steps": [1]},
            "nsys is not found on PATH",
        ),
        "tracker": ({"trainer__logger": ["mlflow"]}, "nothing answers there"),
        "critic": (
            {"algorithm__adv_estimator": "gae", "critic__model__path": "/nowhere/critic"},
            "critic.model.path=/nowhere/critic",
        ),
        "column": ({"data__val_files": str(tmp_path / "columns.jsonl")}, "has no value in column prompt"),
        "nesting": ({"data__val_files": str(tmp_path / "deep.jsonl")}, "nested more than 100 levels deep"),
        "prompt length": (
            {"data__max_prompt_length": 3},
            "the prompt has 4 tokens, more than data.max_prompt_length=3",
        ),
        "context": ({"data__max_response_length": 1021}, "more than the model's 1024 positions"),
        "weights": ({"actor_rollout_ref__model__path": str(other)}, "of its weights are of another shape"),
        "adapters": (
            {
                "actor_rollout_ref__model__lora_rank": 2,
                "actor_rollout_ref__model__target_modules": ["c_attn"],
            },
            "the model has no module c_attn; its linear layers are q_proj",
        ),
        "best checkpoint": ({"trainer__keep_best": "val/nothing"}, "no validation of this run measures it"),
    }


def copied(tiny: str, to: Path, **values: object) -> Path:
    """A model with other values in config.json."""
    folder = Path(shutil.copytree(tiny, to))
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | values))
    return folder


def assert_each_is_said(said: list[str], report: list[str]) -> None:
    """Each of these words is in a line of the report, which has no other lines."""
    missing = [word for word in said if not any(word in line for line in report)]
    assert len(report) == len(said) and not missing, (missing, report)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "__pycache__")


def report_of(run: Callable[[], None], folder: Path) -> list[str]:
    """The problems of a run that is refused and leaves nothing behind but bytecode of a reward file."""
    before = files_in(folder)
    with pytest.raises(ConfigError) as caught:
        run()
    assert not caught.value.started and files_in(folder) == before
    return list(map(str, caught.value.problems))


def ppo(tiny: str, folder: Path, *made: Mistake) -> list[str]:
    """The report on an otherwise good run with these mistakes."""
    data = parquet(folder / "data.parquet", [row()] + [row("1+1")] * 7)
    keys = {name: value for wrong, _ in made for name, value in wrong.items()}
    given = {"actor_rollout_ref__model__path": tiny, "data__train_files": str(data), **keys}
    return report_of(lambda: run_ppo(configured(**given)), folder)


def test_each_mistake_is_said_once_and_nothing_that_follows_from_it(
    tiny: str, tmp_path: Path, mistakes: dict[str, Mistake]
) -> None:
    reports = {name: ppo(tiny, tmp_path, mistake) for name, mistake in mistakes.items()}
    assert {
        name: report
        for name, report in reports.items()
        if len(report) != 1 or mistakes[name][1] not in report[0]
    } == {}


PAIRS = list(
    pairwise(
        [
            "model folder",
            "training file",
            "held-out file",
            "reward file",
            "run folder",
            "timeline",
            "device",
            "profiler",
        ]
        + ["tracker", "critic", "weights", "adapters"]
    )
)


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_mistakes_come_in_one_report(
    tiny: str, tmp_path: Path, mistakes: dict[str, Mistake], pair: tuple[str, str]
) -> None:
    made = [mistakes[name] for name in pair]
    assert_each_is_said([said for _, said in made], ppo(tiny, tmp_path, *made))


def test_all_mistakes_come_in_one_report(tiny: str, tmp_path: Path, mistakes: dict[str, Mistake]) -> None:
    """But for those that cannot be seen beside another: what a broken model makes of prompts, and a second
    wrong value of a key."""
    hidden = ["model folder", "held-out file", "nesting", "prompt length", "context", "best checkpoint"]
    made = [mistake for name, mistake in mistakes.items() if name not in hidden]
    assert_each_is_said([said for _, said in made], ppo(tiny, tmp_path, *made))


def test_a_recipe_is_looked_at_before_its_model_is_made(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "recipe__name": "arithmetic",
        "recipe__cache_dir": str(tmp_path),
        "algorithm__adv_estimator": "gae",
    }
    given |= {"critic__model__path": "/nowhere/critic", "actor_rollout_ref__model__lora_rank": 2}
    given |= {
        "actor_rollout_ref__model__target_modules": ["c_attn"],
        "data__max_prompt_length": 2,
        "trainer__logger": ["mlflow"],
    }
    report = report_of(lambda: run_ppo(configured(**given)), tmp_path)
    said = [
        "/nowhere/critic: there is no such directory",
        "no module c_attn",
        "more than data.max_prompt_length=2",
        "nothing answers",
    ]
    assert not [word for word in said if not any(word in line for line in report)], report


def test_a_broken_model_of_both_is_said_once(tiny: str, tmp_path: Path) -> None:
    other = copied(tiny, tmp_path / "other", hidden_size=48)
    broken = ({"actor_rollout_ref__model__path": str(other), "algorithm__adv_estimator": "gae"}, "")
    [problem] = ppo(tiny, tmp_path, broken)
    assert problem.startswith("actor_rollout_ref.model.path=")


def test_a_data_source_without_a_reward_function(
    tiny: str, tmp_path: Path, mistakes: dict[str, Mistake]
) -> None:
    source, folder = ({"data__val_files": str(tmp_path / "source.jsonl")}, "my/own"), mistakes["run folder"]
    assert_each_is_said([source[1], folder[1]], ppo(tiny, tmp_path, source, folder))


def test_main_sft_reports_all_at_once(tiny: str, tmp_path: Path) -> None:
    config = SFTConfig()
    config.model.path, config.model.lora_rank, config.model.target_modules = tiny, 2, ["c_attn"]
    config.data.train_files = str(tmp_path / "gone.jsonl")
    config.data.val_files = str(jsonl(tmp_path / "val.jsonl", [{"prompt": "1+1="}]))
    config.trainer.default_local_dir, config.trainer.device = "/proc/run", "cuda"
    config.trainer.logger, config.trainer.keep_best = ["mlflow"], "val/nothing"
    report = report_of(lambda: run_sft(config), tmp_path)
    said = [
        "c_attn",
        "gone.jsonl: no such file",
        "column response",
        "/proc/run",
        "no such device",
        "nothing answers",
        "val/nothing",
    ]
    assert_each_is_said(said, report)
    config.model.path = "/nowhere/at/all"
    report = report_of(lambda: run_sft(config), tmp_path)
    said[0] = "there is no such directory"
    assert_each_is_said(said, report)


def test_main_generate_reports_all_at_once(tiny: str, tmp_path: Path) -> None:
    config = GenerateConfig()
    config.model.path = str(
        copied(tiny, tmp_path / "other", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    )
    config.data.path = str(tmp_path / "gone.jsonl")
    config.output.path, config.ray_init.timeline_file, config.trainer.device = (
        "/proc/out.parquet",
        "/proc/t.json",
        "cuda",
    )
    report = report_of(lambda: run_generate(config), tmp_path)
    said = [
        "11 weights are not in its files",
        "gone.jsonl: no such file",
        "/proc/out.parquet",
        "/proc/t.json",
        "no such device",
    ]
    assert_each_is_said(said, report)


def test_rows_longer_than_the_models_positions(tiny: str, tmp_path: Path) -> None:
    """Of examples, and of every model that reads a run's rows."""
    short = copied(tiny, tmp_path / "short", max_position_embeddings=8)
    chats = [{"prompt": "1+1=", "response": "2" * 9}]
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3" * 9}]
    for config, rows in ((SFTConfig(), chats), (DPOConfig(), pairs), (RMConfig(), pairs)):
        config.model.path, config.data.train_files = str(short), str(jsonl(tmp_path / "rows.jsonl", rows * 2))
        config.data.train_batch_size = 2
        config.trainer.default_local_dir = str(tmp_path / "run")
        [problem] = report_of(partial(run_sft, config), tmp_path)
        assert "data.max_length=1024: the longest row of data.train_files has" in problem
        assert "more than the model's 8 positions" in problem
        assert problem.endswith("-> data.max_length=8 data.truncation=right")
    policy = ({"actor_rollout_ref__model__path": str(short)}, "the model's 8 positions")
    critic = ({"critic__model__path": str(short), "algorithm__adv_estimator": "gae"}, "the critic's 8")
    for mistake in (policy, critic):
        [problem] = ppo(tiny, tmp_path, mistake)
        assert problem.startswith("data.max_response_length=") and mistake[1] in problem


def test_a_model_needs_room_only_for_what_it_reads(tiny: str) -> None:
    """A critic reads no prompts of the validation, a teacher only those of its data source."""

    class Prompts:
        longest: ClassVar[dict[str | None, int]] = {"math": 20, "code": 4}

    short = AutoConfig.from_pretrained(tiny, max_position_embeddings=8)
    prompts: Any = Prompts()
    require_context([Reader("the critic", short, [None])], 4)
    require_context([Reader("the critic", None, [prompts])], 4)
    require_context([Reader("a teacher", short, [prompts], lambda source: source == "code")], 4)
    with pytest.raises(ConfigError, match="together that is more than the critic's 8 positions"):
        require_context([Reader("the critic", short, [prompts])], 4)


def test_files_that_are_not_there_and_the_machine(tiny: str, tmp_path: Path) -> None:
    """The command itself: what composing the configuration sees alone waits for what the job sees."""
    given = [
        "data.train_files=gone.parquet",
        "actor_rollout_ref.model.path=/nowhere/model",
        "trainer.default_local_dir=/proc/run",
    ]
    done = hydraflow("main_ppo", *given, "trainer.nnodes=2", "trainer.device=cpu", cwd=tmp_path)
    assert_refused(
        done,
        "4 problems found before anything was started",
        "gone.parquet",
        "/nowhere/model",
        "/proc/run",
        "needs 2 nodes",
    )


def test_a_best_checkpoint_without_held_out_rows_has_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"-> data.val_files=<file> or trainer.keep_best=null"):
        require_metric("val/score", [])
