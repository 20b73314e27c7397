"""Conditions on a key and its neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compose.legal import valid

from hydraflow.compose.rules import problems


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"loss_mode": "vanila"}, "loss_mode"),
        ({"loss_mode": "clip_cov", "clip_cov_ub": float("nan")}, "clip_cov_ub"),
        ({"loss_mode": "tis", "tis_upper_bound": 0.0}, "tis_upper_bound"),
    ],
)
def test_a_mistake_is_reported_once(given: dict[str, Any], field: str) -> None:
    config = valid()
    for name, value in given.items():
        setattr(config.actor_rollout_ref.actor.policy_loss, name, value)
    assert [one.field for one in problems(config)] == [f"actor_rollout_ref.actor.policy_loss.{field}"]


def test_conditions_of_named_losses_do_not_bind_a_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(tokens, *, dro_beta=None, clip_cov_lb=1.0): ...\n")
    config = valid()
    chosen = config.actor_rollout_ref.actor.policy_loss
    chosen.loss_mode, chosen.clip_cov_lb = f"{tmp_path}/mine.py:loss", 9.0
    assert problems(config) == []


def test_remedies_name_both_keys() -> None:
    config = valid()
    chosen = config.actor_rollout_ref.actor.policy_loss
    chosen.loss_mode, chosen.clip_cov_ub = "clip_cov", 0.5
    [problem] = problems(config)
    assert problem.rule == "must be below clip_cov_ub=0.5: no token would be chosen"
    key = "actor_rollout_ref.actor.policy_loss.clip_cov"
    assert problem.remedy == f"a smaller {key}_lb or a larger {key}_ub"


def test_a_mistake_elsewhere_hides_no_condition() -> None:
    config = valid()
    actor = config.actor_rollout_ref.actor
    actor.ppo_epochs, actor.policy_loss.loss_mode = 0, "dro"
    config.trainer.nnodes, config.trainer.resume_mode = 0, "resume_path"
    key = "actor_rollout_ref.actor"
    found = {one.field for one in problems(config)}
    assert {f"{key}.policy_loss.dro_beta", "trainer.resume_from_path", f"{key}.ppo_epochs"} <= found
