"""The Ray actor around a worker process: it sets environment variables before any library reads them, then
forwards calls.

In: `ray_init.runtime_env.env_vars` as an argument. Ray's own way of passing variables writes them to a log
and onto a command line, where others could read them. Out: what `WorkerProcess` returns.
Left out on purpose: torch and whatever imports it. Ray imports this module first, so variables that torch
reads on import take effect; a worker with variables of its own is not forked from a process that has imported
torch (`template.py`). Variables that the dynamic loader reads (LD_PRELOAD) belong in the environment of the
command that starts Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydraflow.system.importing import importing

if TYPE_CHECKING:
    from ray import ObjectRef

    from hydraflow.dispatch.profiler import Profile
    from hydraflow.dispatch.transport import Columns, Payload
    from hydraflow.dispatch.worker import Call


@dataclass(frozen=True)
class RankInfo:
    """The place of a process in its group."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the group's processes on its node (local rank)."""
    node: str
    """Host name."""
    spans_nodes: bool = False
    """Whether the group has processes on several nodes."""


class WorkerHost:
    """The actor; `WorkerProcess` describes its methods."""

    def __init__(self, rank_info: RankInfo, variables: Mapping[str, str], *settings: Any):
        os.environ.update(variables)
        with importing():
            from hydraflow.dispatch.worker import WorkerProcess

        self._process = WorkerProcess(rank_info, *settings)

    def identify(self) -> Payload:
        return self._process.identify()

    def rendezvous(self) -> tuple[str, int]:
        return self._process.rendezvous()

    def build(self, roles: Payload | ObjectRef, rendezvous: tuple[str, int]) -> Payload:
        return self._process.build(roles, rendezvous)

    def coordinates(self, role: str, mesh: str) -> Payload:
        return self._process.coordinates(role, mesh)

    def invoke(self, call: Call) -> Payload:
        return self._process.invoke(call)[0]

    def invoke_with_columns(self, call: Call) -> tuple[Payload, Columns]:
        return self._process.invoke(call)

    def start_profile(self, profile: Profile) -> Payload:
        return self._process.start_profile(profile)

    def stop_profile(self) -> Payload:
        return self._process.stop_profile()
