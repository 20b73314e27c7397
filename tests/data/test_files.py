"""Reading files: rows keep their origin, and each kind of bad file is named."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hydraflow.data.files import read_records, write_rows
from hydraflow.errors import ConfigError


def test_rows_of_several_files_keep_order_and_origin(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", [{"x": 1, "nested": {"y": [1, 2]}}, {"x": 2, "nested": None}])
    (tmp_path / "b.jsonl").write_text('{"x": 3}\n\n{"x": 4, "other": "z"}\n')
    records = read_records(
        [str(tmp_path / "a.parquet"), tmp_path / "b.jsonl"],
        key="data.train_files",
        columns={"x": "data.prompt_key"},
    )
    assert [(r.values["x"], r.file.name, r.row) for r in records] == [
        (1, "a.parquet", 0),
        (2, "a.parquet", 1),
        (3, "b.jsonl", 0),
        (4, "b.jsonl", 1),
    ]
    assert records[0].values["nested"] == {"y": [1, 2]}


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"x": i}) for i in range(5)))
    assert [r.values["x"] for r in read_records(path, key="k", limit=2)] == [0, 1]
    with pytest.raises(ConfigError, match="a limit of 0 leaves no rows"):
        read_records(path, key="k", limit=0)


def test_every_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_records([tmp_path / "no.parquet", tmp_path / "nor.jsonl", tmp_path], key="data.val_files")
    message = str(caught.value)
    assert (
        "no.parquet: no such file" in message
        and "nor.jsonl: no such file" in message
        and "is a folder" in message
    )
    assert "data.val_files=" in message


def test_a_column_that_no_row_has_is_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"y": 1}\n' * 36)
    with pytest.raises(ConfigError) as caught:
        read_records(path, key="k", columns={"x": "data.prompt_key"})
    [problem] = caught.value.problems
    expected = f"{path} row 0: has no value in column x; it has y, like all 36 rows"
    assert str(problem) == f"{expected}\n      -> data.prompt_key=<one of its columns>"


@pytest.mark.parametrize("files", [None, [], 3, [3]])
def test_files_must_be_paths(files: object) -> None:
    with pytest.raises(ConfigError, match="must be a Parquet or JSONL file, or a list of them"):
        read_records(files, key="data.train_files")  # type: ignore[arg-type]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"x": 1}\n')
    assert read_records(tmp_path / "a.jsonl", key="k")[0].values == {"x": 1}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.parquet", "not parquet", "is not a readable Parquet file"),
        ("a.jsonl", '{"x": 1}\n{"x": \n', "line 2 is not JSON"),
        ("a.jsonl", "[1, 2]\n", "line 1 is a JSON list, not an object"),
        ("a.jsonl", "\n", "the file has no rows"),
        (
            "a.jsonl",
            '{"x": 1}\n{"x": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "line 2 is nested more than 100 levels deep",
        ),
        ("a.jsonl", '{"x": ' + "[" * 100 + "]" * 100 + "}", "line 1 is nested more than 100 levels deep"),
        ("a.jsonl", '{"x": ' + "7" * 5000 + "}", "line 1 cannot be read: Exceeds the limit"),
        ("a.csv", "x\n1\n", "ends in .csv; supported are .parquet, .jsonl, .json"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_records(tmp_path / name, key="data.train_files")


def test_a_row_without_a_needed_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1, "y": 1}\n{"y": 2}\n{"x": null, "y": 3}\n')
    with pytest.raises(ConfigError) as caught:
        read_records(path, key="k", columns={"x": "data.prompt_key"})
    assert [p.field for p in caught.value.problems] == [f"{path} row 1", f"{path} row 2"]
    assert "has no value in column x; it has y" in str(caught.value)


def test_only_the_first_problems_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n' + '{"y": 2}\n' * 9)
    with pytest.raises(ConfigError, match="4 more rows have this problem") as caught:
        read_records(path, key="k", columns={"x": "data.prompt_key"})
    assert len(caught.value.problems) == 6


def test_rows_nested_as_deep_as_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"x": ' + "[" * 99 + "]" * 99 + ', "many": [' + ", ".join(["[]"] * 200) + "]}"
    )
    [record] = read_records(tmp_path / "a.jsonl", key="k")
    assert len(record.values["many"]) == 200


def test_what_python_cannot_hold_is_the_users_to_know(tmp_path: Path) -> None:
    column = pyarrow.array([b"\xff\xfe"]).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"x": column}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="is not a readable Parquet file"):
        read_records(tmp_path / "a.parquet", key="k")


def test_columns_with_one_name_are_refused_and_maps_are_objects(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    maps = pyarrow.array([[("k", 1)], [], None], kind)
    pyarrow.parquet.write_table(pyarrow.table({"x": maps}), tmp_path / "a.parquet")
    assert [row.values["x"] for row in read_records(tmp_path / "a.parquet", key="k")] == [{"k": 1}, {}, None]
    twice = pyarrow.array([[("k", 1), ("k", 2)]], kind)
    pyarrow.parquet.write_table(pyarrow.table({"x": twice}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="is not a readable Parquet file"):
        read_records(tmp_path / "b.parquet", key="k")
    table = pyarrow.table([maps, twice.take([0, 0, 0]), maps], names=["x", "y", "x"])
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match="has several columns with the name x") as error:
        read_records(tmp_path / "c.parquet", key="k")
    assert "-> give each column a name of its own" in str(error.value)


def test_a_limit_reads_no_more_rows_than_it_allows(tmp_path: Path) -> None:
    """200 kB in the file, 4 GB as Python objects: the same long text a million times."""
    text = pyarrow.array(["x" * 4000])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1_000_000, pyarrow.int32()), text)
    pyarrow.parquet.write_table(pyarrow.table({"x": column}), tmp_path / "a.parquet")
    before = peak_megabytes()
    assert len(read_records(tmp_path / "a.parquet", key="k", limit=3)) == 3
    assert peak_megabytes() - before < 1000


def peak_megabytes() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_files_behind_the_limit_are_not_read(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", [{"x": number} for number in range(3000)])
    (tmp_path / "b.jsonl").write_text("no JSON")
    records = read_records([tmp_path / "a.parquet", tmp_path / "b.jsonl"], key="k", limit=2500)
    assert [record.values["x"] for record in records] == list(range(2500))


def test_a_row_without_a_value_that_others_have_is_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n{"x": null, "y": 2}\n{"x": 3}\n')
    with pytest.raises(ConfigError) as caught:
        read_records(path, key="k", columns={"x": "data.prompt_key"})
    assert [one.remedy for one in caught.value.problems] == ["fill it in, or remove the row"]
