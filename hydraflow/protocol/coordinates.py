"""A process's coordinates in its group: which rows it gets, and whether its answers are used.

In: nothing. Out: `Coordinates`, provided by an engine (`engine/base.py`) and read by the dispatch modes
(`dispatch/modes.py`).
"""

from __future__ import annotations

from typing import NamedTuple


class Coordinates(NamedTuple):
    """A worker's coordinates in a mesh."""

    data_rank: int
    """Index of its part of the rows."""
    data_size: int
    """Number of parts that rows are divided into."""
    is_collect: bool
    """Whether its answers and metrics are used; true for one worker per data rank."""
