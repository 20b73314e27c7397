"""The embedded recipe: problems, a small model and its warm start, made on this machine and kept.

In: `recipe.*` and a running Ray. Out: a folder with train.parquet, val.parquet and the warm-started model,
made once for each set of parameters. Two runs at the same time wait for each other. From random weights an
exact-match reward stays at 0, so the model first learns from examples until it is right about half the time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from hydraflow.batch_plan.sft import resolve_sft_plan
from hydraflow.data.arithmetic import conversation_rows, split_problems, write_arithmetic, write_rows
from hydraflow.data.config import SFTDataConfig
from hydraflow.data.conversations import ConversationDataset
from hydraflow.data.loader import PromptLoader
from hydraflow.dispatch.runtime import Runtime
from hydraflow.engine.config import FSDPConfig, OptimConfig
from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import load_tokenizer
from hydraflow.models.tiny import make_model
from hydraflow.recipes.config import RecipeConfig
from hydraflow.schema import PPOConfig, SFTConfig
from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.trackers import LOCAL, open_trackers
from hydraflow.trainer.clock import Clock
from hydraflow.trainer.config import SupervisedTrainerConfig
from hydraflow.trainer.loop import Loop
from hydraflow.trainer.machine import Machine
from hydraflow.trainer.sft import HeldOut, SFTTrainer

FORMAT = 2
"""Incremented when the problems or the model's shape change, so that folders of older versions are not
used."""
LOCK_SECONDS = 900.0
"""Seconds that a run waits for another one that makes the same assets."""
KEY = "recipe.cache_dir"
REHEARSED = 64
"""Number of problems in a rehearsal. A few represent all, because they differ only in their digits."""
LEAST_ACCURACY = 0.3
"""Accuracy below which a warning is logged: most groups would have no reward at all."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArithmeticAssets:
    """Files and model of the recipe."""

    train: Path
    val: Path
    model: Path


