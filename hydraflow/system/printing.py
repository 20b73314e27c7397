"""Printed text: numbers with their nouns, and streams that survive unencodable characters and lost readers.

In: the streams of this process. Out: the same streams, which no longer raise UnicodeEncodeError.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydraflow.errors import EnvironmentFault

HANDLER = "hydraflow-ascii"
ASCII = {"·": "*", "×": "x", "→": "->", "≤": "<=", "≥": ">=", "…": "...", "–": "-", "—": "-", "■": "#"}
ASCII |= {"⌊": "floor(", "⌋": ")", "⌈": "ceil(", "⌉": ")", "─": "-", "━": "-"}
"""Replacements for characters that the encoding lacks; all others become backslash escapes."""


def make_printable() -> None:
    """Makes stdout and stderr replace characters that their encoding lacks. Standard streams that were closed
    before Python started (`>&-`) are opened on /dev/null: otherwise the next files to be opened would get
    their descriptors, and a child process would write its output into one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
    codecs.register_error(HANDLER, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """If the reader of the block's output, such as `head`, leaves early, the rest is discarded. Exits with a
    message on stderr if the output cannot be written for another reason, such as a full disk."""
    try:
        yield
        if sys.stdout is not None:  # it was closed before Python started: `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        if error.filename is not None:  # of another file
            raise
        _discard_output()
        print(f"standard output cannot be written: {error.strerror}", file=sys.stderr)
        raise SystemExit(EnvironmentFault.exit_code) from error


def _discard_output() -> None:
    """Points stdout at /dev/null; otherwise Python reports the error again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    shown = (ASCII.get(one) or one.encode("ascii", "backslashreplace").decode() for one in lacking)
    return "".join(shown), error.end


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "prompt"), count(2, "batch"), count(10_000, "trajectory")
    ('1 prompt', '2 batches', '10,000 trajectories')
    """
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("ry"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"
