"""The batch plan as a table in the terminal.

In: a plan's quantities and notes. Out: lines of text. Left out on purpose: the numbers themselves; those are
the plan's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hydraflow.batch_plan.generate import GeneratePlan
from hydraflow.batch_plan.parts import DERIVED, Quantity
from hydraflow.batch_plan.plans import BatchPlan
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.system.columns import fits, output_width, paragraph, table

HEAD = ("quantity", "value", "unit", "formula", "from")


def print_plan(plan: BatchPlan | SFTPlan | GeneratePlan) -> None:
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
    narrow = [("quantity", "value", "formula, or where it is from")]
    for name, value, unit, formula, origin in rows:
        how = formula or origin if origin == DERIVED or not formula else f"{formula}; {origin}"
        narrow.append((name, f"{value} {unit}", how))
    return table(narrow, width)
