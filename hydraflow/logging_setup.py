"""What people see of the log: our notes and warnings as plain lines on standard error, other libraries' only from warnings up.

In: `log.level`. Out: Python's logging, set up once per process.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from hydraflow.role_logs import apply_level, write_stacks_when_asked

NOISY = ("datasets", "filelock", "urllib3", "torch", "transformers", "ray")


class CurrentStderr(logging.StreamHandler):
    """Writes to what standard error is at the moment: a live progress display puts itself in its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Standard error."""
        return sys.stderr


def set_up_logging(level: str = "info") -> None:
    """Sets up the controller's log, and what the signal for stacks does.

    Worker processes set up their own, whose lines go to their log files (`role_logs.py`).
    """
    from transformers.utils import logging as transformers_logging

    write_stacks_when_asked()
    transformers_logging.disable_progress_bar()
    logging.basicConfig(handlers=[CurrentStderr()], format="%(levelname)s %(name)s: %(message)s")
    apply_level(level)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # a note to torch's own developers
