"""The batch plan as a table in the terminal.

In: a plan's quantities and notes. Out: lines of text. Left out on purpose: computing the numbers; the
plan has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydraflow.batch_plan.generate import GeneratePlan
from hydraflow.batch_plan.parts import DERIVED, Quantity
from hydraflow.batch_plan.plans import BatchPlan
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.system.columns import fits, output_width, paragraph, table
from hydraflow.system.printing import reader_may_leave

HEAD = ("quantity", "value", "unit", "formula", "from")


def print_plan(plan: BatchPlan | SFTPlan | GeneratePlan) -> None:
    """Prints one line per quantity, then the notes, on standard output, and flushes it: minutes may pass
    until the next line."""
    width = output_width()
    with reader_may_leave():
        print("batch plan", *plan_lines(plan.quantities, width), "", sep="\n")
        for note in plan.notes:
            print(*paragraph(f"note: {note}", width, first="", rest="  "), sep="\n")


def plan_lines(quantities: Sequence[Quantity], width: int) -> list[str]:
    """The quantities as a table: name, value, unit, formula with numbers, provenance; on a narrow terminal
    value and unit share a column, and formula and provenance another."""
    units = [_one(each.unit) if each.value == 1 else each.unit for each in quantities]
    rows = [
        (each.name, str(each.value), unit, each.formula, each.provenance)
        for each, unit in zip(quantities, units, strict=True)
    ]
    if fits([HEAD, *rows], width):
        return table([HEAD, *rows], width, right=[1])
    narrow = [("quantity", "value", "formula, or where it is from")]
    for name, value, unit, formula, origin in rows:
        how = formula or origin if origin == DERIVED or not formula else f"{formula}; {origin}"
        narrow.append((name, f"{value} {unit}", how))
    return table(narrow, width)


def _one(unit: str) -> str:
    """A unit in the singular.

    >>> [_one(unit) for unit in ("data ranks", "micro-batches", "waves per engine", "trajectories")]
    ['data rank', 'micro-batch', 'wave per engine', 'trajectory']
    """
    noun, per, whole = unit.partition(" per ")
    for plural, singular in (("ies", "y"), ("ches", "ch"), ("sses", "ss"), ("s", "")):
        if noun.endswith(plural):
            return noun.removesuffix(plural) + singular + per + whole
    return unit
