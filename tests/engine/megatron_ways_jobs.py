"""What ranks do in the tests of the Megatron engine's other ways of dividing work: the jobs of
`megatron_jobs`, with groups of ranks for each layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import megatron_jobs as jobs
from megatron.core import parallel_state

from hydraflow.engine.megatron import parallel

Layout = tuple[tuple[str, int], ...]
_groups: dict[Layout, dict[str, Any]] = {}
_known: Layout | None = None


def run(job: str, path: str, options: Mapping[str, Any], *args: Any) -> Any:
    """A job of `megatron_jobs` by its name."""
    settings = options.get("megatron")
    if settings is not None:
        _restart(tuple(sorted((name, n) for name, n in settings.items() if name.endswith("parallel_size"))))
        jobs._sizes = (settings["tensor_model_parallel_size"], settings["pipeline_model_parallel_size"])
    return getattr(jobs, job)(path, options, *args)


def _restart(layout: Layout) -> None:
    """Makes way for groups of another layout, or takes those that were there before: Megatron-Core forgets
    groups, but their threads stay."""
    global _known
    if layout == _known:
        return
    if _known is not None:
        names = [name for name in vars(parallel_state) if name.startswith("_") and name.isupper()]
        _groups[_known] = {name: getattr(parallel_state, name) for name in names}
    parallel.stop()
    vars(parallel_state).update(_groups.get(layout, {}))
    _known = layout
