"""Supervised training: one optimizer step per batch of conversations; held-out loss and accuracy.

In: examples, configuration, plan. Out: metrics, and the weights as a Hugging Face directory. Serves
`main_sft` and the warm start of embedded recipes, in the loop of `loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hydraflow import metrics as reductions
from hydraflow.algorithms.trained_tokens import row_sums
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.data.loader import PromptLoader, RowSource
from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import Future
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.engine.config import SUPERVISED
from hydraflow.models.packing import row_tokens
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import parts
from hydraflow.schema import SupervisedConfig
from hydraflow.system.role_logs import CONTROLLER
from hydraflow.trainer.machine import TRAIN
from hydraflow.trainer.mini_batches import cut_mini_batches, dispatched
from hydraflow.trainer.timing import PhaseTimer
from hydraflow.workers.sft import SFTSpec, SFTWorker
from hydraflow.workers.skipping import SkipLimits


class SFTTrainer:
    """Trains a worker group on the conversations of a loader.

    `skipped`: the folder for rows of skipped steps. `row`: the timeline row of its phases.
    """

    version = 0
    """Unused: validation reads the trained model itself."""

    def __init__(
        self,
        config: SupervisedConfig,
        plan: SFTPlan,
        runtime: Runtime,
        source: PromptLoader,
        *,
        skipped: Path,
        row: str = CONTROLLER,
        devices: Sequence[int] | None = None,
    ):
        self.config, self.plan, self.runtime, self.source = config, plan, runtime, source
        skip_limits = SkipLimits(config.trainer.max_skipped_steps, str(skipped))
        self.group = runtime.group(TRAIN, self.roles(skip_limits), devices)
        runtime.await_ready()
        self.role: RoleGroup = self.group.role("sft")
        self.timer = PhaseTimer(runtime.timeline, row)

    def roles(self, skip_limits: SkipLimits) -> dict[str, RoleSpec]:
        """The roles of each process; `sft` is the trained one."""
        return {"sft": RoleSpec(SFTWorker, (SFTSpec(**self.spec(skip_limits)),))}

    def spec(self, skip_limits: SkipLimits) -> dict[str, Any]:
        """Constructor arguments of the trained worker."""
        config, plan = self.config, self.plan
        return {
            "model": config.model,
            "optim": config.optim,
            "strategy": SUPERVISED,
            "engine": config.fsdp_config,
            "plan": plan.role,
            "total_steps": plan.total_steps,
            "seed": config.trainer.seed,
            "skip_limits": skip_limits,
        }

    def prepared(self, batch: DataProto, step: int) -> DataProto:
        """The batch with all columns that the update reads."""
        return batch

    def begin(self, step: int) -> None:
        """Does nothing: there is no generation engine."""

    def step(self, step: int, interrupt: Callable[[], None]) -> dict[str, float]:
        """One optimizer step on the next conversations. Never calls `interrupt`: a step is short."""
        batch = self.source.next_batch()
        lengths = row_tokens(batch).numpy()
        groups = batch.get("group").numpy() if "group" in batch.keys() else np.arange(len(batch))
        cut = cut_mini_batches(lengths, groups, self.plan.role, balance=True, shuffle_key=None)
        with self.timer.phase("step", step):
            batch = self.prepared(batch, step)
            updating: Future = self.role.call(SFTWorker.update, dispatched(batch, cut, self.plan.role), step)
            metrics = updating.get()
        seconds = self.timer.drain()
        perf = {"perf/throughput": float(lengths.sum()) / seconds["timing_s/step"] / self.group.world_size}
        return reductions.values(metrics) | seconds | perf

    def save(self, directory: Path) -> None:
        self.role.call(SFTWorker.save_hf, str(directory))

    def close(self) -> None:
        self.runtime.end(self.group)

    def measure(self, batch: DataProto) -> dict[str, reductions.Metric]:
        """`val/loss` per token; `val/accuracy`: share of conversations in which greedy decoding gets every
        trained token."""
        output = self.runtime.fetch(self.role.call(SFTWorker.evaluate, batch))
        mask, lengths = parts(batch.get("response_mask"))
        log_probs, match = parts(output.get("log_probs"))[0], parts(output.get("greedy_match"))[0]
        trained, missed = mask.bool(), row_sums((1.0 - match) * mask, lengths)
        tokens = int(trained.sum())
        loss = float(-log_probs[trained].double().mean()) if tokens else 0.0
        return {
            "val/loss": reductions.mean(loss, weight=tokens),
            "val/accuracy": reductions.mean(float((missed == 0).float().mean()), weight=len(lengths)),
        }


class HeldOut:
    """Measures the model on held-out examples."""

    def __init__(self, trainer: SFTTrainer, held_out: RowSource, per_call: int):
        self.trainer = trainer
        self.loader = PromptLoader(held_out, per_call, shuffle=False, seed=0, drop_last=False)

    def run(self, step: int, version: int = 0) -> dict[str, float]:
        """The trainer's measurements over all held-out examples."""
        return reductions.values(reductions.merge(list(map(self.trainer.measure, self.loader))))
