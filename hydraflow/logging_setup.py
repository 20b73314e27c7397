"""What people see of the log: our notes and warnings as plain lines on standard error, other libraries' only from warnings up.

In: nothing. Out: Python's logging, set up once per process.
"""

from __future__ import annotations

import logging
import sys

NOISY = ("datasets", "filelock", "urllib3", "torch", "transformers", "ray")


def set_up_logging() -> None:
    """Sets up the controller's log. Worker processes set up their own, whose lines go to their log files."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # a note to torch's own developers
