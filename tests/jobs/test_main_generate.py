"""main_generate: greedy responses are Hugging Face's, sampled ones depend on the seed alone, and no half file
is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from jobs.command import LOCAL, ONE_RANK, assert_refused, completed, hydraflow, start, wait_for
from jobs.conftest import LEARNT, write_lines

from hydraflow.compose.loading import load
from hydraflow.data.files import FileRecord, read_records
from hydraflow.errors import ConfigError
from hydraflow.jobs.generate import input_table, run_generate
from hydraflow.jobs.output import output_file
from hydraflow.schema import GenerateConfig


def generate(model: str | Path, prompts: Path, output: Path, *more: str) -> list[list[str]]:
    """The responses that main_generate writes."""
    given = [
        f"model.path={model}",
        f"data.path={prompts}",
        f"output.path={output}",
        "data.max_response_length=6",
        "rollout.dtype=fp32",
    ]
    run_generate(load("generate", GenerateConfig, [*given, *more]))
    return pyarrow.parquet.read_table(output).column("responses").to_pylist()


def generated(model: str, prompts: Path, home: Path, *more: str) -> tuple[list[list[str]], str]:
    """The same in a process of its own, without Ray, and what it said on the way."""
    given = [f"model.path={model}", f"data.path={prompts}", "output.path=local.parquet"]
    given += ["data.max_response_length=6", "rollout.dtype=fp32", *LOCAL]
    done = completed("main_generate", *given, *more, cwd=home)
    return pyarrow.parquet.read_table(home / "local.parquet").column("responses").to_pylist(), done.stderr


@pytest.mark.slow
def test_the_trained_model_gives_the_answers_it_learnt(answers: Path) -> None:
    rows = pyarrow.parquet.read_table(answers).to_pylist()
    assert [(row["prompt"], row["responses"]) for row in rows] == [
        (question, [answer]) for question, answer in LEARNT.items()
    ]
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": "002"}
    assert [path.name for path in answers.parent.iterdir()] == ["answers.parquet"]


@pytest.mark.slow
def test_greedy_is_what_hugging_face_generates(tiny: str, prompts: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    expected = []
    for question in LEARNT:
        ids = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
        expected.append([tokenizer.decode(output, skip_special_tokens=True)])
    assert generated(tiny, prompts, tmp_path, "rollout.temperature=0")[0] == expected


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_samples_depend_on_the_seed_alone(tiny: str, prompts: Path, tmp_path: Path) -> None:
    """Two ranks in Ray, and one process that answers a prompt after the other."""
    first = generate(tiny, prompts, tmp_path / "out.parquet", "rollout.n=3")
    assert [len(set(texts)) for texts in first] == [3, 3, 3, 3], "three different responses for each prompt"
    given = ["rollout.n=3", "rollout.max_num_seqs=1"]
    again, reported = generated(tiny, prompts, tmp_path, *given)
    assert again == first
    assert re.findall(r"\d of 4 prompts", reported) == [f"{i} of 4 prompts" for i in (1, 2, 3, 4)]
    assert generated(tiny, prompts, tmp_path, *given, "trainer.seed=2")[0] != first


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_file(tiny: str, prompts: Path, tmp_path: Path) -> None:
    given = [
        f"model.path={tiny}",
        f"data.path=[{','.join([str(prompts)] * 200)}]",
        "output.path=out/responses.parquet",
    ]
    slow = ["rollout.max_num_seqs=1", "rollout.ignore_eos=true", "data.max_response_length=200"]
    slow += ONE_RANK
    started = start("main_generate", *given, *slow, cwd=tmp_path)
    wait_for(
        lambda: started.process.poll() is not None or "of 800 prompts" in started.said(), 240, "responses"
    )
    assert started.process.poll() is None, started.said()[-3000:]
    os.killpg(started.process.pid, signal.SIGINT)
    assert started.ended(60) == 130, started.said()[-3000:]
    assert "Traceback" not in started.said()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_a_mistake_is_one_message(tiny: str, tmp_path: Path) -> None:
    assert_refused(
        hydraflow("main_generate", cwd=tmp_path),
        "3 problems",
        "model.path=null",
        "data.path=null",
        "output.path=null",
    )
    done = hydraflow(
        "main_generate", f"model.path={tiny}", "data.path=no.parquet", "output.path=out.parquet", cwd=tmp_path
    )
    assert_refused(done, "data.path=no.parquet: no such file")
    assert list(tmp_path.iterdir()) == [], "no empty output"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.path=./nowhere", "model.path=./nowhere: there is no such directory"),
        ("data.prompt_key=question", "has no value in column question"),
        ("output.path=responses.json", "must end in .parquet\n      -> output.path=responses.parquet"),
        (
            "output.path=/dev/null/responses.parquet",
            "output.path=/dev/null/responses.parquet: cannot be written",
        ),
        (
            "data.max_response_length=1020",
            "the longest prompt has 6 tokens; together that is more than the model's 1024 positions",
        ),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    override: str, words: str, tiny: str, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(tiny, prompts, tmp_path / "out.parquet", override)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_no_parquet_file_can_hold_are_found_before_sampling(tiny: str, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "mixed.jsonl", [{"prompt": "1+1=", "level": 1}, {"prompt": "2+2=", "level": "hard"}]
    )
    with pytest.raises(ConfigError, match="column level cannot be written as Parquet"):
        generate(tiny, path, tmp_path / "out.parquet")
    assert [file.name for file in tmp_path.iterdir()] == ["mixed.jsonl"]


def test_text_that_is_no_unicode_is_named() -> None:
    """Half of an emoji, from text that was cut off."""
    with pytest.raises(ConfigError, match="column note has text that is not Unicode: .*surrogates not"):
        input_table([FileRecord({"prompt": "a", "note": "cut \ud83d"}, Path("rows.jsonl"), 0)])
    with pytest.raises(ConfigError, match="has text that is not Unicode"):
        input_table([FileRecord({"prompt": "a", "\ud800": 1}, Path("rows.jsonl"), 0)])


def test_rows_with_different_columns_keep_them_all() -> None:
    rows = [{"prompt": "a", "extra_info": {}, "responses": ["old"]}, {"prompt": "b", "level": 2}]
    table = input_table([FileRecord(row, Path("rows.jsonl"), i) for i, row in enumerate(rows)])
    assert table.to_pylist() == [
        {"prompt": "a", "extra_info": None, "level": None},
        {"prompt": "b", "extra_info": None, "level": 2},
    ]


def test_columns_of_parquet_files_keep_their_types(tmp_path: Path) -> None:
    """Python objects do not say which types they had: a map's are pairs."""
    columns = {
        "prompt": pyarrow.array(["a", "b"], pyarrow.large_string()),
        "tags": pyarrow.array([[("x", 1)], None], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "level": pyarrow.array([1, None], pyarrow.int8()),
        "none": pyarrow.array([None, None], pyarrow.float32()),
        "kind": pyarrow.array(["k", "k"]).dictionary_encode(),
    }
    table, other = pyarrow.table(columns), pyarrow.table({"prompt": ["c"], "level": [2.5]})
    pyarrow.parquet.write_table(table, tmp_path / "one.parquet")
    pyarrow.parquet.write_table(other, tmp_path / "two.parquet")
    found = input_table(read_records(tmp_path / "one.parquet", key="data.path"))
    assert found.schema.equals(pyarrow.parquet.read_schema(tmp_path / "one.parquet"))
    assert found.equals(table.cast(found.schema))
    files = [tmp_path / "one.parquet", tmp_path / "two.parquet"]
    both = input_table(read_records(files, key="data.path"))
    assert both.column("level").to_pylist() == [1, None, 2.5], "files that do not agree"
    assert both.column("tags").to_pylist() == [[("x", 1)], None, None]


def test_a_failure_keeps_the_earlier_output(tmp_path: Path) -> None:
    target = tmp_path / "out.parquet"
    target.write_text("earlier")
    with pytest.raises(RuntimeError), output_file(str(target)) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("out.parquet", "earlier")]
    with output_file(str(target)) as unfinished:
        unfinished.write_text("whole")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("out.parquet", "whole")]
