"""main_eval: averages that a person can check, for files of main_generate and of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs.command import assert_refused, completed, hydraflow
from jobs.conftest import write_lines

from hydraflow.compose.loading import load
from hydraflow.data.files import write_rows
from hydraflow.errors import ConfigError
from hydraflow.jobs.evaluate import averages, score
from hydraflow.schema import EvalConfig


def row(responses: Any, truth: Any = "002", source: str = "arithmetic") -> dict[str, Any]:
    return {
        "responses": responses,
        "data_source": source,
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


def scored(path: Path, *overrides: str) -> dict[str, Any]:
    config = load("eval", EvalConfig, [f"data.path={path}", *overrides])
    return averages(score(config), config.reward)


SUMS = [row(["002", "003"]), row(["005", " 005 "], "005"), row(["8", "10"], "009")]
"""Right are 1, 2 and 0 of two responses: half of all, and one at least for two of three prompts."""


def test_averages_by_data_source(tmp_path: Path) -> None:
    words = [row("6 * 7 = 42\n#### 42", "42", "openai/gsm8k"), row("It is 42.", "42", "openai/gsm8k")]
    assert scored(write_lines(tmp_path / "rows.jsonl", [*SUMS, *words])) == {
        "arithmetic": {
            "score/mean@2": 0.5,
            "acc/mean@2": 0.5,
            "score/best@2": pytest.approx(2 / 3),
            "prompts": 3,
            "responses": 6,
            "failed": 0,
        },
        "openai/gsm8k": {
            "score/mean@1": 0.5,
            "acc/mean@1": 0.5,
            "score/best@1": 0.5,
            "prompts": 2,
            "responses": 2,
            "failed": 0,
        },
    }


def test_the_command_prints_and_writes_the_same(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", SUMS)
    done = completed("main_eval", "data.path=rows.parquet", "output.path=out/report.json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["arithmetic"]["acc/mean@2"] == 0.5


def test_what_a_reward_function_prints_is_not_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "import os\nprint('imported')\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    print('scored', flush=True)\n    os.write(1, b'written')\n    return 1.0\n"
    )
    write_lines(tmp_path / "rows.jsonl", [row("ab", source="mine")])
    done = completed(
        "main_eval", "data.path=rows.jsonl", "reward.custom_reward_function.path=reward.py", cwd=tmp_path
    )
    assert json.loads(done.stdout)["mine"]["score/mean@1"] == 1.0
    assert all(word in done.stderr for word in ("imported", "scored", "written"))


def test_several_functions_have_their_means_in_the_report(tmp_path: Path) -> None:
    functions = "reward.functions=[{name: exact}, {name: length, weight: 2, kwargs: {most: 1, buffer: 8}}]"
    report = scored(write_lines(tmp_path / "rows.jsonl", [row(["002", "003"], source="mine")]), functions)
    assert report["mine"]["score/mean@2"] == 0.5 + 2 * -0.25
    assert (report["mine"]["acc/mean@2"], report["mine"]["reward/exact"]) == (0.5, 0.5)
    assert report["mine"]["reward/length"] == -0.25


@pytest.mark.slow
def test_answers_of_main_generate(answers: Path) -> None:
    report = scored(answers)["arithmetic"]
    assert (report["acc/mean@1"], report["prompts"]) == (1.0, 4)


def test_a_function_of_ones_own_and_rows_that_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, bonus):\n"
        "    return {'score': len(solution_str) + bonus, 'acc': 1 / (len(solution_str) - 1)}\n"
    )
    given = [
        f"reward.custom_reward_function.path={reward}",
        "reward.custom_reward_function.reward_kwargs={bonus: 10}",
    ]
    report = scored(
        write_lines(tmp_path / "rows.jsonl", [row("ab", source="mine"), row("c", source="mine")]), *given
    )
    assert report["mine"] == {
        "score/mean@1": 6.0,
        "acc/mean@1": 0.5,
        "score/best@1": 6.0,
        "prompts": 2,
        "responses": 2,
        "failed": 1,
    }
    assert "mine: 1 of 2 responses could not be scored; the first: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row([])], "row 0: column responses must hold a text or a list of texts, not []"),
        ([row("002"), row([5])], "row 1: column responses must hold a text"),
        ([row("002", truth=None)], "row 0: column reward_model must hold"),
        ([{**row("002"), "reward_model": "002"}], "row 0: column reward_model must hold"),
        ([row("002"), row(["002", "003"])], "prompts of data source arithmetic have 1, 2 responses"),
        (
            [{"data_source": "arithmetic", "reward_model": {"ground_truth": "1"}}],
            "has no value in column responses",
        ),
        ([row("002", source="my/own")], "data_source=my/own: has no built-in reward function"),
    ],
)
def test_rows_that_cannot_be_scored(rows: list[dict], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        scored(write_lines(tmp_path / "rows.jsonl", rows))
    assert words in str(caught.value)


@pytest.mark.slow
def test_a_mistake_is_one_message_and_leaves_no_file(tmp_path: Path) -> None:
    assert_refused(hydraflow("main_eval", cwd=tmp_path), "data.path=null: must be given")
    done = hydraflow("main_eval", "data.path=no.parquet", "output.path=report.json", cwd=tmp_path)
    assert_refused(done, "data.path=no.parquet: no such file")
    assert list(tmp_path.iterdir()) == []
    write_lines(tmp_path / "rows.jsonl", [row("002")])
    assert_refused(
        hydraflow("main_eval", "data.path=rows.jsonl", "output.path=.", cwd=tmp_path),
        "output.path=.",
        "cannot be written",
    )