def cache_folder(recipe: RecipeConfig, seed: int) -> Path:
    """Where the assets of these parameters are kept. ConfigError if that is in the home folder and there is
    none."""
    facts = {name: value for name, value in asdict(recipe).items() if name != "cache_dir"}
    facts |= {
        "seed": seed,
        "format": FORMAT,
        "sft": asdict(_sft_config(recipe, seed, Path("start"), Path("sft"), Path("sft_val"))),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    named = recipe.cache_dir or os.environ.get("HYDRAFLOW_CACHE") or "~/.cache/hydraflow"
    try:
        return Path(named).expanduser() / f"arithmetic-{digest}"
    except RuntimeError as error:  # HOME is not set, and the user is not in the password database
        rule = f"must be given: {named} is in the home folder, which is not known"
        raise ConfigError.one(KEY, None, rule, f"{KEY}=/tmp/hydraflow") from error


def is_made(folder: Path) -> bool:
    """Whether `folder` holds everything; the model is written last and renamed."""
    return (folder / "model" / "config.json").is_file()


def pointed_at(config: PPOConfig, assets: ArithmeticAssets) -> PPOConfig:
    """The configuration with the recipe's files and model in it."""
    policy = config.actor_rollout_ref
    return replace(
        config,
        data=replace(config.data, train_files=str(assets.train), val_files=str(assets.val)),
        actor_rollout_ref=replace(policy, model=replace(policy.model, path=str(assets.model))),
    )


def with_made_assets(config: PPOConfig) -> PPOConfig:
    """The configuration with the recipe's assets in it if they exist, else unchanged."""
    if config.recipe.name == "none" or config.actor_rollout_ref.model.path:
        return config
    folder = cache_folder(config.recipe, config.trainer.seed)
    return pointed_at(config, _assets(folder, folder / "model")) if is_made(folder) else config


@contextmanager
def rehearsed(config: PPOConfig) -> Iterator[tuple[PPOConfig, bool]]:
    """The configuration with its recipe's assets or, while they do not exist, with a few problems and an
    untrained model that are deleted after the block; and whether it is the one to train with. Without a
    recipe, the configuration itself.

    So everything that depends on model and data is checked before minutes are spent on the real ones.
    """
    recipe, seed = config.recipe, config.trainer.seed
    if recipe.name == "none":
        yield config, True
        return
    made = cache_folder(recipe, seed)
    if is_made(made):
        yield pointed_at(config, _assets(made, made / "model")), True
        return
    with tempfile.TemporaryDirectory(prefix="hydraflow-recipe-") as name:
        folder = Path(name)
        few, held_out = min(REHEARSED, recipe.train_problems), min(REHEARSED, recipe.val_problems)
        write_arithmetic(folder, train_problems=few, val_problems=held_out, seed=seed)
        yield pointed_at(config, _assets(folder, make_model(folder / "model", seed=seed))), False


def prepare(
    recipe: RecipeConfig,
    seed: int,
    machine: Machine,
    clock: Clock,
    *,
    runtime: Callable[[], Runtime],
    scratch: Path,
    logger: Sequence[str],
) -> ArithmeticAssets:
    """Makes the assets if they do not exist; `runtime` is only called when there is something to train.

    `scratch`: a folder for the warm start's metrics and model; the model is not kept for other runs if the
    warm start was cut short. Raises EnvironmentFault when another run takes too long to make the same assets.
    """
    folder = cache_folder(recipe, seed)
    if is_made(folder):  # perhaps by another user: reading needs no lock
        return _assets(folder, folder / "model")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if is_made(folder):
            return _assets(folder, folder / "model")
        train, val, held_out = recipe.train_problems, recipe.val_problems, folder / "sft_val.parquet"
        files = write_arithmetic(folder, train_problems=train, val_problems=val, seed=seed)
        # the same problems with answers, for the warm start's validation
        write_rows(held_out, conversation_rows(split_problems(train, val, seed)[1]))
        start = make_model(folder / "start", seed=seed)
        config = _sft_config(recipe, seed, start, files.sft, held_out)
        model = _warm_up(recipe, config, machine, clock, runtime(), scratch, logger)
        if clock.why_to_stop():
            return _assets(folder, model)
        shutil.copytree(model, folder / "unfinished", dirs_exist_ok=True)
        (folder / "unfinished").rename(folder / "model")
        return _assets(folder, folder / "model")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one run at a time makes the assets in a folder."""
    lock = FileLock(folder / "lock")
    try:
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            log.warning("waiting for another run that makes %s", folder)
            held = lock.acquire(timeout=LOCK_SECONDS)
    except Timeout as error:
        text = f"another run has been making {folder} for more than {LOCK_SECONDS:g} seconds"
        raise EnvironmentFault(text) from error
    except (OSError, NotImplementedError) as error:  # NFS without a lock daemon
        rule = f"files cannot be locked there: {error}"
        raise ConfigError.one(KEY, folder, rule, f"{KEY}=<folder on a local disk>") from error
    with held:
        yield


def _assets(folder: Path, model: Path) -> ArithmeticAssets:
    return ArithmeticAssets(folder / "train.parquet", folder / "val.parquet", model)


def _warm_up(
    recipe: RecipeConfig,
    config: SFTConfig,
    machine: Machine,
    clock: Clock,
    runtime: Runtime,
    scratch: Path,
    logger: Sequence[str],
) -> Path:
    """Trains until the model is right often enough; returns where it was written."""
    tokenizer = load_tokenizer(config.model)
    train = ConversationDataset(config.data, config.data.train_files, tokenizer)
    val = ConversationDataset(config.data, config.data.val_files, tokenizer, key="data.val_files")
    here = replace(
        config,
        trainer=replace(config.trainer, nnodes=machine.nodes, n_gpus_per_node=machine.processes_per_node),
    )
    plan = resolve_sft_plan(here, conversations=len(train))
    loader = PromptLoader(train, plan.conversations_per_step, shuffle=True, seed=config.trainer.seed)
    trainer = SFTTrainer(
        config,
        plan,
        runtime,
        loader,
        skipped=scratch / "skipped",
        row="warm start",
        devices=range(machine.processes),
    )
    held_out = HeldOut(trainer, val, len(val))
    scratch.mkdir(parents=True, exist_ok=True)
    local = [name for name in logger if name in LOCAL]
    with open_trackers(local, RunInfo(scratch, "warm start", plan.total_steps)) as trackers:
        Loop(config.trainer, trainer, held_out, trackers, clock, profiled=False).fit(
            None,
            plan.total_steps,
            stop_when=lambda found: found["val/accuracy"] >= recipe.warm_start_accuracy,
        )
    if not clock.why_to_stop():
        accuracy = held_out.run(plan.total_steps)["val/accuracy"]
        if accuracy < LEAST_ACCURACY:
            text = "the warm start ended at a held-out accuracy of %.2f: rewards will be rare"
            log.warning(f"{text} (recipe.warm_start_steps)", accuracy)
    trainer.save(scratch / "model")
    trainer.close()
    return scratch / "model"


def _sft_config(recipe: RecipeConfig, seed: int, model: Path, train: Path, val: Path) -> SFTConfig:
    return SFTConfig(
        model=ModelConfig(path=str(model), enable_gradient_checkpointing=False),
        data=SFTDataConfig(train_files=str(train), val_files=str(val), train_batch_size=128, max_length=32),
        optim=OptimConfig(lr=2e-3),
        fsdp_config=FSDPConfig(dtype="fp32"),
        trainer=SupervisedTrainerConfig(total_training_steps=recipe.warm_start_steps, test_freq=5, seed=seed),
    )
