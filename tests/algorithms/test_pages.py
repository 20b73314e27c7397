"""The pages of estimators and losses have a row for each: its source, its file, how far it is from its
oracle, and what it learned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path

import pytest
from algorithms import advantage_oracle, test_policy_losses

from hydraflow.algorithms.config import ESTIMATORS, POLICY_LOSSES
from hydraflow.options import Implementation

DOCS = Path(__file__).parents[2] / "docs"


def rows_of(page: str) -> list[list[str]]:
    """Cells of the table with a column `50 steps`, without its header."""
    lines = page.splitlines()
    [start] = [number for number, line in enumerate(lines) if line.endswith("| 50 steps |")]
    rows = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(
    ("name", "table", "oracle_difference"),
    [
        ("advantages", ESTIMATORS, advantage_oracle.oracle_difference),
        ("policy_losses", POLICY_LOSSES, test_policy_losses.oracle_difference),
    ],
)
def test_every_choice_has_its_source_its_file_its_oracle_and_what_it_learned(
    name: str, table: Mapping[str, Implementation], oracle_difference: Callable[[str], float]
) -> None:
    page, listed = (DOCS / f"{name}.md").read_text(), set[str]()
    [before] = re.findall(r"after (?:its first )?50 steps, from\s([0-9.]+) %", page)
    for first, _, source, file, *_, apart, learned in rows_of(page):
        names = re.findall(r"`([a-z0-9_]+)`", first)
        modules = {f"`{table[one].where.rpartition('.')[2].partition(':')[0]}.py`" for one in names}
        assert {file} == modules and "](https://" in source
        # another processor adds up in another order
        assert max(map(oracle_difference, names)) == pytest.approx(float(apart), rel=0.9, abs=1e-14), names
        figures = [float(figure) for figure in re.findall(r"([0-9.]+) %", learned)]
        assert len(figures) == len(names) and min(figures) > float(before), names
        listed |= set(names)
    assert listed == set(table)
