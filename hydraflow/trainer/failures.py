"""Rows that the reward function failed on: logged, and too many of them end the run.

In: counts. Out: a warning, or GuardStop.
"""

from __future__ import annotations

import logging

from hydraflow.rewards.failures import require_scored

logger = logging.getLogger(__name__)


def judge_failures(
    failed: int, rows: int, first_cause: str | None, max_share: float, *, where: str, so: str
) -> None:
    """Logs how many rows the reward function failed on, and the first error; GuardStop when they are more
    than the share `max_share`. `so`: the consequence, for the message.
    """
    require_scored(failed, rows, first_cause, max_share, where=where, so=so)
    if failed:
        logger.warning(
            "%s: the reward function failed on %d of %d rows: %s", where, failed, rows, first_cause
        )
