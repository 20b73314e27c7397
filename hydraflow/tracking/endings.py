"""Reasons for a run's clean end, as written to summary.json and compared by its readers."""

from __future__ import annotations

DONE = "all steps done"
OUT_OF_TIME = "trainer.max_wall_time reached"
VALIDATED = "trainer.val_only"
RECEIVED = " received"
"""Suffix after the name of the signal that asked a run to end."""


def is_orderly(why: str) -> bool:
    """Whether the end was requested, before all steps were done.

    >>> is_orderly("SIGTERM received"), is_orderly("actor rank 0 on node a failed in update: killed")
    (True, False)
    """
    return why in (OUT_OF_TIME, VALIDATED, "interrupted") or (
        why.startswith("SIG") and why.endswith(RECEIVED)
    )
