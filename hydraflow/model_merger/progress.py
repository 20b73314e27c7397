"""A progress bar on standard error if that is a terminal, else nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]
"""Receives the number of bytes done."""


@contextmanager
def bar(what: str, nbytes: int) -> Iterator[Advance]:
    """A bar that is full after `nbytes` bytes."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich import progress as show
    from rich.console import Console

    columns = (show.DownloadColumn(), show.TransferSpeedColumn(), show.TimeRemainingColumn())
    named = (show.TextColumn("{task.description}"), show.BarColumn())
    with show.Progress(*named, *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=nbytes)
        yield lambda done: progress.advance(task, done)
