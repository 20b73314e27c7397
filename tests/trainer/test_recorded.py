"""Files of trajectories that are damaged, or something else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.compose.loading import load
from hydraflow.data.loader import PromptLoader
from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.stored import write_batch
from hydraflow.schema import PPOConfig
from hydraflow.trainer.config import DebugConfig
from hydraflow.trainer.recorded import ReplayedSource, dump_file, require_dumps
from hydraflow.trainer.source import checked, scores_of

FACTS = {"step": 1, "scores": ["score", "failed"], "why_failed": ""}


def write(
    folder: Path, step: int, facts: dict[str, object] = FACTS, group: Sequence[int] = (0, 0, 1, 1)
) -> Path:
    """Two trajectories for each of two prompts, or other groups."""
    rows = ragged.from_rows([torch.tensor([row]) for row in range(4)])
    columns = {
        "prompts": rows,
        "responses": rows,
        "response_mask": rows,
        "group": torch.tensor(group),
        "sample": torch.tensor([0, 1, 0, 1]),
        "score": torch.ones(4),
        "failed": torch.zeros(4, dtype=torch.bool),
        "lengths": torch.full((4,), 2, dtype=torch.int32),
        "rollout_log_probs": ragged.from_rows([torch.zeros(1)] * 4),
        "versions": torch.zeros(4, dtype=torch.int32),
        "replica": torch.zeros(4, dtype=torch.int32),
        "finish_reason": torch.zeros(4, dtype=torch.int8),
    }
    write_batch(dump_file(folder, step), DataProto.from_dict(columns), facts)
    return dump_file(folder, step)


def require(folder: Path) -> None:
    words = [
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
    ]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=1"]
    plan = resolve_plan(load("ppo", PPOConfig, words), prompts=600, devices_per_node=1)
    require_dumps(DebugConfig(load_rollouts=str(folder)), plan, first=1)
    # all steps are done, but not the end of the run
    require_dumps(DebugConfig(load_rollouts=str(folder)), plan, first=plan.total_steps + 1)


class Numbers:
    """Rows that hold their own number."""

    def __len__(self) -> int:
        return 4

    def batch(self, rows: np.ndarray) -> DataProto:
        return DataProto.from_dict({"number": torch.from_numpy(rows)})


def loader() -> PromptLoader:
    return PromptLoader(Numbers(), 2, shuffle=False, seed=0)


def test_whole_files_are_taken(tmp_path: Path) -> None:
    write(tmp_path, 1)
    require(tmp_path)
    taken = checked(ReplayedSource(tmp_path, loader()).take(1))
    assert (len(taken.rows), taken.replayed) == (4, True)
    assert {"score", "failed"} <= scores_of(taken, ["score", "failed"]).columns.keys()


def test_groups_of_a_file_may_have_any_size(tmp_path: Path) -> None:
    write(tmp_path, 1, group=[0, 2, 2, 2])
    require(tmp_path)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def weights(file: Path) -> None:
    """Another kind of safetensors file, such as a model's."""
    safetensors.numpy.save_file({"x": np.ones(2)}, file)


def other_batch(file: Path) -> None:
    write_batch(file, DataProto.from_dict({"x": torch.ones(2)}), {"step": 1})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "cannot be read as trajectories"),
        (weights, "cannot be read as trajectories"),
        (other_batch, "it has no prompts, group"),
    ],
)
def test_what_is_none_is_refused_before_the_start_and_named_in_a_run(
    tmp_path: Path, damage: object, said: str
) -> None:
    assert callable(damage)
    damage(write(tmp_path, 1))
    with pytest.raises(ConfigError, match=rf"step_1.safetensors .*{said}"):
        require(tmp_path)
    with pytest.raises(EnvironmentFault, match=rf"step_1.safetensors .*{said}"):
        ReplayedSource(tmp_path, loader()).take(1)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    dump_file(tmp_path, 1).mkdir()
    with pytest.raises(OSError, match="directory"):
        write(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1.safetensors"]
