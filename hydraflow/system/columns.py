"""Plain text that fits a width: tables and paragraphs whose words are never split.

In: cells or sentences, and the width. Out: lines without trailing blanks. A word that is longer than the
width, such as a path or an override to paste, gets a line of its own.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

PIPED_WIDTH = 100
"""Width when there is no terminal and COLUMNS is not set."""
GAP = "  "


def output_width() -> int:
    """Width of the output: COLUMNS, else the terminal's, else `PIPED_WIDTH`."""
    return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns


def paragraph(text: str, width: int, *, first: str = "  ", rest: str = "    ") -> list[str]:
    """Wraps the text to lines of at most `width`, with one indent for the first line and one for the others.

    >>> paragraph("key=value: a rule with several words", 24)
    ['  key=value: a rule with', '    several words']
    """
    return _wrap(text, width, first, rest) or [first.rstrip()]


def table(rows: Sequence[Sequence[str]], width: int, *, right: Sequence[int] = ()) -> list[str]:
    """A text table whose first row is the header; the columns in `right` are right-aligned.

    Cells wrap if the table is wider than `width`. A table whose longest words do not fit is wider than that.

    >>> print("\\n".join(table([["name", "n"], ["a long name", "7"]], 12, right=[1])))
      name     n
      -------  -
      a long   7
      name
    """
    widths = _widths(list(zip(*rows, strict=True)), width)
    cells = [[_wrap(cell, wide) or [""] for cell, wide in zip(row, widths, strict=True)] for row in rows]
    lines = [line for row in cells for line in _lines(row, widths, set(right))]
    head = max(map(len, cells[0]))
    return [*lines[:head], GAP + GAP.join("-" * wide for wide in widths), *lines[head:]]


def fits(rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a table of the rows fits without wrapping a cell."""
    return sum(max(map(len, column)) + len(GAP) for column in zip(*rows, strict=True)) <= width


def _lines(cells: Sequence[Sequence[str]], widths: Sequence[int], right: set[int]) -> list[str]:
    found = []
    for parts in zip_longest(*cells, fillvalue=""):
        aligned = [part.ljust(wide) for part, wide in zip(parts, widths, strict=True)]
        for number in right:
            aligned[number] = parts[number].rjust(widths[number])
        found.append((GAP + GAP.join(aligned)).rstrip())
    return found


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of the columns: their longest cells; if that is too wide, the widest columns shrink first."""
    widths = [max(1, *map(len, column)) for column in columns]
    words = ([word for cell in column for word in cell.split()] for column in columns)
    least = [max(map(len, column), default=0) for column in words]
    excess = sum(widths) + len(GAP) * len(widths) - width
    for _ in range(max(0, excess)):
        wrapping = [wide if wide > few else 0 for wide, few in zip(widths, least, strict=True)]
        if not any(wrapping):
            break
        widths[wrapping.index(max(wrapping))] -= 1
    return widths


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
