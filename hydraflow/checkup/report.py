"""The report of a check-up: a table, with progress while checks run, or JSON.

In: results as they arrive. Out: text, and the exit code. Left out on purpose: judging.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from hydraflow.checkup.finding import State
from hydraflow.checkup.table import Result
from hydraflow.errors import ConfigError
from hydraflow.system.columns import output_width, paragraph

STYLES = {
    State.OK: "green",
    State.NOTE: "cyan",
    State.WARNING: "yellow",
    State.PROBLEM: "bold red",
    State.SKIPPED: "dim",
}


def print_report(results: Iterable[Result], console: Console) -> int:
    """Prints the table and returns the exit code. On a terminal it shows progress."""
    kept = []
    for result in results:
        kept.append(result)
        if console.is_terminal:
            progress = Text(f"checked {result.name} ({result.seconds:.1f} s)", style="dim")
            console.print(progress, end="\x1b[K\r")
    console.print("check-up of this machine for this configuration", style="italic")
    for line in as_lines(kept, output_width()):
        console.print(line, soft_wrap=True)
    counts = Counter(finding.state for result in kept for finding in result.findings)
    console.print(", ".join(f"{counts[state]} {state}" for state in State if counts[state]), highlight=False)
    return exit_code(kept)


def as_lines(results: Sequence[Result], width: int) -> Iterator[Text]:
    """Columns check, state, evidence and remedy; words are never split, and lines have no trailing blanks."""
    names = max((len(result.name) for result in results), default=0) + 1
    states = max(map(len, State)) + 1
    for result in results:
        for number, finding in enumerate(result.findings):
            head = ("" if number else result.name).ljust(names) + finding.state.ljust(states)
            indent = " " * (names + states)
            first, *rest = paragraph(finding.evidence, width, first=head, rest=indent)
            shown = Text(first)
            shown.stylize(STYLES[finding.state], names, names + len(finding.state))
            yield shown
            yield from map(Text, rest)
            for part in finding.remedy.splitlines():
                for line in paragraph(f"-> {part}", width, first=indent, rest=indent + "   "):
                    yield Text(line, style="bold")


def as_json(results: Iterable[Result]) -> str:
    """A JSON list with an object per finding: check, state, evidence, remedy, and the check's seconds."""
    rows = [
        {"check": result.name, **asdict(finding), "seconds": round(result.seconds, 3)}
        for result in results
        for finding in result.findings
    ]
    return json.dumps(rows, indent=2, ensure_ascii=False)


def exit_code(results: Iterable[Result]) -> int:
    """0, or 2 if a problem would keep the run from starting."""
    states = {finding.state for result in results for finding in result.findings}
    return ConfigError.exit_code if State.PROBLEM in states else 0
