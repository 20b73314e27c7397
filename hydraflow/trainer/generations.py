"""Generated samples as readable text: prompt, response, score, reference, one JSON object per line.

In: a scored batch. Out: `<folder>/<step>.jsonl` under the names that verl's dumps have (`input`, `output`,
`gts`, `score`, `step`), and `acc`, `failed`, `data_source`, `uid`. Left out on purpose: token ids and
log-probabilities; those stay in the workers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hydraflow.dispatch.runtime import Runtime
from hydraflow.system.paths import expanded
from hydraflow.system.whole_files import replacing
from hydraflow.trainer.source import Trajectories

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredResponses:
    """Scored responses, as arrays and lists of equal length."""

    sources: np.ndarray
    scores: np.ndarray
    accuracies: np.ndarray
    """`acc`, or the score for rows without a reward function."""
    failed: np.ndarray
    """The reward function failed on the row."""
    prompts: list[str]
    texts: list[str]
    truths: list[object]
    uids: list[object]

    def rows(self, step: int) -> Iterator[dict[str, Any]]:
        for row, text in enumerate(self.texts):
            yield {
                "step": step,
                "uid": str(self.uids[row]),
                "data_source": str(self.sources[row]),
                "input": self.prompts[row],
                "output": text,
                "gts": self.truths[row],
                "score": float(self.scores[row]),
                "acc": float(self.accuracies[row]),
                "failed": bool(self.failed[row]),
            }


def read_scored(runtime: Runtime, taken: Trajectories) -> ScoredResponses:
    """Fetches scores and texts to the controller; the trajectories must have been scored with their texts."""
    names = ["score", "acc", "failed", "text", "prompt_text"]
    read = runtime.fetch(taken.scoring.get().select(names, [], []))
    objects, scores = taken.rows.objects, read.get("score").double().numpy()
    accuracies = read.get("acc").double().numpy()
    return ScoredResponses(
        sources=objects["data_source"].astype(str),
        scores=scores,
        accuracies=np.where(np.isnan(accuracies), scores, accuracies),
        failed=read.get("failed").numpy() | ~np.isfinite(scores),
        prompts=list(read.non_tensor_batch["prompt_text"]),
        texts=list(read.non_tensor_batch["text"]),
        truths=[row.get("ground_truth") for row in objects["reward_model"]],
        uids=list(objects["uid"]),
    )


class GenerationDump:
    """Writes one file per step. A write error is a warning, because training does not depend on the files.

    `key`: the configuration key of `folder`, for the warning.
    """

    def __init__(self, folder: Path, key: str):
        self.folder, self.key = folder, key
        self._warned = False

    @classmethod
    def to(cls, folder: str | None, key: str) -> GenerationDump | None:
        """A dump in the folder that configuration key `key` is set to, if any."""
        return cls(expanded(folder), key) if folder else None

    def write(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Writes <step>.jsonl atomically. A step that runs again after a resume replaces its file."""
        target = self.folder / f"{step}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (
                replacing(target) as unfinished,
                unfinished.open("w", encoding="utf-8", errors="replace") as file,
            ):
                file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        except OSError as error:
            if not self._warned:
                text = "%s: %s cannot be written (%s); training continues without it"
                logger.warning(text, self.key, target, error.strerror)
            self._warned = True
