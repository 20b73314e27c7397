"""Supervised training: one optimizer step per batch of conversations, periodic held-out loss and accuracy.

In: conversations, configuration, plan. Out: metrics, and the weights as a Hugging Face directory. Serves
`main_sft` and the warm start of embedded recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from hydraflow import metrics as reductions
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.engine.micro_batches import row_tokens
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import parts
from hydraflow.schema import SFTConfig
from hydraflow.system.role_logs import CONTROLLER
from hydraflow.tracking.endings import DONE
from hydraflow.tracking.trackers import Trackers
from hydraflow.trainer.checkpoint import Checkpointer
from hydraflow.trainer.clock import Clock
from hydraflow.trainer.machine import TRAIN
from hydraflow.trainer.mini_batches import mini_batch_order
from hydraflow.trainer.timing import PhaseTimer
from hydraflow.workers.sft import SFTSpec, SFTWorker
from hydraflow.workers.skipping import SkipLimits

StopRule = Callable[[dict[str, float]], bool]
"""Whether to stop early, given the metrics of a validation."""


class SFTTrainer:
    """A worker group that learns from conversations.

    `skipped`: the folder for rows of skipped steps. `row`: the timeline row of its phases.
    """

    def __init__(
        self, config: SFTConfig, plan: SFTPlan, runtime: Runtime, *, skipped: Path, row: str = CONTROLLER
    ):
        self.config, self.plan, self.runtime = config, plan, runtime
        skip_limits = SkipLimits(config.trainer.max_skipped_steps, str(skipped))
        spec = SFTSpec(
            config.model,
            config.optim,
            config.fsdp_config,
            plan.role,
            plan.total_steps,
            config.trainer.seed,
            skip_limits,
        )
        roles = {"sft": RoleSpec(SFTWorker, (spec,))}
        self.group = runtime.group(TRAIN, roles)
        runtime.await_ready()
        self.role: RoleGroup = self.group.role("sft")
        self.timer = PhaseTimer(runtime.timeline, row)

    def fit(
        self,
        next_batch: Callable[[], DataProto],
        held_out: Sequence[DataProto],
        trackers: Trackers,
        clock: Clock,
        *,
        stop_when: StopRule | None = None,
        checkpoints: Checkpointer | None = None,
        done: int = 0,
        restarts: int = 0,
        profiled: bool = False,
    ) -> str:
        """Trains until the steps or the time are used up or `stop_when` holds; returns why it ended.

        `checkpoints` None: nothing is saved. `profiled`: `global_profiler.steps` are steps of this training.
        `done`: steps of earlier starts; this is the `restarts`-th one after a failure.
        """
        if clock.preempted:
            return clock.why_to_stop()
        for step in range(done + 1, self.plan.total_steps + 1):
            with self.runtime.profiled(step) if profiled else nullcontext():
                metrics = self._step(next_batch(), step)
            why = DONE if step == self.plan.total_steps else clock.why_to_stop()
            ends_here = why == DONE or (why and not clock.preempted)
            if held_out and (ends_here or self.config.trainer.validates_after(step)):
                metrics |= self.validate(held_out)
                if stop_when is not None and stop_when(metrics):
                    why = "accuracy reached"
            trackers.log(
                metrics | {"training/global_step": step, "training/restarts": float(restarts)}, step=step
            )
            preempted = clock.preempted
            if checkpoints is not None:
                with self.timer.phase("save_checkpoint"):
                    checkpoints.after(step, metrics, last=bool(why), preempted=preempted)
            if why or preempted:
                return why or clock.why_to_stop()
        return DONE

    def validate(self, held_out: Sequence[DataProto]) -> dict[str, float]:
        """`val/loss` per token; `val/accuracy`: share of conversations in which greedy decoding gets every
        trained token."""
        found = []
        for batch in held_out:
            output = self.runtime.fetch(self.role.call(SFTWorker.evaluate, batch))
            found.append(_held_out_metrics(batch, output))
        return reductions.values(reductions.merge(found))

    def save(self, directory: Path) -> None:
        """Writes the weights as a Hugging Face directory."""
        self.role.call(SFTWorker.save_hf, str(directory))

    def close(self) -> None:
        """Ends the worker processes."""
        self.runtime.end(self.group)

    def _step(self, batch: DataProto, step: int) -> dict[str, float]:
        lengths = row_tokens(batch).numpy()
        order = mini_batch_order(lengths, self.plan.role, 1, balance=True, shuffle_key=None)
        with self.timer.phase("step", step):
            metrics = self.role.call(SFTWorker.update, batch.select_idxs(order), step)
        seconds = self.timer.drain()
        perf = {
            "perf/throughput": float(lengths.sum()) / seconds["timing_s/step"] / self.plan.role.data_ranks
        }
        return reductions.values(metrics) | seconds | perf


def _held_out_metrics(batch: DataProto, output: DataProto) -> dict[str, reductions.Metric]:
    trained, lengths = parts(batch.get("response_mask"))
    trained = trained.bool()
    log_probs, match = parts(output.get("log_probs"))[0], parts(output.get("greedy_match"))[0]
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    missed = torch.zeros(len(lengths)).index_add_(0, row[trained], 1.0 - match[trained].float())
    tokens = int(trained.sum())
    return {
        "val/loss": reductions.mean(
            float(-log_probs[trained].double().mean()) if tokens else 0.0, weight=tokens
        ),
        "val/accuracy": reductions.mean(float((missed == 0).float().mean()), weight=len(lengths)),
    }
