"""The batch plan as a table in the terminal.

In: a plan's quantities and notes. Out: lines of text. Left out on purpose: the numbers themselves; those are
the plan's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from hydraflow.batch_plan.parts import Quantity
from hydraflow.system.columns import fits, output_width, paragraph, table

HEAD = ("quantity", "value", "unit", "formula", "from")


class PlanTable(Protocol):
    """The parts of a plan that the table shows."""

    @property
    def quantities(self) -> Sequence[Quantity]:
        """Its numbers, in the order of the table."""

    @property
    def notes(self) -> Sequence[str]:
        """What was given and has no effect."""


def print_plan(plan: PlanTable) -> None:
    """Prints one line per quantity, then the notes, on standard output. It is flushed: minutes may pass
    until the next line."""
    width = output_width()
    print("batch plan", *plan_lines(plan.quantities, width), "", sep="\n")
    for note in plan.notes:
        print(*paragraph(f"note: {note}", width, first="", rest="  "), sep="\n")
    sys.stdout.flush()


def plan_lines(quantities: Sequence[Quantity], width: int) -> list[str]:
    """The quantities as a table: name, value, unit, formula with numbers, provenance; on a narrow terminal
    value and unit share a column, and formula and provenance another."""
    rows = [(one.name, str(one.value), one.unit, one.formula, one.provenance) for one in quantities]
    if fits([HEAD, *rows], width):
        return table([HEAD, *rows], width, right=[1])
    narrow = [(name, f"{value} {unit}", _how(formula, origin)) for name, value, unit, formula, origin in rows]
    return table([("quantity", "value", "formula, or where it is from"), *narrow], width)


def _how(formula: str, origin: str) -> str:
    if origin == "derived" or not formula:
        return formula or origin
    return f"{formula}; {origin}"
