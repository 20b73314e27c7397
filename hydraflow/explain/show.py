"""A report for people: table, picture, words, memory and notes, in the terminal.

In: a `Report`. Out: printed text. Left out on purpose: every number; those are the report's.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hydraflow.batch_plan.table import FILE_WIDTH, plan_table
from hydraflow.explain.picture import MODES
from hydraflow.explain.report import Report
from hydraflow.memory.report import MemoryReport, size_text


def show(report: Report, *, console: Console | None = None) -> None:
    """Prints the report; `console` is standard output by default. Where that is a file the lines are as long
    as they need to be."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    console.print(plan_table(report.plan))
    _heading(console, f"devices and roles: {report.placement}, {MODES[report.placement]}")
    _lines(console, report.picture)
    _heading(console, "one step")
    _phases(console, report)
    if report.memory:
        _show_memory(console, report.memory)
    _heading(console, "notes")
    _lines(console, _notes(report))


def _heading(console: Console, words: str) -> None:
    console.print(f"\n{words}", style="italic", markup=False, highlight=False)


def _lines(console: Console, lines: Iterator[str] | tuple[str, ...]) -> None:
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _phases(console: Console, report: Report) -> None:
    """Name and text in two columns, long texts under themselves."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column()
    for phase in report.phases:
        table.add_row(f"  {phase.name}", phase.text)
    console.print(table)


def _show_memory(console: Console, memory: MemoryReport) -> None:
    limits = memory.limits
    name = limits.device_name or limits.device_type
    of = f" of {size_text(limits.device_bytes)}" if limits.device_bytes else ""
    _heading(console, f"memory of one device ({name}{of}), each role at its highest moment")
    console.print(_role_table(memory))
    _lines(console, _fit_lines(memory))
    _lines(console, tuple(memory.notes))


def _role_table(memory: MemoryReport) -> Table:
    """One column per role, which fits a narrow terminal: what it holds on each of its devices."""
    used = [part for part in memory.roles[0].parts if any(role.parts[part] for role in memory.roles)]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("role")
    for role in memory.roles:
        table.add_column(role.role.replace("_", " "), justify="right", overflow="fold")
    table.add_row("moment", *(role.peak_phase.replace("_", " ") for role in memory.roles))
    table.add_row("devices", *(str(role.devices) for role in memory.roles))
    for part in used:
        table.add_row(
            part.replace("_", " "),
            *(size_text(role.parts[part]) if role.parts[part] else "-" for role in memory.roles),
        )
    table.add_row("total", *(size_text(role.total) for role in memory.roles))
    return table


def _fit_lines(memory: MemoryReport) -> Iterator[str]:
    """Whether each kind of device and the hosts have room, and what to change if not."""
    for group in memory.groups:
        phases = ", ".join(
            f"{phase.replace('_', ' ')} {size_text(size)}" for phase, size in group.phases.items()
        )
        verdict = "" if memory.limits.device_type == "cpu" else f": {_verdict(group.fits)}"
        yield (
            f"devices {group.devices}, {' + '.join(group.roles)}: {size_text(group.peak)} ({phases}){verdict}"
        )
    host = memory.host
    of = f" of {size_text(host.limit)}" if host.limit else ""
    yield f"each machine: {size_text(host.total)}{of}: {_verdict(host.fits)}; {host.load_text}"
    if memory.fits is False:
        yield from _advice_lines(memory)


def _advice_lines(memory: MemoryReport) -> Iterator[str]:
    """What to change first, and whether that is enough."""
    where, bytes_missing = memory.missing
    yield (
        f"{size_text(bytes_missing)} of {where} memory are missing; to change first, each on top of those"
        " before:"
    )
    for advice in memory.advice:
        yield f"-> {advice.override} saves {size_text(advice.saves)} ({advice.where}): {advice.effect}"
    if left := memory.missing_after_advice:
        yield (
            f"-> {size_text(left)} are missing even then: more or larger devices are needed, or a smaller"
            " model"
        )


def _verdict(fits: bool | None) -> str:
    return "fits" if fits else "the limit is not known" if fits is None else "DOES NOT FIT"


def _notes(report: Report) -> Iterator[str]:
    yield f"keys of the command line: {report.counts}"
    yield from report.notes
    for problem in report.not_yet:
        yield f"{problem.field}={problem.value}: {problem.rule}"
