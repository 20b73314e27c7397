"""Work that rank 0 does for all, or every rank for itself, and whose mistakes end all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from hydraflow.errors import ConfigError

Result = TypeVar("Result")


def on_first_rank(work: Callable[[], Result]) -> Result | None:
    """The result of `work` on rank 0, None elsewhere. When rank 0 raises a ConfigError, every rank does: none
    waits for a broadcast that never arrives. Collective."""
    found: Result | None = None
    problem: list[ConfigError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found = work()
        except ConfigError as error:
            problem = [error]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]
    return found


def on_every_rank(work: Callable[[], None]) -> None:
    """Does `work`. When a rank raises a ConfigError, every rank raises that of the lowest. Collective."""
    problem: ConfigError | None = None
    try:
        work()
    except ConfigError as error:
        problem = error
    found: list[ConfigError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    if first := next((one for one in found if one is not None), None):
        raise first
