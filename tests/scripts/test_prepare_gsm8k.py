"""GSM8K from local copies in its raw format, and from there to prompts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pyarrow.parquet
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_gsm8k.py"
RAW = [
    {"question": "Tom has 6 bags of 7 apples. How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
    {"question": "A house costs 1 thousand and 200. How much?", "answer": "1000 + 200 = 1200\n#### 1,200"},
]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_gsm8k", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, RAW)))
    return path


def test_local_files_become_the_schema(
    script: ModuleType, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--train", str(raw), "--test", str(raw), "--output", str(tmp_path / "out")]) == 0
    assert "train.parquet: 2 problems" in capsys.readouterr().out
    first, second = pyarrow.parquet.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert first == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{RAW[0]['question']} {script.INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 0, "split": "test", **RAW[0]},
    }
    assert second["reward_model"]["ground_truth"] == "1200"


def test_the_instruction_can_be_left_out(script: ModuleType, raw: Path, tmp_path: Path) -> None:
    assert script.main(["--train", str(raw), "--output", str(tmp_path), "--instruction", ""]) == 0
    assert (
        pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()[0]["prompt"][0]["content"]
        == RAW[0]["question"]
    )
    assert not (tmp_path / "test.parquet").exists()


def test_mistakes_are_messages_and_exit_code_2(
    script: ModuleType, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--train", str(tmp_path / "no.jsonl"), "--output", str(tmp_path)]) == 2
    assert "no.jsonl: no such file" in capsys.readouterr().err
    raw.write_text('{"question": "q", "answer": "just 42"}\n')
    assert script.main(["--train", str(raw), "--output", str(tmp_path)]) == 2
    assert "row 0: its answer has no '#### number'" in capsys.readouterr().err
    raw.write_text('{"question": "q"}\n')
    assert script.main(["--train", str(raw), "--output", str(tmp_path)]) == 2
    assert "row 0: has no value in column answer" in capsys.readouterr().err


def test_what_cannot_be_written_or_has_no_result_is_named(
    script: ModuleType, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--train", str(raw), "--output", f"{raw}/x"]) == 2
    assert f"--output={raw}/x: cannot be written (Not a directory)" in capsys.readouterr().err
    rows = [*RAW, {"question": "Nothing?", "answer": "x ####"}, {"question": "A number?", "answer": 7}]
    raw.write_text("\n".join(map(json.dumps, rows)))
    assert script.main(["--train", str(raw), "--test", str(raw), "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("its answer has no '#### number'") == 2 and not (tmp_path / "out").exists()
