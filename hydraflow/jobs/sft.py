"""Supervised training from configuration to run folder."""

from __future__ import annotations

from collections.abc import Collection

from hydraflow.batch_plan_sft import resolve_sft_plan
from hydraflow.batch_plan_table import print_plan
from hydraflow.data.conversations import ConversationDataset
from hydraflow.data.loader import PromptLoader
from hydraflow.jobs.session import Session
from hydraflow.models.loading import load_config, load_tokenizer, require_weights
from hydraflow.protocol.batch import DataProto
from hydraflow.schema import SFTConfig
from hydraflow.trainer.sft import SFTTrainer


def run_sft(config: SFTConfig, *, given: Collection[str] = ()) -> None:
    """Trains; raises ConfigError before anything starts, other errors of `errors.py` later. `given`: the command line's keys."""
    with Session(config.trainer, config.ray_init, scoring=False) as session:
        load_config(config.model, field="model")
        require_weights(config.model, field="model")
        tokenizer = load_tokenizer(config.model, field="model")
        train = ConversationDataset(config.data, config.data.train_files, tokenizer, max_samples=config.data.train_max_samples)
        val = ConversationDataset(config.data, config.data.val_files, tokenizer, key="data.val_files") if config.data.val_files else None
        plan = resolve_sft_plan(config, processes=session.machine.processes, conversations=len(train), given=given)
        print_plan(plan)
        session.keep(config, plan)
        loader = PromptLoader(train, plan.conversations_per_step, shuffle=config.data.shuffle, seed=config.trainer.seed)
        trainer = SFTTrainer(config, plan, session.runtime)
        trackers = session.open_trackers(plan.total_steps)
        session.why = trainer.fit(loader.next_batch, held_out_batches(val, plan.conversations_per_step), trackers, session.clock)
        if config.trainer.save_final_model:
            trainer.save(session.folder.final_model)


def held_out_batches(val: ConversationDataset | None, size: int) -> list[DataProto]:
    """The held-out conversations in calls of a training batch's size."""
    if val is None:
        return []
    return [val.batch(range(start, min(start + size, len(val)))) for start in range(0, len(val), size)]
