"""The batch plan as a table in the terminal.

In: a plan's quantities and notes. Out: printed text. Left out on purpose: every number; those are the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hydraflow.batch_plan.parts import Quantity

FILE_WIDTH = 140
"""Columns of the table where there is no terminal to measure."""


class Explained(Protocol):
    """What every plan has for people."""

    @property
    def quantities(self) -> Sequence[Quantity]:
        """Its numbers, in the order of the table."""

    @property
    def notes(self) -> Sequence[str]:
        """What was given and has no effect."""


def print_plan(plan: Explained, *, console: Console | None = None) -> None:
    """Prints one line per quantity, and after it the notes; `console` is standard output by default.

    Where that is a file the lines are as long as they need to be.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    console.print(plan_table(plan))
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def plan_table(plan: Explained) -> Table:
    """The quantities as a rich table: name, value, unit, formula with numbers, provenance."""
    table = Table(title="batch plan", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("quantity", overflow="fold")
    table.add_column("value", justify="right", overflow="fold")
    for name in ("unit", "formula", "from"):
        table.add_column(name, overflow="fold")
    for quantity in plan.quantities:
        table.add_row(
            quantity.name, str(quantity.value), quantity.unit, quantity.formula, quantity.provenance
        )
    return table
