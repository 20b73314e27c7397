"""Configurations, rows and models that the check-up's tests look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import Finding, State
from hydraflow.checkup.table import CHECKS, run_checks
from hydraflow.schema import PPOConfig

SMALL = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 16,
    "data.max_response_length": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.rollout.n": 2,
    "algorithm.adv_estimator": "grpo",
    "trainer.n_gpus_per_node": 2,
    "trainer.device": "cpu",
}


def row(content: str = "1+1=", truth: str = "002", source: str = "arithmetic") -> dict[str, Any]:
    """A row as training and scoring need it."""
    return {
        "prompt": [{"role": "user", "content": content}],
        "data_source": source,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0},
    }


def parquet(path: Path, rows: list[dict[str, Any]], *, group: int | None = None) -> Path:
    """Writes rows, `group` in each row group."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def configured(model: str | Path | None = None, data: Path | None = None, **keys: Any) -> PPOConfig:
    """A small configuration with these values; `__` in a key stands for a dot."""
    config = PPOConfig()
    files = {"actor_rollout_ref.model.path": model and str(model), "data.train_files": data and str(data)}
    for key, value in {
        **SMALL,
        **files,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }.items():
        *sections, name = key.split(".")
        owner: Any = config
        for section in sections:
            owner = getattr(owner, section)
        assert hasattr(owner, name), key
        setattr(owner, name, value)
    return config


def findings(context: CheckContext, name: str) -> list[Finding]:
    """What one check of the table finds, as the doctor runs it."""
    [result] = run_checks(context, [check for check in CHECKS if check.name == name])
    return list(result.findings)


def states(found: list[Finding]) -> list[State]:
    return [finding.state for finding in found]
