"""The picture of a step from prompts to optimizer steps, as an SVG file that needs no library.

In: a plan. Out: a `StepPicture` with the plan's own numbers, and its SVG text, readable on light and on dark
pages. Each bar is a whole (prompts, trajectories, one optimizer step, one data rank); its first part is drawn
again, wider, as the bar below it. Left out on purpose: where things run (`picture.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from hydraflow.batch_plan.parts import RolePlan
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.system.printing import count

WIDTH, LEFT, BAR, TALL, GAP, TOP = 960, 392, 544, 40, 46, 84
"""Pixels: the whole, the bars' left edge, their length and height, the space between them, and above the
first."""
SPACE, LETTER = 6, 6
"""Pixels between parts, and for one letter in them."""
MOST_PARTS = 8
"""Largest number of parts that are all drawn; of more, the first ones and the last."""

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
    """Number of parts that it is cut into; None: not fixed."""
    part: str
    """What one part is, such as 256 trajectories."""
    becomes: str = ""
    """What the whole bar becomes in the next one, as text in the band between them; empty: the next bar is
    only the first part."""


@dataclass(frozen=True)
class StepPicture:
    """Content of the picture: title, bars and the lines below them."""

    title: str
    bars: tuple[PictureBar, ...]
    end: tuple[str, ...]
    """Lines below the last bar."""


def ppo_step(plan: BatchPlan) -> StepPicture:
    """A step of reinforcement learning, with the actor's update."""
    q, n, actor = plan.prompts_per_step, plan.samples_per_prompt, plan.actor
    minis, mini, policy = q // actor.mini_batch_prompts, actor.mini_batch_prompts, "actor_rollout_ref"
    answers, each = count(n, "response"), count(actor.mini_batch_trajectories, "trajectory")
    becomes = f"{answers} to each prompt"
    prompts = PictureBar(count(q, "prompt"), "Q", "data.train_batch_size", q, "1", becomes)
    cut = f"S = Q·n = {q}·{n}, cut into {count(minis, 'mini-batch')}"
    whole = count(plan.trajectories_per_step, "trajectory")
    step = PictureBar(whole, cut, f"{policy}.rollout.n", minis, each)
    shared = f"G = M·n = {mini}·{n}, on {count(actor.data_ranks, 'data rank')}"
    rows, key = count(actor.rows_per_rank, "row"), f"{policy}.actor.ppo_mini_batch_size"
    update = PictureBar(f"{each} per optimizer step", shared, key, actor.data_ranks, rows)
    taken = count(actor.optimizer_steps_per_step, "optimizer step")
    steps = f"K = (Q/M)·E = ({q}/{mini})·{actor.epochs} = {taken} per training step"
    bars = (prompts, step, update, _forwards(actor, f"{policy}.actor.ppo_"))
    end = ("then one optimizer step", steps, *_total(plan.total_steps, actor))
    return StepPicture(f"One training step: {count(q, 'prompt')}, {taken}", bars, end)


def sft_step(plan: SFTPlan, noun: str) -> StepPicture:
    """A step of supervised training, which is one optimizer step. `noun`: the word for one example."""
    role, batch = plan.role, count(plan.conversations_per_step, noun)
    ranks, rows = f"on {count(role.data_ranks, 'data rank')}", count(role.rows_per_rank, "row")
    first = PictureBar(batch, ranks, "data.train_batch_size", role.data_ranks, rows)
    end = ("then one optimizer step", *_total(plan.total_steps, role))
    title = f"One training step: {batch}, 1 optimizer step"
    return StepPicture(title, (first, _forwards(role, "data.")), end)


def _forwards(role: RolePlan, prefix: str) -> PictureBar:
    """What one data rank does: forwards of equal rows, or of as many tokens as fit."""
    total = f"{count(role.rows_per_rank, 'row')} on one data rank"
    letter = f"g = G/dp = {role.mini_batch_trajectories}/{role.data_ranks}"
    if role.micro.max_tokens is not None:
        tokens, key = f"≤ {count(role.micro.max_tokens, 'token')}", f"{prefix}max_token_len_per_gpu"
        return PictureBar(total, f"{letter}, filled by tokens", key, None, tokens)
    assert role.micro.rows is not None
    passes, key = role.rows_per_rank // role.micro.rows, f"{prefix}micro_batch_size_per_gpu"
    letter = f"{letter}, a = g/m = {count(passes, 'forward')}"
    return PictureBar(total, letter, key, passes, count(role.micro.rows, "row"))


def _total(steps: int, role: RolePlan) -> tuple[str, ...]:
    if not steps:
        return ()
    whole = count(role.optimizer_steps(steps), "optimizer step")
    return (f"{count(steps, 'training step')} in the run = {whole}",)


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
