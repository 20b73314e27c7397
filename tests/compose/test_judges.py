"""What the plan says to main_ppo: of the machines that a run uses, not of those that were only planned for."""

import pytest

from hydraflow.compose.judges import judge_ppo
from hydraflow.compose.loading import load_command
from hydraflow.errors import ConfigError
from hydraflow.schema import PPOConfig

MACHINES = ["cluster=h100", "cluster.nodes=64"]


def judged(*overrides):
    return load_command("ppo", PPOConfig, ["trainer.device=cpu", *overrides], judges=(judge_ppo,))[1]


def test_machines_that_are_planned_for_change_nothing():
    command = judged(*MACHINES)
    assert any(note.startswith("cluster.nodes=64: has no effect") for note in command.notes)
    with pytest.raises(ConfigError) as caught:
        judged(*MACHINES, "actor_rollout_ref.actor.ppo_mini_batch_size=48")
    (problem,) = caught.value.problems
    assert problem.rule == "must divide data.train_batch_size=64"
