"""Checkpoints of Megatron-Core that roles start from: whether they hold the roles' models.

In: the configuration, and the policy's. Out: problems. Indices are read, and weights only where an output
matrix must be the same as the embeddings. Left out on purpose: a run's other files (`model_files.py`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hydraflow.batch_plan.weights import PATH, dist_checkpoints
from hydraflow.checkup.context import CRITIC, MODEL
from hydraflow.engine.megatron.architecture import Architecture
from hydraflow.engine.megatron.stored_weights import open_weights
from hydraflow.errors import Faults, Problem
from hydraflow.models.loading import load_config
from hydraflow.schema import PPOConfig
from hydraflow.trainer.roles import critic_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def dist_checkpoint_problems(config: PPOConfig, policy: PreTrainedConfig) -> list[Problem]:
    """Of all roles. Models that the engine does not build are reported elsewhere."""
    faults, own = Faults(), critic_model(config)
    for section, path in dist_checkpoints(config).items():
        is_critic = section == "critic"
        field, model = (CRITIC, own) if is_critic else (MODEL, config.actor_rollout_ref.model)
        described = Faults().result(partial(load_config, own, field=CRITIC)) if is_critic else policy
        shape = described and Faults().result(
            partial(Architecture.of, described, field=field, path=model.path)
        )
        if shape:
            where = {"key": f"{section}.{PATH}", "model": field, "model_path": str(model.path)}
            head = "value" if is_critic else "policy"
            faults.passes(partial(open_weights, path, shape, head=head, **where))
    return faults.problems
