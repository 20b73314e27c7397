"""Why runs end in good order, in the words of summary.json.

In: nothing. Out: words that those who end a run write, and those who read about it compare with.
"""

from __future__ import annotations

DONE = "all steps done"
OUT_OF_TIME = "trainer.max_wall_time reached"
VALIDATED = "trainer.val_only"
RECEIVED = " received"
"""After the name of the signal that asked a run to end."""


def is_orderly(why: str) -> bool:
    """Whether somebody asked for this end, before all steps were done.

    >>> is_orderly("SIGTERM received"), is_orderly("actor rank 0 on node a failed in update: killed")
    (True, False)
    """
    return why in (OUT_OF_TIME, VALIDATED, "interrupted") or (
        why.startswith("SIG") and why.endswith(RECEIVED)
    )
