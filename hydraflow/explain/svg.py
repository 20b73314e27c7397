"""The picture of a step from prompts to optimizer steps, as an SVG file that needs no library to make or to
show.

In: a `StepPicture`, the numbers of one role's update. Out: SVG text, readable on light and on dark pages.
Each bar is a whole; its first part is drawn again, wider, as the bar below it. Left out on purpose: where
things run (`picture.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, BAR, TALL, GAP, TOP = 960, 392, 544, 40, 46, 84
"""Pixels: the whole, the bars' left edge, their length and height, the space between them, and above the
first."""
SPACE, LETTER = 6, 6
"""Pixels between parts, and for one letter in them."""
MOST_PARTS = 8
"""With more parts the first ones and the last are drawn."""

STYLE = """
text { font-family: ui-sans-serif, system-ui, sans-serif; font-size: 14px; fill: #1f2328; }
.head { font-size: 19px; font-weight: 600; } .strong { font-weight: 600; }
.in { font-size: 12px; text-anchor: middle; }
.key { font-family: ui-monospace, monospace; font-size: 11px; fill: #59636e; }
.page { fill: #ffffff; } .part { fill: #dbe7f5; stroke: #6b8fb8; } .first { fill: #f6d9b0; stroke: #b9823b; }
.zoom { fill: #f6d9b0; opacity: 0.35; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .key { fill: #9da7b1; } .page { fill: #0d1117; }
  .part { fill: #1f3450; stroke: #5b80ab; } .first { fill: #5c4320; stroke: #c9974f; }
  .zoom { fill: #5c4320; }
}
""".strip()


@dataclass(frozen=True)
class PictureBar:
    """A whole that is cut into equal parts."""

    total: str
    """What the whole is, such as 512 trajectories."""
    letter: str
    """Its letter and formula, such as S = Q·n = 64·8."""
    key: str
    """The configuration key that decides it; empty where it is derived."""
    parts: int | None
    """Into how many parts it is cut; None: as many as it takes."""
    part: str
    """What one part is, such as 256 trajectories."""
    becomes: str = ""
    """What all of it turns into, in words beside the band to the next bar; empty: the next bar is the first
    part alone."""


@dataclass(frozen=True)
class StepPicture:
    """Content of the picture: title, bars and closing lines."""

    title: str
    bars: tuple[PictureBar, ...]
    end: tuple[str, ...]
    """Lines below the last bar."""


def draw(step: StepPicture) -> str:
    """The picture as the content of an SVG file."""
    height = TOP + len(step.bars) * (TALL + GAP) + 20 * len(step.end)
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
            f' height="{height}" role="img">'
        ),
        f"<title>{escape(step.title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
        _text(24, 44, step.title, "head"),
    ]
    for number, bar in enumerate(step.bars):
        lines += _bar(bar, TOP + number * (TALL + GAP), last=number == len(step.bars) - 1)
    top = TOP + len(step.bars) * (TALL + GAP) - 12
    lines += [_text(LEFT, top + 20 * i, line, "strong" if i == 0 else "") for i, line in enumerate(step.end)]
    return "\n".join([*lines, "</svg>", ""])


def _bar(bar: PictureBar, top: int, *, last: bool) -> Iterator[str]:
    """The words on the left, the parts, and the wedge to the bar below."""
    yield _text(24, top + 14, bar.total, "strong")
    yield _text(24, top + 32, bar.letter)
    if bar.key:
        yield _text(24, top + 48, bar.key, "key")
    cells = _cells(bar)
    left_out = bar.parts is None or bar.parts > len(cells)
    for number, (left, width) in enumerate(cells):
        if left_out and number == len(cells) - 2:
            yield _text(left + width // 2, top + TALL // 2 + 5, "…", "in")
            continue
        kind = "first" if number == 0 and not bar.becomes else "part"
        yield f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{TALL}" rx="3"/>'
        yield _text(left + width // 2, top + TALL // 2 + 5, bar.part, "in")
    if last:
        return
    left, width = (LEFT, BAR) if bar.becomes else cells[0]
    below = top + TALL + GAP
    points = f"{left},{top + TALL} {left + width},{top + TALL} {LEFT + BAR},{below} {LEFT},{below}"
    yield f'<polygon class="zoom" points="{points}"/>'
    yield _text(LEFT + BAR // 2, top + TALL + GAP // 2 + 5, bar.becomes, "in")


def _cells(bar: PictureBar) -> list[tuple[int, int]]:
    """Left edge and width of each drawn cell, wide enough for its words; if there are many parts, the last
    but one represents the omitted ones."""
    fitting = max(3, (BAR + SPACE) // (LETTER * len(bar.part) + 12 + SPACE))
    drawn = min(bar.parts or MOST_PARTS, MOST_PARTS, fitting)
    width = (BAR - SPACE * (drawn - 1)) // drawn
    return [(LEFT + i * (width + SPACE), width) for i in range(drawn)]


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    label = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{label}>{escape(words)}</text>'
