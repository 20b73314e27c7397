"""Supervised training from configuration to run folder."""

from __future__ import annotations

from hydraflow.batch_plan.sft import resolve_sft_plan
from hydraflow.batch_plan.table import print_plan
from hydraflow.checkup.preflight import require_trackers
from hydraflow.compose.command import Command
from hydraflow.data.conversations import ConversationDataset
from hydraflow.data.loader import PromptLoader
from hydraflow.debugging import applied
from hydraflow.jobs.restarts import Restarts, with_restarts
from hydraflow.jobs.saving import Saving, at_its_place, require_metric, sft_roles
from hydraflow.jobs.session import Session
from hydraflow.models.loading import load_config, load_tokenizer, require_weights
from hydraflow.protocol.batch import DataProto
from hydraflow.schema import SFTConfig
from hydraflow.tracking.endings import DONE
from hydraflow.trainer.identity import identity_of
from hydraflow.trainer.resume import Wanted
from hydraflow.trainer.sft import SFTTrainer


def run_sft(config: SFTConfig, *, command: Command | None = None) -> None:
    """Trains; raises ConfigError before anything starts, other errors of `errors.py` later.

    `command` says where each value is from.
    """
    with_restarts(config, lambda given, restarts: _run(given, command or Command("sft"), restarts))


def _run(config: SFTConfig, command: Command, restarts: Restarts) -> None:
    config, origins = applied(config), command.origins
    with Session(config, scoring=False, restarts=restarts) as session:
        load_config(config.model, field="model")
        require_weights(config.model, field="model")
        tokenizer = load_tokenizer(config.model, field="model")
        train = ConversationDataset(config.data, config.data.train_files, tokenizer, max_samples=config.data.train_max_samples)
        val = ConversationDataset(config.data, config.data.val_files, tokenizer, key="data.val_files") if config.data.val_files else None
        plan = resolve_sft_plan(config, conversations=len(train), devices_per_node=session.machine.processes_per_node, origins=origins)
        print_plan(plan)
        require_metric(config.trainer.keep_best, ["val/loss", "val/accuracy"] if val else [])
        require_trackers(config.trainer)
        wanted = Wanted(identity_of(config, plan), sft_roles(config), plan.total_steps)
        if not session.begin(wanted):
            return
        session.keep(config, plan, command)
        loader = PromptLoader(train, plan.conversations_per_step, shuffle=config.data.shuffle, seed=config.trainer.seed)
        loader = at_its_place(loader, session.start)
        trainer = SFTTrainer(config, plan, session.runtime, skipped=session.folder.skipped)
        saving = Saving(config.trainer, wanted, session.start, {"model": trainer.role}, loader)
        saving.restore()
        trackers, held_out = session.open_trackers(plan.total_steps), held_out_batches(val, plan.conversations_per_step)
        with saving.checkpointer(trackers) as checkpoints:
            session.why = trainer.fit(
                loader.next_batch,
                held_out,
                trackers,
                session.clock,
                checkpoints=checkpoints,
                done=session.start.step,
                restarts=restarts.done,
                profiled=True,
            )
        if config.trainer.save_final_model and (session.why == DONE or not session.clock.preempted):
            trainer.save(session.folder.final_model)


def held_out_batches(val: ConversationDataset | None, size: int) -> list[DataProto]:
    """The held-out conversations in calls of a training batch's size."""
    if val is None:
        return []
    return [val.batch(range(start, min(start + size, len(val)))) for start in range(0, len(val), size)]
