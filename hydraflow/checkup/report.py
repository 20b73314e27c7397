"""The report of a check-up: a table that grows while checks run, or JSON.

In: results as they come. Out: text, and the exit code. Left out on purpose: judging.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hydraflow.checkup.finding import State
from hydraflow.checkup.table import Result
from hydraflow.errors import ConfigError

STYLES = {
    State.OK: "green",
    State.NOTE: "cyan",
    State.WARNING: "yellow",
    State.PROBLEM: "bold red",
    State.SKIPPED: "dim",
}
FILE_WIDTH = 160
"""Columns where there is no terminal to measure."""


def print_report(results: Iterable[Result], console: Console) -> int:
    """Prints the table and returns the exit code. A terminal is told meanwhile how far it is."""
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    kept = []
    for result in results:
        kept.append(result)
        if console.is_terminal:
            console.print(
                Text(f"looked at {result.name} ({result.seconds:.1f} s)", style="dim"), end="\x1b[K\r"
            )
    console.print(as_table(kept))
    counts = Counter(finding.state for result in kept for finding in result.findings)
    console.print(", ".join(f"{counts[state]} {state}" for state in State if counts[state]), highlight=False)
    return exit_code(kept)


def as_table(results: Iterable[Result]) -> Table:
    """check, state, evidence and what to do, one line per finding."""
    table = Table(
        title="check-up of this machine for this configuration",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("evidence, and what would repair it", overflow="fold")
    for result in results:
        for number, finding in enumerate(result.findings):
            said = Text(finding.evidence)
            if finding.remedy:
                said.append(f"\n-> {finding.remedy}", style="bold")
            table.add_row(
                "" if number else result.name, Text(finding.state, style=STYLES[finding.state]), said
            )
    return table


def as_json(results: Iterable[Result]) -> str:
    """A JSON list with an object per finding: check, state, evidence, remedy, and the seconds that the check
    took."""
    rows = [
        {
            "check": result.name,
            "state": finding.state,
            "evidence": finding.evidence,
            "remedy": finding.remedy,
            "seconds": round(result.seconds, 3),
        }
        for result in results
        for finding in result.findings
    ]
    return json.dumps(rows, indent=2, ensure_ascii=False)


def exit_code(results: Iterable[Result]) -> int:
    """0, or 2 when something would keep the run from starting."""
    states = {finding.state for result in results for finding in result.findings}
    return ConfigError.exit_code if State.PROBLEM in states else 0
