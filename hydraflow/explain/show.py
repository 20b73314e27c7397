"""A report for people: table, picture, words, memory and notes, in the terminal.

In: a `Report`. Out: printed text, whose lines fit the output's width unless a single word does not. Left out
on purpose: computing numbers; the report has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hydraflow.batch_plan.table import plan_lines
from hydraflow.explain.picture import MODES
from hydraflow.explain.report import Report
from hydraflow.memory.report import MemoryReport, size_text
from hydraflow.system.columns import output_width, paragraph, table

BRIEF = re.compile(
    r"devices|training steps|prompts per step Q|trajectories per (prompt n|step S)|longest row"
    r"|.*: (data ranks dp|prompts per optimizer step M|rows per data rank g|optimizer steps)"
    r"|micro-batch of the \S+ update|conversations per step.*|prompts per call.*|rollout: waves"
)
"""Quantities that are shown without --all, besides those that the command line gives."""


def show(report: Report, *, everything: bool) -> None:
    """Prints the report; `everything`: all quantities, and the memory of each role by purpose."""
    print(*report_lines(report, everything=everything, width=output_width()), sep="\n")


def report_lines(report: Report, *, everything: bool, width: int) -> Iterator[str]:
    """The lines that `show` prints."""
    quantities = [
        one
        for one in report.plan.quantities
        if everything or one.provenance == "command line" or BRIEF.fullmatch(one.name)
    ]
    yield "batch plan"
    yield from plan_lines(quantities, width)
    yield ""
    yield from _flush(f"devices and roles: {report.placement}, {MODES[report.placement]}", width)
    for line in report.picture:
        yield from _drawn(f"  {line}".rstrip(), width)
    yield "\none step"
    yield from _phases(report, width)
    if report.memory:
        yield from _memory(report.memory, width, everything=everything)
    yield "\nnotes"
    yield from _paragraphs(_notes(report), width)
    if not everything:
        yield ""
        more = "--all shows every number with its formula, and the memory by purpose."
        yield from _flush(more, width)


def _flush(text: str, width: int) -> list[str]:
    return paragraph(text, width, first="", rest="  ")


def _paragraphs(texts: Iterable[str], width: int) -> Iterator[str]:
    for text in texts:
        yield from paragraph(text, width)


def _drawn(line: str, width: int) -> Iterator[str]:
    """A line of the picture; if it is too wide, its text goes below its drawing."""
    drawing, _, words = re.sub(r" {2,}(?=\w+[,:] )", "\0", line).partition("\0")
    if len(line) <= width or not words:
        yield line
        return
    yield drawing
    yield from paragraph(words, width, first=" " * 6, rest=" " * 8)


def _phases(report: Report, width: int) -> Iterator[str]:
    """Name and text in two columns; long texts wrap within theirs."""
    head = max(len(phase.name) for phase in report.phases) + 4
    for phase in report.phases:
        yield from paragraph(phase.text, width, first=f"  {phase.name}".ljust(head), rest=" " * head)


def _memory(memory: MemoryReport, width: int, *, everything: bool) -> Iterator[str]:
    limits = memory.limits
    name = limits.device_name or limits.device_type
    of = f" of {size_text(limits.device_bytes)}" if limits.device_bytes else ""
    yield ""
    yield from _flush(f"memory of one device ({name}{of}), each role at its peak", width)
    if everything:
        rows = list(_role_rows(memory))
        yield from table(rows, width, right=range(1, len(rows[0])))
    yield from _paragraphs(_fit_lines(memory), width)
    if everything:
        yield from _paragraphs(memory.notes, width)


def _role_rows(memory: MemoryReport) -> Iterator[list[str]]:
    """A table of memory by purpose, with a column per role, so that it fits a narrow terminal."""
    roles = memory.roles
    yield ["role", *(role.role.replace("_", " ") for role in roles)]
    yield ["moment", *(role.peak_phase.replace("_", " ") for role in roles)]
    yield ["devices", *(str(role.devices) for role in roles)]
    for part in roles[0].parts:
        if any(role.parts[part] for role in roles):
            sizes = (size_text(role.parts[part]) if role.parts[part] else "-" for role in roles)
            yield [part.replace("_", " "), *sizes]
    yield ["total", *(size_text(role.total) for role in roles)]


def _fit_lines(memory: MemoryReport) -> Iterator[str]:
    """Whether the run fits each group of devices and the machines, and what to change if not."""
    for group in memory.groups:
        phases = (f"{phase.replace('_', ' ')} {size_text(size)}" for phase, size in group.phases.items())
        fit = "" if memory.limits.device_type == "cpu" else f": {_fit_text(group.fits)}"
        needed = f"{size_text(group.peak)} ({', '.join(phases)})"
        yield f"devices {group.devices}, {' + '.join(group.roles)}: {needed}{fit}"
    host = memory.host
    of = f" of {size_text(host.limit)}" if host.limit else ""
    rows = f"; {size_text(host.rows)} of it are a step's trajectories" if 10 * host.rows > host.total else ""
    yield f"each machine: {size_text(host.total)}{of}: {_fit_text(host.fits)}{rows}; {host.load_text}"
    if memory.fits is False:
        yield from _advice_lines(memory)


def _advice_lines(memory: MemoryReport) -> Iterator[str]:
    """What to change first, and whether that is enough."""
    where, bytes_missing = memory.missing
    first = "changes to try first, each in addition to the ones above it:"
    yield f"{size_text(bytes_missing)} of {where} memory is missing; {first}"
    for advice in memory.advice:
        yield f"-> {advice.override} saves {size_text(advice.saves)} ({advice.where}): {advice.effect}"
    if left := memory.missing_after_advice:
        other = "more or larger devices are needed, or a smaller model"
        yield f"-> even then {size_text(left)} is missing: {other}"
    if where == "host" and 2 * memory.host.rows > memory.host.total:
        yield (
            f"-> a step's trajectories take {size_text(memory.host.rows)}: use fewer of them"
            " (data.train_batch_size, actor_rollout_ref.rollout.n) or shorter ones (data.max_response_length)"
        )


def _fit_text(fits: bool | None) -> str:
    return "fits" if fits else "the limit is not known" if fits is None else "DOES NOT FIT"


def _notes(report: Report) -> Iterator[str]:
    yield f"keys of the command line: {report.counts}"
    yield from report.notes
    for problem in report.not_yet:
        yield problem.fault
