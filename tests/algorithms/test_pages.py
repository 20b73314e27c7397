"""The pages of estimators and losses have a row for each: its source, its file, and what it learned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

import pytest

from hydraflow.algorithms.config import ESTIMATORS, POLICY_LOSSES
from hydraflow.options import Implementation

DOCS = Path(__file__).parents[2] / "docs"


def rows_of(page: str) -> list[list[str]]:
    """Cells of the table with a column `50 steps`, without its header."""
    lines = page.splitlines()
    [start] = [number for number, line in enumerate(lines) if line.endswith("| 50 steps |")]
    rows = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(("name", "table"), [("advantages", ESTIMATORS), ("policy_losses", POLICY_LOSSES)])
def test_every_choice_has_its_source_its_file_and_what_it_learned(
    name: str, table: Mapping[str, Implementation]
) -> None:
    page, listed = (DOCS / f"{name}.md").read_text(), set[str]()
    [before] = re.findall(r"after (?:its first )?50 steps, from\s([0-9.]+) %", page)
    for first, _, source, file, *_, learned in rows_of(page):
        names = re.findall(r"`([a-z_]+)`", first)
        modules = {f"`{table[one].where.rpartition('.')[2].partition(':')[0]}.py`" for one in names}
        assert {file} == modules and "](https://" in source
        figures = [float(figure) for figure in re.findall(r"([0-9.]+) %", learned)]
        assert len(figures) == len(names) and min(figures) > float(before), names
        listed |= set(names)
    assert listed == set(table)
