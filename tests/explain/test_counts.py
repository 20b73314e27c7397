"""Rows are counted without being read, and what is not on this machine is no mistake."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hydraflow.explain.counts import RowCount, count_rows, notes_on

KEY = "data.train_files"


def parquet(path: Path, rows: int) -> str:
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": [str(i) for i in range(rows)]}), path, row_group_size=3
    )
    return str(path)


def test_parquet_rows_come_from_the_footer(tmp_path: Path) -> None:
    file = Path(parquet(tmp_path / "a.parquet", 10))
    whole = file.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    # The rows themselves are gone.
    file.write_bytes(b"PAR1" + b"\0" * (len(whole) - footer - 4) + whole[-footer:])
    assert count_rows(str(file), key=KEY) == RowCount(10)


def test_files_add_up_and_the_limit_cuts(tmp_path: Path) -> None:
    lines = tmp_path / "b.jsonl"
    # No newline at the end.
    lines.write_text("\n".join([json.dumps({"prompt": "1"}), "", json.dumps({"prompt": "2"})]))
    files = [parquet(tmp_path / "a.parquet", 10), str(lines)]
    assert count_rows(files, key=KEY).rows == 12
    assert count_rows(files, key=KEY, limit=11).rows == 11
    assert count_rows(files, key=KEY, limit=100).rows == 12


def test_a_filter_makes_the_count_an_upper_bound(tmp_path: Path) -> None:
    found = count_rows(parquet(tmp_path / "a.parquet", 10), key=KEY, filtered=True)
    assert (found.rows, found.at_most, str(found)) == (10, True, "at most 10")


def test_a_file_elsewhere_is_noted_and_nothing_is_counted(tmp_path: Path) -> None:
    found = count_rows([parquet(tmp_path / "a.parquet", 10), "/cluster/train.parquet"], key=KEY)
    assert found == RowCount(None, missing=("/cluster/train.parquet",))
    (note,) = notes_on(KEY, found, 512)
    assert "/cluster/train.parquet" in note and KEY in note
    assert count_rows(None, key=KEY) == RowCount(None)


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("a.parquet", b"not parquet", "not a readable Parquet file"),
        ("a.csv", b"prompt\n1\n", "ends in .csv"),
        ("a.jsonl", b"\n\n", "no rows"),
        ("a.json", b'\xef\xbb\xbf[{"prompt": 1},\n{"prompt": 2}]\n', "not a JSON object"),
    ],
)
def test_a_file_that_is_here_and_unusable_is_a_problem(
    tmp_path: Path, name: str, content: bytes, rule: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (problem,) = count_rows(str(tmp_path / name), key=KEY).problems
    assert rule in problem.rule and problem.field == KEY


def test_a_folder_and_a_number_are_problems(tmp_path: Path) -> None:
    assert "folder" in count_rows(str(tmp_path), key=KEY).problems[0].rule
    assert "list of them" in count_rows([3], key=KEY).problems[0].rule
