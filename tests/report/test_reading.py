"""Run folders in every state: whole, half written, damaged, empty, and folders that are none."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from report.runs import SCORE, record, write_run

from hydraflow.errors import ConfigError
from hydraflow.report.page import render
from hydraflow.report.reading import read_run, samples_of


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run(
        write_run(tmp_path / "run", [record(step) for step in (1, 2, 3)], samples={2: [{"output": "a"}]})
    )
    column = run.columns[SCORE]
    assert column.steps.tolist() == [1, 2, 3] and column.seconds.tolist() == [1.5, 3.0, 4.5]
    assert column.values[1] == 1 - math.exp(-2 / 50)
    assert (run.last_step, run.seconds, run.missing_steps, run.unread) == (3, 4.5, 0, [])
    assert run.settings == {"trainer.seed": ("1", "default"), "data.train_batch_size": ("64", "command line")}
    assert samples_of(run, 2) == [{"output": "a"}] and run.unread == []
    assert "step" not in run.columns and "seconds" not in run.columns


def test_lines_of_a_step_are_merged_and_numbers_that_json_has_not_are_read(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "seconds": 1, "a": "nan"},
        {"step": 3, "seconds": 2, "a": "-inf", "words": "x"},
        {"step": 1, "seconds": 1, "b": 2},
    ]
    run = read_run(write_run(tmp_path / "run", lines))
    np.testing.assert_array_equal(run.columns["a"].values, [math.nan, -math.inf])
    assert run.columns["b"].steps.tolist() == [1]
    assert "words" not in run.columns
    assert run.missing_steps == 1


def test_a_half_written_run_and_rubbish_in_the_middle(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record(1)], why=None)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"step": 2, "sec\n\xff\xfe\x00\n[1, 2]\n{"step": "x"}\n{"step": NaN}\n{"step": 1e30, "a": 1}\n'
            + json.dumps(record(4)).encode()
            + b'\n{"step": 5, "se'
        )
    run = read_run(folder)
    assert run.columns[SCORE].steps.tolist() == [1, 4]
    assert run.unread == ["metrics.jsonl: 6 of 9 lines are not valid records"], (
        "the torn last line is no fault"
    )
    assert "it is still running" in render([run]).lower()


@pytest.mark.parametrize(
    "name", ["summary.json", "plan.json", "run.json", "config_origins.json", "samples/step_000001.jsonl"]
)
@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "null",
        '{"starts": 3, "quantities": {"a": 1}, "notes": 5, "total_steps": "many"}',
        "\x00",
    ],
)
def test_a_page_is_made_whatever_a_file_holds(tmp_path: Path, name: str, content: str) -> None:
    folder = write_run(tmp_path / "run", [record(1), record(2)])
    (folder / name).write_text(content)
    assert "</html>" in render([read_run(folder)])


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("trainer:\n  seed: 3\n  logger: [file]\ndata: {}\n")
    run = read_run(tmp_path / "run")
    assert run.settings == {"trainer.seed": ("3", ""), "trainer.logger": ('["file"]', ""), "data": ("{}", "")}
    page = render([run])
    assert "No step has been logged yet." in page and "No phase has been timed." in page


def test_secrets_of_the_configuration_are_hidden(tmp_path: Path) -> None:
    settings = {
        "ray_init.env_vars": ({"WANDB_API_KEY": "s3cr3t"}, "command line"),
        "x.api_key": ("s3cr3t", "default"),
    }
    settings["trainer.wandb_proxy"] = ("http://me:s3cr3t@host:1", "default")  # type: ignore[assignment]
    page = render([read_run(write_run(tmp_path / "run", [record(1)], settings=settings))])
    assert "s3cr3t" not in page and "http://(hidden)@host:1" in page


def test_folders_that_hold_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read_run(tmp_path / "nowhere")
    write_run(tmp_path / "runs" / "ppo-1", [record(1)])
    with pytest.raises(ConfigError, match=r"holds no run.*\n.*runs/ppo-1"):
        read_run(tmp_path / "runs")


@pytest.mark.skipif(os.geteuid() != 0, reason="root reads every folder, and becomes another user here")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    run = tmp_path / "private" / "run"
    run.mkdir(parents=True)
    run.parent.chmod(0o700)
    code = "import os; from pathlib import Path; from hydraflow.errors import ConfigError\n"
    code += "from hydraflow.report.reading import read_run\nos.setuid(65534)\n"
    code += f"try: read_run(Path({str(run)!r}))\nexcept ConfigError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "cannot be read: Permission denied" in done.stdout, done.stderr


def test_what_runs_of_earlier_versions_wrote_down_is_hidden_too(tmp_path: Path) -> None:
    start = {
        "command": "python -m hydraflow.main_ppo 'judge.PASSWORD=s3cr3t s3cr3t' +env_vars={A:s3cr3t} seed=1",
        "host": "a",
    }
    why = "ValueError: https://host/?token=s3cr3t is gone"
    run = read_run(
        write_run(
            tmp_path / "run", [record(1)], why=why, starts=[start], settings={"e.env_vars.A": ("s3cr3t", "x")}
        )
    )
    (run.folder / "requeue").write_text(json.dumps({"step": 1, "why": "lost http://me:s3cr3t@host"}))
    page = render([run])
    assert "s3cr3t" not in page
    assert (
        "judge.PASSWORD=(hidden)" in page
        and "seed=1" in page
        and "token=(hidden) is gone" in page
        and "lost http://(hidden)@host" in page
    )


@pytest.mark.parametrize("seconds", ["inf", "-inf", "nan", 10**400, None, "soon"])
def test_times_that_are_none_are_left_out(tmp_path: Path, seconds: object) -> None:
    folder = write_run(tmp_path / "run", [])
    lines = [
        {"step": 1, "seconds": 2.0, "a": 1},
        {"step": 2, "seconds": seconds, "a": 2},
        {"step": 3, "seconds": 4.0, "a": 3},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert run.columns["a"].seconds.tolist() == [2.0, 2.0, 4.0] and run.seconds == 4.0
    assert "</html>" in render([run])


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 8)
)


@pytest.mark.parametrize(
    "content", ["a: &a [*a]\n", BOMB, "a: " + "[" * 3000, "a: " + "{b: " * 60 + "1" + "}" * 60]
)
def test_a_configuration_that_stands_for_more_than_a_page_is_not_followed(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "config.yaml").write_text(content)
    run = read_run(tmp_path)
    assert run.settings == {} and len(run.unread) == 1 and run.unread[0].startswith("config.yaml: ")
    assert "</html>" in render([run])


@pytest.mark.parametrize("name", ["summary.json", "run.json", "config_origins.json", "plan.json"])
def test_json_that_is_nested_too_deeply_is_not_followed(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run", [record(1)])
    (folder / name).write_text('{"starts": ' + "[" * 400 + "]" * 400 + "}")
    run = read_run(folder)
    assert f"{name}: is not a JSON object of a run" in run.unread and "</html>" in render([run])


def test_fifty_levels_are_followed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record(1)])
    (folder / "summary.json").write_text('{"starts": ' + "[" * 49 + "1" + "]" * 49 + "}")
    assert not read_run(folder).unread
    (folder / "summary.json").write_text('{"starts": ' + "[" * 50 + "1" + "]" * 50 + "}")
    assert read_run(folder).unread
