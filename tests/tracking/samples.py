"""What the trackers' tests log: three steps, and two responses of which one is hostile."""

from __future__ import annotations

from pathlib import Path

from hydraflow.tracking.base import PublishedInfo

SAMPLES = [
    {"input": "17+25=", "output": "042", "score": 1.0, "ground_truth": "042"},
    {
        "input": "1+1=",
        "output": "<script>alert('x')</script> | `a`\n\u202e",
        "score": 0.0,
        "ground_truth": None,
    },
]
ACCURACY = "val-core/sums/acc/mean@1"


def about(folder: Path) -> PublishedInfo:
    """A run with a nested configuration and two files."""
    for name in ("plan.json", "run.json"):
        (folder / name).write_text('{"a": 1}')
    config = {"trainer": {"seed": 3, "logger": ["file"], "max_wall_time": None}, "ray_init": {"env": {}}}
    facts = {
        "command": "python -m hydraflow.main_ppo",
        "git": {"commit": "abc"},
        "versions": {"torch": "2.13.0"},
    }
    return PublishedInfo("sums", "first", config, facts, (folder / "plan.json", folder / "run.json"))
