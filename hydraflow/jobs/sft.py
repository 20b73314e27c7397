"""Training on examples from configuration to run folder: conversations, or pairs of responses.

In: the configuration of main_sft, main_dpo or main_rm. Out: a run folder. What differs between them is in
`KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hydraflow.batch_plan.sft import SFTPlan, resolve_sft_plan
from hydraflow.batch_plan.table import print_plan
from hydraflow.checkup.preflight import require_trackers
from hydraflow.compose.command import Command
from hydraflow.compose.debugging import applied
from hydraflow.data.conversations import ConversationDataset, read_chats
from hydraflow.data.pairs import PairDataset, ScoredPairDataset, read_pairs
from hydraflow.engine.fsdp.ulysses import require_shareable
from hydraflow.jobs.inputs import (
    open_rows,
    open_tokenizer,
    open_trained_model,
    require_rounded,
    require_rows_fit,
)
from hydraflow.jobs.restarts import Restarts, with_restarts
from hydraflow.jobs.saving import RunCheckpointing, require_metric, sft_roles, training_loader
from hydraflow.jobs.session import Session
from hydraflow.schema import DPOConfig, RMConfig, SFTConfig, SupervisedConfig
from hydraflow.tracking.endings import DONE
from hydraflow.trainer.config import AFTER_EACH_EPOCH, SupervisedTrainerConfig
from hydraflow.trainer.identity import identity_of
from hydraflow.trainer.loop import Loop
from hydraflow.trainer.pairs import PairTrainer
from hydraflow.trainer.resume import CheckpointRequirements
from hydraflow.trainer.sft import HeldOut, SFTTrainer

Examples = ConversationDataset | PairDataset


@dataclass(frozen=True)
class Kind:
    """A kind of job: its data, loss and metrics."""

    open: Callable[..., Any]
    """Opens a data set."""
    trainer: type[SFTTrainer]
    head: str
    """Head of the model: policy or value."""
    measured: tuple[str, ...]
    """Metrics of held-out examples that can select the best checkpoint."""


OF_PAIRS = ("val/loss", "val/accuracy", "val/margin")
KINDS: dict[type[SupervisedConfig], Kind] = {
    SFTConfig: Kind(
        partial(open_rows, ConversationDataset, read_chats),
        SFTTrainer,
        "policy",
        ("val/loss", "val/accuracy"),
    ),
    DPOConfig: Kind(partial(open_rows, PairDataset, read_pairs), PairTrainer, "policy", OF_PAIRS),
    RMConfig: Kind(partial(open_rows, ScoredPairDataset, read_pairs), PairTrainer, "value", OF_PAIRS),
}


def run_sft(config: SupervisedConfig, *, command: Command | None = None) -> None:
    """Trains, or resumes training. Raises ConfigError before anything starts, other errors of `errors.py`
    later. `command`: origins of the values, for the plan and the run folder."""
    with_restarts(config, partial(_run, command or Command("sft")))


def _run(command: Command, config: SupervisedConfig, restarts: Restarts) -> None:
    config, origins = applied(config), command.origins
    with Session(config, scoring=False, restarts=restarts) as session:
        plan, train, val = _checked(config, session, origins)
        print_plan(plan)
        loader = training_loader(config, train, plan.conversations_per_step)
        identity = identity_of(config, plan)
        required = CheckpointRequirements(identity, sft_roles(config), plan.total_steps, loader)
        if not session.begin(required):
            return
        session.keep(config, plan, command)
        schedule = _in_steps(config.trainer, plan)
        trainer = KINDS[type(config)].trainer(
            config, plan, session.runtime, loader, skipped=session.folder.skipped
        )
        saving = RunCheckpointing(schedule, required, session.start, {"model": trainer.role}, loader, loader)
        saving.restore()
        trackers = session.open_trackers(plan.total_steps)
        held_out = HeldOut(trainer, val, plan.conversations_per_step) if val else None
        loop = Loop(schedule, trainer, held_out, trackers, session.clock, restarts=session.restarts.done)
        with saving.checkpointer(trackers) as checkpoints:
            session.why = loop.fit(
                checkpoints,
                plan.total_steps,
                done=session.start.step,
                validate_first=session.validates_first(plan.total_steps, schedule),
            )
        if config.trainer.save_final_model and (session.why == DONE or not session.clock.preempted):
            trainer.save(session.folder.final_model)


def _in_steps(trainer: SupervisedTrainerConfig, plan: SFTPlan) -> SupervisedTrainerConfig:
    """The settings with after_each_epoch replaced by an epoch's number of steps."""
    steps = {AFTER_EACH_EPOCH: plan.steps_per_epoch}
    test_freq, save_freq = (steps.get(every, every) for every in (trainer.test_freq, trainer.save_freq))
    return replace(trainer, test_freq=test_freq, save_freq=save_freq)


def _checked(
    config: SupervisedConfig, session: Session, origins: Mapping[str, str]
) -> tuple[SFTPlan, Examples, Examples | None]:
    """Opens every file that the run will use, and makes the plan. Raises one ConfigError that lists
    everything missing or inconsistent."""
    data, faults, machine, kind = config.data, session.faults, session.found_machine, KINDS[type(config)]
    described = open_trained_model(config.model, faults, head=kind.head, field="model")
    tokenizer = open_tokenizer(config.model, described, faults, field="model")
    train = kind.open(
        data, data.train_files, tokenizer, faults, key="data.train_files", max_samples=data.train_max_samples
    )
    plan = val = None
    if data.val_files:
        val = kind.open(
            data, data.val_files, tokenizer, faults, key="data.val_files", max_samples=data.val_max_samples
        )
    for key, examples in (("data.train_files", train), ("data.val_files", val)):
        if described is not None and examples is not None:
            faults.passes(partial(require_rows_fit, examples, data, described, key=key))
    if machine is not None:
        rows, per_node = len(train) if train else None, machine.processes_per_node
        plan = faults.result(
            lambda: resolve_sft_plan(config, conversations=rows, devices_per_node=per_node, origins=origins)
        )
    if plan is not None and described is not None:
        sharers = plan.layouts["model"].context
        faults.passes(lambda: require_shareable(described, config.model, sharers, field="model"))
        require_rounded(config.model, config.fsdp_config, faults, head=kind.head, field="model")
    measured = kind.measured if data.val_files else ()
    faults.passes(lambda: require_metric(config.trainer.keep_best, measured))
    faults.passes(lambda: require_trackers(config.trainer, known=faults.problems))
    faults.require_none()
    assert plan is not None and train is not None, "whatever could not be opened is a fault"
    return plan, train, val
