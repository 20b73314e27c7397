"""The console's log: our notes and warnings as plain lines on standard error, those of other libraries from
warnings up.

In: `log.level`. Out: Python's logging, set up once per process, and standard streams that outlive their
readers.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

from hydraflow.system.role_logs import apply_level, write_stacks_when_asked

NOISY = ("datasets", "filelock", "urllib3", "torch", "transformers", "ray")


class CurrentStderr(logging.StreamHandler):
    """Writes to the current sys.stderr, which a live progress display may have replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class Pipe(io.FileIO):
    """A pipe or socket whose reader may leave; later output is discarded."""

    def write(self, data: ReadableBuffer) -> int:
        """Writes the data; once the reader has left, only pretends to."""
        try:
            return super().write(data)
        except ConnectionError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Keeps a run alive when the reader of its output has left (`| head`, a closed pager): all results are in
    its folder."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or not _is_pipe(stream):
            continue
        if not isinstance(getattr(stream.buffer, "raw", None), Pipe):
            stream.flush()
            raw = Pipe(stream.fileno(), "w", closefd=False)
            lines, errors, buffer = stream.line_buffering, stream.errors, io.BufferedWriter(raw)
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, errors, line_buffering=lines))


def _is_pipe(stream: io.TextIOWrapper) -> bool:
    """Whether it has a reader that may leave; ssh without a terminal uses a pair of sockets."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    except io.UnsupportedOperation:  # an in-memory stream, as in a notebook
        return False


def set_up_logging(level: str = "info") -> None:
    """Sets up the controller's log, and the signal that prints stacks.

    Worker processes set up their own logs, which go to files (`role_logs.py`).
    """
    from transformers.utils import logging as transformers_logging

    outlive_readers()
    write_stacks_when_asked()
    transformers_logging.disable_progress_bar()
    logging.basicConfig(handlers=[CurrentStderr()], format="%(levelname)s %(name)s: %(message)s")
    apply_level(level)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # its warnings are for torch's own developers
