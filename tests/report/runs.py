"""Run folders as runs leave them, written in a moment."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ACCURACY, SCORE = "val-core/sums/acc/mean@1", "critic/score/mean"
PHASES = {"gen": 0.5, "update_actor": 0.25, "reward": 0.125}
HOSTILE = (
    "</script><script>document.documentElement.dataset.hacked = 1</script>",
    '<img src=x onerror="document.documentElement.dataset.hacked = 1">',
    "{{ 7 * 191 }} {% raw %} <!-- ]]> &amp; ' \" ` \\ \u2028 \u202e",
    "\x00\x1b[31m \ud800 \U0001f600",
    '<a href="javascript:document.documentElement.dataset.hacked = 1">x</a>' + "y" * 5000,
)
"""Texts that a careless page would run, or stumble over."""


def record(step: int, **more: float | str) -> dict[str, Any]:
    """The numbers of a step: a reward that rises, three phases, and what else is given."""
    found: dict[str, Any] = {
        "step": step,
        "seconds": step * 1.5,
        SCORE: 1 - math.exp(-step / 50),
        "actor/entropy": 2.0 / (1 + step),
    }
    found |= {f"timing_s/{name}": seconds for name, seconds in PHASES.items()} | {
        "timing_s/step": 1.0,
        "perf/throughput": 100.0,
    }
    return found | more


def write_run(
    folder: Path,
    records: Sequence[Mapping[str, Any]],
    *,
    why: str | None = "all steps done",
    settings: Mapping[str, tuple[Any, str]] | None = None,
    samples: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    starts: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Writes the files of a run; `why` None: it has not ended."""
    (folder / "samples").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    if why is not None:
        (folder / "summary.json").write_text(json.dumps({"why_it_ended": why, "steps": len(records)}))
    settings = settings or {"trainer.seed": (1, "default"), "data.train_batch_size": (64, "command line")}
    origins = {key: {"value": value, "from": origin} for key, (value, origin) in settings.items()}
    (folder / "config_origins.json").write_text(json.dumps(origins))
    quantity = {
        "name": "prompts per step Q",
        "unit": "prompts",
        "value": 64,
        "formula": "",
        "provenance": "command line",
    }
    (folder / "plan.json").write_text(
        json.dumps({"total_steps": 100, "quantities": [quantity], "notes": ["a note"]})
    )
    (folder / "run.json").write_text(json.dumps({"starts": list(starts)}))
    for step, rows in (samples or {}).items():
        (folder / "samples" / f"step_{step:06d}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return folder


def hostile_run(folder: Path) -> Path:
    """A run that puts hostile text wherever text of a run's can come from."""
    samples = [{"input": text, "output": text, "score": 0.5, "ground_truth": text} for text in HOSTILE]
    settings = {text: (text, text) for text in HOSTILE}
    start = {
        "started": HOSTILE[0],
        "host": HOSTILE[1],
        "command": HOSTILE[2],
        "versions": {HOSTILE[0]: HOSTILE[1]},
    }
    start |= {"git": {"commit": HOSTILE[0], "branch": HOSTILE[1], "changed_files": 1}}
    records = [
        record(step) | {text: float(step) for text in HOSTILE} | {f"timing_s/{HOSTILE[0]}": 0.5}
        for step in range(1, 6)
    ]
    write_run(folder, records, why=HOSTILE[0], settings=settings, samples={3: samples}, starts=[start, start])
    plan = {
        "quantities": [dict.fromkeys(("name", "unit", "value", "formula", "provenance"), HOSTILE[0])],
        "notes": list(HOSTILE),
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder
