"""The embedded recipe: problems, a small model and its warm start, made on this machine and kept.

In: `recipe.*` and a running Ray. Out: a folder with train.parquet, val.parquet and the warm-started model, made once for each
set of parameters. Two runs at the same time wait for each other.
From random weights an exact-match reward stays at 0, so the model first learns from examples until it is right about half the time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from hydraflow.batch_plan_sft import resolve_sft_plan
from hydraflow.data.arithmetic import ArithmeticFiles, conversation_rows, split_problems, write_arithmetic, write_rows
from hydraflow.data.config import SFTDataConfig
from hydraflow.data.conversations import ConversationDataset
from hydraflow.data.loader import PromptLoader
from hydraflow.dispatch.runtime import Runtime
from hydraflow.engine.config import FSDPConfig, OptimConfig
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import load_tokenizer
from hydraflow.models.tiny import make_model
from hydraflow.recipes.config import RecipeConfig
from hydraflow.schema import SFTConfig
from hydraflow.tracking.trackers import Trackers
from hydraflow.trainer.clock import Clock
from hydraflow.trainer.config import SFTTrainerConfig
from hydraflow.trainer.machine import Machine
from hydraflow.trainer.sft import SFTTrainer

FORMAT = 1
"""Raised when what is made changes, so that kept folders of older versions are not used."""


@dataclass(frozen=True)
class ArithmeticAssets:
    """What the recipe made."""

    train: Path
    val: Path
    model: Path


def cache_folder(recipe: RecipeConfig, seed: int) -> Path:
    """Where the assets of these parameters are kept."""
    root = recipe.cache_dir or os.environ.get("HYDRAFLOW_CACHE") or Path.home() / ".cache" / "hydraflow"
    facts = {name: value for name, value in asdict(recipe).items() if name != "cache_dir"} | {"seed": seed, "format": FORMAT}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return Path(root).expanduser() / f"arithmetic-{digest}"


def is_made(folder: Path) -> bool:
    """Whether `folder` holds everything; the model is written last and renamed."""
    return (folder / "model" / "config.json").is_file()


def prepare(
    recipe: RecipeConfig, seed: int, machine: Machine, runtime: Callable[[], Runtime], trackers: Callable[[], Trackers]
) -> ArithmeticAssets:
    """Makes what is missing; `runtime` and `trackers` are only called when there is something to train."""
    folder = cache_folder(recipe, seed)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock", timeout=900):
        if not is_made(folder):
            files = write_arithmetic(folder, train_problems=recipe.train_problems, val_problems=recipe.val_problems, seed=seed)
            start = make_model(folder / "start", seed=seed)
            _warm_up(recipe, seed, files, start, folder / "model", machine, runtime(), trackers())
    return ArithmeticAssets(folder / "train.parquet", folder / "val.parquet", folder / "model")


def _warm_up(
    recipe: RecipeConfig,
    seed: int,
    files: ArithmeticFiles,
    start: Path,
    target: Path,
    machine: Machine,
    runtime: Runtime,
    trackers: Trackers,
) -> None:
    held_out = files.sft.with_name("sft_val.parquet")
    write_rows(held_out, conversation_rows(split_problems(recipe.train_problems, recipe.val_problems, seed)[1]))
    config = _sft_config(recipe, seed, start, files.sft, held_out)
    tokenizer = load_tokenizer(config.model)
    train = ConversationDataset(config.data, config.data.train_files, tokenizer)
    val = ConversationDataset(config.data, config.data.val_files, tokenizer, key="data.val_files")
    plan = resolve_sft_plan(config, processes=machine.processes, conversations=len(train))
    loader = PromptLoader(train, plan.conversations_per_step, shuffle=True, seed=seed)
    trainer = SFTTrainer(config, plan, runtime)
    trainer.fit(
        loader.next_batch,
        [val.batch(range(len(val)))],
        trackers,
        Clock(),
        stop_when=lambda metrics: metrics["val/accuracy"] >= recipe.warm_start_accuracy,
    )
    trainer.save(target)
    trainer.close()


def _sft_config(recipe: RecipeConfig, seed: int, model: Path, train: Path, val: Path) -> SFTConfig:
    return SFTConfig(
        model=ModelConfig(path=str(model), enable_gradient_checkpointing=False),
        data=SFTDataConfig(train_files=str(train), val_files=str(val), train_batch_size=128, max_length=32),
        optim=OptimConfig(lr=2e-3),
        fsdp_config=FSDPConfig(dtype="fp32"),
        trainer=SFTTrainerConfig(total_training_steps=recipe.warm_start_steps, test_freq=10, seed=seed),
    )
