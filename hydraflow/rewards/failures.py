"""Stops the run when too many rows could not be scored, so that their scores are neither trained on nor
reported.

In: how many rows failed, and why the first did. Out: nothing, or a GuardStop (exit code 5).
"""

from __future__ import annotations

from hydraflow.errors import GuardStop

KEY = "reward.max_failed_share"


def require_scored(
    failed: int, rows: int, first_cause: str | None, most: float, *, where: str, so: str
) -> None:
    """Raises GuardStop when more than the share `most` of the rows failed. `so`: the consequence, for the
    message.

    >>> require_scored(2, 4, "KeyError: 'x'", 0.5, where="step 3", so="nothing was trained on them")
    >>> require_scored(3, 4, "KeyError: 'x'", 0.5, where="step 3", so="nothing was trained on them")
    Traceback (most recent call last):
        ...
    hydraflow.errors.GuardStop: step 3: the reward function failed on 3 of 4 rows (75%), more than \
reward.max_failed_share=0.5: nothing was trained on them. The first cause: KeyError: 'x'
          -> correct the reward function; reward.max_failed_share=1.0 never stops
    """
    if failed <= most * rows:
        return
    what = f"{where}: the reward function failed on {failed} of {rows} rows ({failed / rows:.0%})"
    why = f"more than {KEY}={most:g}: {so}. The first cause: {first_cause}"
    raise GuardStop(f"{what}, {why}\n      -> correct the reward function; {KEY}=1.0 never stops")
