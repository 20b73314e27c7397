"""Reward functions that do not work, as a user meets them: exit code, words, and that nothing passes for a
success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs.command import LOCAL, ONE_RANK, SMALL_RECIPE, assert_refused, completed, hydraflow, read_steps
from jobs.conftest import write_lines

PATH = "reward.custom_reward_function.path"
SIGNATURE = "def compute_score(data_source, solution_str, ground_truth, extra_info):"
ROW = {"responses": "ab", "data_source": "mine", "reward_model": {"style": "rule", "ground_truth": "x"}}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("os._exit(0)", "exit code 0"),
        ("os.abort()", "signal 6"),
        ("raise SystemExit(0)", "SystemExit: 0 (line 2"),
    ],
)
@pytest.mark.parametrize("command", ["main_ppo", "main_eval"])
def test_a_file_that_ends_the_process_that_imports_it_is_no_success(
    tmp_path: Path, command: str, line: str, words: str
) -> None:
    (tmp_path / "reward.py").write_text(f"import os\n{line}\n{SIGNATURE}\n    return 1.0\n")
    write_lines(tmp_path / "rows.jsonl", [ROW])
    given = ["recipe=arithmetic"] if command == "main_ppo" else ["data.path=rows.jsonl"]
    assert_refused(hydraflow(command, *given, f"{PATH}=reward.py", cwd=tmp_path), PATH, "reward.py", words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["main_ppo", "main_eval"])
def test_functions_that_are_not_there_are_refused(tmp_path: Path, command: str) -> None:
    write_lines(tmp_path / "rows.jsonl", [ROW])
    given = ["recipe=arithmetic"] if command == "main_ppo" else ["data.path=rows.jsonl"]
    done = hydraflow(command, *given, "reward.functions=[{name: exact}, {name: maths}]", cwd=tmp_path)
    assert_refused(done, "reward.functions[1].name=maths", "must be data_source, exact")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_each_of_several_functions_is_logged(tmp_path: Path, recipe_cache: Path) -> None:
    (tmp_path / "mine.py").write_text(f"async {SIGNATURE}\n    return {{'score': len(solution_str)}}\n")
    given = [*SMALL_RECIPE, f"recipe.cache_dir={recipe_cache}", "trainer.default_local_dir=out"]
    given += ["trainer.total_training_steps=1"]
    given += ["reward.functions=[{name: exact}, {path: mine.py, weight: 0.5}]"]
    completed("main_ppo", *given, *LOCAL, cwd=tmp_path)
    step = read_steps(tmp_path / "out")[-1]
    assert step["reward/mine"] > 0
    assert step["critic/score/mean"] == pytest.approx(step["reward/exact"] + 0.5 * step["reward/mine"])


def test_an_evaluation_in_which_most_rows_fail_has_its_report_and_exit_code_5(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(f"{SIGNATURE}\n    return {{'ab': 1.0}}[solution_str]\n")
    write_lines(tmp_path / "rows.jsonl", [ROW, *[{**ROW, "responses": "other"}] * 2])
    given = ["data.path=rows.jsonl", f"{PATH}=reward.py", "output.path=report.json"]
    done = hydraflow("main_eval", *given, cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert (
        json.loads(done.stdout)["mine"]["failed"]
        == json.loads((tmp_path / "report.json").read_text())["mine"]["failed"]
        == 2
    )
    assert "failed on 2 of 3 rows (67%), more than reward.max_failed_share=0.5" in done.stderr
    assert "KeyError: 'other' (reward.py, line 2: return {'ab': 1.0}[solution_str])" in done.stderr
    assert "Traceback" not in done.stderr
    assert hydraflow("main_eval", *given, "reward.max_failed_share=0.7", cwd=tmp_path).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("validates", [False, True])
def test_a_run_whose_function_fails_on_every_row_ends_before_it_trains(
    tmp_path: Path, recipe_cache: Path, validates: bool
) -> None:
    (tmp_path / "reward.py").write_text(f"{SIGNATURE}\n    return {{}}[solution_str]\n")
    given = [*SMALL_RECIPE, f"recipe.cache_dir={recipe_cache}", "trainer.default_local_dir=out"]
    given += [
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        f"trainer.val_before_train={str(validates).lower()}",
    ]
    given += LOCAL if validates else ONE_RANK
    done = hydraflow("main_ppo", *given, f"{PATH}=reward.py", cwd=tmp_path)
    assert done.returncode == 5, done.stderr[-3000:]
    where = "validation after step 0: " if validates else "step 1: "
    assert (
        f"{where}the reward function failed on 32 of 32 rows (100%), more than reward.max_failed_share=0.5"
        in done.stderr
    )
    assert "KeyError: " in done.stderr and "(reward.py, line 2: return {}[solution_str])" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("global_step_*"))
    metrics = tmp_path / "out" / "metrics.jsonl"
    assert not metrics.exists() or read_steps(tmp_path / "out") == []


@pytest.mark.slow
def test_a_run_whose_responses_all_score_alike_says_so_once(tmp_path: Path, recipe_cache: Path) -> None:
    (tmp_path / "reward.py").write_text(f"{SIGNATURE}\n    return 0.0\n")
    given = [*SMALL_RECIPE, f"recipe.cache_dir={recipe_cache}", "trainer.default_local_dir=out"]
    given += ["trainer.total_training_steps=4", "trainer.val_before_train=false", *LOCAL]
    done = completed("main_ppo", *given, f"{PATH}=reward.py", cwd=tmp_path)
    words = "steps 1 to 3: every advantage is the same"
    assert done.stderr.count(words) == 1, done.stderr[-3000:]
    [symptom] = json.loads((tmp_path / "out" / "summary.json").read_text())["symptoms"]
    assert symptom.startswith(words)
    assert [row["critic/groups/no_signal_ratio"] for row in read_steps(tmp_path / "out")] == [1.0] * 4


@pytest.mark.slow
def test_a_failed_row_is_left_out_or_scored_as_the_run_says(tmp_path: Path, recipe_cache: Path) -> None:
    """The function fails on about a third of the responses."""
    lines = ["rest = sum(map(ord, solution_str)) % 3", "assert rest", "return rest - 1.0"]
    (tmp_path / "reward.py").write_text("\n    ".join([SIGNATURE, *lines]))
    given = [*SMALL_RECIPE, f"recipe.cache_dir={recipe_cache}", f"{PATH}=reward.py", *LOCAL]
    given += ["trainer.total_training_steps=1", "trainer.val_before_train=false", "data.val_max_samples=4"]
    given += ["reward.failure_score=-7", "reward.max_failed_share=1.0"]
    step = {}
    for how in ("mask", "score"):
        completed(
            "main_ppo", *given, f"reward.on_failure={how}", f"trainer.default_local_dir={how}", cwd=tmp_path
        )
        step[how] = read_steps(tmp_path / how)[-1]
    assert 0 < step["mask"]["reward/failed_rows"] == step["score"]["reward/failed_rows"] < 32
    assert (step["mask"]["critic/score/min"], step["score"]["critic/score/min"]) == (0, -7)
    assert step["mask"]["actor/grad_norm"] != step["score"]["actor/grad_norm"]
