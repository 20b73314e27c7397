"""Scores responses with a reward function, in a pool of processes apart from the training processes.

In: trajectories with their row objects. Out: `score`, `acc`, `failed`, and on request `reward_baselines`,
`reward_parts` and the decoded `text` and `prompt_text`. Left out on purpose: assigning scores to tokens
(`advantage.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from hydraflow.rewards.functions import unknown_sources
from hydraflow.rewards.pool import RewardPool, RewardResult, RewardRow, function_means
from hydraflow.rewards.selection import BY_SOURCE, uses

SCORED_WITH = ("data_source", "reward_model", "extra_info")
"""The row objects that scoring needs."""
WHY_FAILED = "why_failed"
"""Key of the scores' meta_info: why the first failed row failed, or None."""
PARTS = "parts"
"""Key of a batch's meta_info: names of the function's outputs to return besides the score."""
FUNCTION_MEANS = "function_means"
"""Key of the scores' meta_info: the mean of each function of `reward.functions`, over rows that did not fail,
by the name of its metric."""
NO_FUNCTION = RewardResult(0.0, {"acc": math.nan})
"""The result of a row that no function scores."""
WITH_TEXTS = "texts"
"""Key of a batch's meta_info that requests the decoded responses and prompts."""


@dataclass(frozen=True)
class RewardSpec:
    """Constructor arguments of a RewardWorker."""

    model: ModelSourceConfig
    """The model whose tokenizer decodes responses."""
    reward: RewardConfig
    optional: bool = False
    """The run can learn without rewards (`trainer.roles.rewards_are_optional`): rows whose data source has no
    function get `NO_FUNCTION`."""


class RewardWorker(Worker):
    """Decodes responses and scores them in the pool."""

    def __init__(self, process: ProcessContext, spec: RewardSpec):
        super().__init__(process)
        self.spec = spec
        self.tokenizer = load_tokenizer(spec.model)
        self.pool = RewardPool(spec.reward)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False, read_only=True)
    def score(self, batch: DataProto, sampled: DataProto, greedy: DataProto | None = None) -> DataProto:
        """Scores the `responses` of `sampled` with the row objects of `batch`.

        `failed` marks the rows whose function raised or took too long, `meta_info[WHY_FAILED]` is the first
        cause, `meta_info[FUNCTION_MEANS]` the means of the functions. `greedy` has one response to the prompt
        of each `group` of `batch`, in the order of the group numbers: their scores are returned as
        `reward_baselines`, and a group whose greedy response failed has failed. With `meta_info[PARTS]` in
        `batch`, the outputs of these names are returned as `reward_parts`; a row without one of them has
        failed. With `meta_info[WITH_TEXTS]` in `batch`, the decoded responses and prompts of `sampled` are
        returned as the object columns `text` and `prompt_text`.
        """
        texts = self._decoded(sampled)
        results = [
            self._with_parts(result, batch.meta_info.get(PARTS, ()))
            for result in self._results(self._rows(batch, texts))
        ]
        tensors = {
            "score": _column(result.score for result in results),
            # the function's acc, else its score
            "acc": _column(result.extra.get("acc", result.score) for result in results),
            "failed": torch.tensor([result.failed is not None for result in results], dtype=torch.bool),
        }
        causes = [result.failed for result in results]
        if greedy is not None:
            baselines, row = self._greedy(batch, greedy)
            tensors["reward_baselines"] = _column(result.score for result in baselines)[row]
            tensors["failed"] |= torch.tensor([result.failed is not None for result in baselines])[row]
            causes += [result.failed for result in baselines]
        if names := batch.meta_info.get(PARTS):
            parts = [[_numbers(result).get(name, result.score) for name in names] for result in results]
            tensors["reward_parts"] = torch.tensor(parts, dtype=torch.float32)
        return DataProto.from_dict(
            tensors=tensors,
            non_tensors=self._texts(sampled, texts) if batch.meta_info.get(WITH_TEXTS) else {},
            meta_info={
                WHY_FAILED: next((cause for cause in causes if cause is not None), None),
                FUNCTION_MEANS: function_means(self.spec.reward, results),
            },
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def close(self) -> None:
        self.pool.close()

    def _results(self, rows: Sequence[RewardRow]) -> list[RewardResult]:
        """The pool's results, and NO_FUNCTION for rows that may go without a score."""
        unknown: set[str] = set()
        if self.spec.optional and uses(self.spec.reward, BY_SOURCE):
            unknown = {str(problem.value) for problem in unknown_sources(row.data_source for row in rows)}
        scored = iter(self.pool.score([row for row in rows if row.data_source not in unknown]))
        return [NO_FUNCTION if row.data_source in unknown else next(scored) for row in rows]

    def _greedy(self, batch: DataProto, greedy: DataProto) -> tuple[list[RewardResult], torch.Tensor]:
        """Results of the greedy responses, and (B,) the index among them of each row's prompt."""
        _, first, of_row = np.unique(batch.get("group").numpy(), return_index=True, return_inverse=True)
        asked = self._rows(batch.select_idxs(first), self._decoded(greedy))
        return self._results(asked), torch.from_numpy(of_row)

    def _with_parts(self, result: RewardResult, names: Sequence[str]) -> RewardResult:
        """The result, or a failed one if the function did not return all of these outputs."""
        missing = [name for name in names if name not in _numbers(result)]
        if not missing or result.failed is not None:
            return result
        why = f"returned no number {missing[0]}, which algorithm.gdpo_reward_keys names"
        return RewardResult(self.spec.reward.failure_score, {}, why)

    def _decoded(self, sampled: DataProto, column: str = "responses") -> list[str]:
        tokens = [row.tolist() for row in rows(sampled.get(column))]
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def _texts(self, sampled: DataProto, responses: Sequence[str]) -> dict[str, np.ndarray]:
        prompts = self._decoded(sampled, "prompts")
        return {"text": np.array(responses, dtype=object), "prompt_text": np.array(prompts, dtype=object)}

    def _rows(self, batch: DataProto, texts: Sequence[str]) -> list[RewardRow]:
        sources, models, extras = (batch.non_tensor_batch[name] for name in SCORED_WITH)
        return [
            RewardRow(source, text, model.get("ground_truth"), extra)
            for source, text, model, extra in zip(sources, texts, models, extras, strict=True)
        ]


def _column(numbers: Iterable[float]) -> torch.Tensor:
    """(B,) float32."""
    return torch.tensor([float(number) for number in numbers], dtype=torch.float32)


def _numbers(result: RewardResult) -> dict[str, float]:
    return {"score": result.score} | result.extra
