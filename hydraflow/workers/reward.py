"""Scores responses with a reward function, in a pool of processes beside the training processes.

In: trajectories with their row objects. Out: `score`, `acc`, `failed`, and on request the decoded `text` and
`prompt_text`. Left out on purpose: the token that a score belongs to (`advantage.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.worker import ProcessContext, Worker
from hydraflow.models.config import ModelSourceConfig
from hydraflow.models.loading import load_tokenizer
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import rows
from hydraflow.rewards.config import RewardConfig
from hydraflow.rewards.pool import RewardPool, RewardRow

SCORED_WITH = ("data_source", "reward_model", "extra_info")
"""The row objects that scoring needs."""
WHY_FAILED = "why_failed"
"""Key of the scores' meta_info: the first cause of a row that failed, or None."""
WITH_TEXTS = "texts"
"""Key of a batch's meta_info that requests the decoded responses and prompts."""


@dataclass(frozen=True)
class RewardSpec:
    """Constructor arguments of a RewardWorker."""

    model: ModelSourceConfig
    """The model whose tokenizer decodes responses."""
    reward: RewardConfig


class RewardWorker(Worker):
    """Decodes responses and scores them in the pool."""

    def __init__(self, process: ProcessContext, spec: RewardSpec):
        super().__init__(process)
        self.spec = spec
        self.tokenizer = load_tokenizer(spec.model)
        self.pool = RewardPool(spec.reward)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False, read_only=True)
    def score(self, batch: DataProto, sampled: DataProto) -> DataProto:
        """Scores the `responses` of `sampled` with the row objects of `batch`.

        `failed` marks the rows whose function raised or took too long, `meta_info[WHY_FAILED]` is the first
        cause.
        With `meta_info[WITH_TEXTS]` in `batch` the decoded responses and prompts of `sampled` come too, as
        the object columns `text` and `prompt_text`.
        """
        responses = [row.tolist() for row in rows(sampled.get("responses"))]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        results = self.pool.score(self._rows(batch, texts))
        scores = torch.tensor([result.score for result in results], dtype=torch.float32)  # (B,)
        failed = torch.tensor([result.failed is not None for result in results], dtype=torch.bool)  # (B,)
        return DataProto.from_dict(
            tensors={
                "score": scores,
                # what the function calls acc, else its score
                "acc": torch.tensor(
                    [float(result.extra.get("acc", result.score)) for result in results], dtype=torch.float32
                ),
                "failed": failed,
            },
            non_tensors=self._texts(sampled, texts) if batch.meta_info.get(WITH_TEXTS) else {},
            meta_info={
                WHY_FAILED: next((result.failed for result in results if result.failed is not None), None)
            },
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def close(self) -> None:
        """Ends the pool's processes."""
        self.pool.close()

    def _texts(self, sampled: DataProto, responses: Sequence[str]) -> dict[str, np.ndarray]:
        prompts = self.tokenizer.batch_decode(
            [row.tolist() for row in rows(sampled.get("prompts"))], skip_special_tokens=True
        )
        return {"text": np.array(responses, dtype=object), "prompt_text": np.array(prompts, dtype=object)}

    def _rows(self, batch: DataProto, texts: Sequence[str]) -> list[RewardRow]:
        objects = batch.non_tensor_batch
        return [
            RewardRow(
                data_source=source,
                solution_str=text,
                ground_truth=reward_model.get("ground_truth"),
                extra_info=extra,
            )
            for source, text, reward_model, extra in zip(
                objects["data_source"], texts, objects["reward_model"], objects["extra_info"], strict=True
            )
        ]
