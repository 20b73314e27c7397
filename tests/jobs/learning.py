"""Runs of the default recipe that end once they have learnt enough."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hydraflow.tracking.file import FileTracker

ACTOR = "actor_rollout_ref.actor"
METRIC = "val-core/arithmetic/acc/mean@1"
ENOUGH = 0.08
"""By which held-out accuracy must rise; of 500 problems, so that chance moves it by 0.03. With rewards that
say nothing it falls by 0.01 to 0.09 within three steps."""


class Learnt(Exception):
    """A run has learnt enough."""


def few_steps(folder: Path, cache: Path) -> list[str]:
    """Overrides for at most twelve steps, with a validation after every second."""
    return [
        f"recipe.cache_dir={cache}",
        f"trainer.default_local_dir={folder}",
        "trainer.total_training_steps=12",
        "data.train_max_samples=1000",
        "trainer.test_freq=2",
        "trainer.logger=[file]",
        "trainer.save_final_model=false",
        f"{ACTOR}.optim.lr=7e-5",
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0",
    ]


def gain(folder: Path) -> float:
    """By how much held-out accuracy has risen."""
    summary = json.loads((folder / "summary.json").read_text())
    first: float = summary["first_val_accuracy"]
    assert 0.3 <= first <= 0.6, "the warm start leaves something to learn"
    return summary["last_val_accuracy"] - first


def stop_once_learnt(monkeypatch: pytest.MonkeyPatch, stop: Callable[[], object] | None = None) -> None:
    """`stop` is called with a validation that is above the first by more than the last one must be. By
    default it raises `Learnt`: the run ends and saves nothing."""
    whole: Callable = FileTracker.log
    found: list[float] = []

    def log(self: FileTracker, metrics: dict[str, float], at: int) -> None:
        whole(self, metrics, at)
        if METRIC in metrics:
            found.append(metrics[METRIC])
            if found[-1] > found[0] + ENOUGH:
                if stop is None:
                    raise Learnt
                stop()

    monkeypatch.setattr(FileTracker, "log", log)
