"""Rows that the reward function failed on: logged, and too many of them end the run.

In: scored batches. Out: a warning, or GuardStop.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hydraflow.protocol.remote import RemoteBatch
from hydraflow.rewards.failures import require_scored

logger = logging.getLogger(__name__)


def judge_failures(scored: Sequence[RemoteBatch], most: float, where: str, so: str) -> None:
    """Logs how many rows the reward function failed on, and the first error; GuardStop when they are more
    than the share `most`. `so`: the consequence, for the message.
    """
    failed, rows = sum(batch.meta_info["failed"] for batch in scored), sum(map(len, scored))
    first = next((batch.meta_info["why_failed"] for batch in scored if batch.meta_info["failed"]), None)
    require_scored(failed, rows, first, most, where=where, so=so)
    if failed:
        logger.warning("%s: the reward function failed on %d of %d rows: %s", where, failed, rows, first)
