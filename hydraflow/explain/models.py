"""The shapes of a run's models, as far as they are known here: from a folder, the hub's cache, or overrides.

In: the configuration. Out: `Models`. A model that is not here is noted, not refused; a config.json that
cannot be used is a problem. Left out on purpose: downloads, and weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hydraflow.batch_plan.layout import ShapeNumbers
from hydraflow.batch_plan.roles import needs_critic
from hydraflow.memory.shape import ModelShape, read_shape, shape_of
from hydraflow.models.cache import cached_snapshot
from hydraflow.models.config import ModelSourceConfig
from hydraflow.models.tiny import config_values, vocabulary
from hydraflow.schema import PPOConfig
from hydraflow.system.paths import is_hub_name

SIZES = "hidden_size, num_hidden_layers, num_attention_heads, intermediate_size and vocab_size"
"""The sizes that the shape of a model requires."""


@dataclass(frozen=True)
class Models:
    """What is known about the models of a reinforcement-learning run."""

    policy: ModelShape | None
    """None: not known."""
    critic: ModelShape | None = None
    """None: there is no critic, it starts from the policy's model, or its shape is not known."""
    notes: tuple[str, ...] = ()
    """What could not be read."""


def find_models(config: PPOConfig) -> Models:
    """The shapes of policy and critic. Raises ConfigError for a config.json that is here and cannot be
    used."""
    if config.recipe.name != "none":
        return Models(shape_of(config_values(len(vocabulary())), field="recipe"))
    model = config.actor_rollout_ref.model
    policy = find_shape(model, field="actor_rollout_ref.model")
    notes = list(_unknown(model, "actor_rollout_ref.model", policy))
    if not needs_critic(config) or config.critic.model.path is None:
        return Models(policy, notes=tuple(notes))
    critic = find_shape(config.critic.model, field="critic.model")
    return Models(policy, critic, (*notes, *_unknown(config.critic.model, "critic.model", critic)))


def find_shape(model: ModelSourceConfig, *, field: str) -> ModelShape | None:
    """The shape of one model; None where neither this machine nor `override_config` knows it."""
    snapshot = cached_snapshot(model.path) if model.path and is_hub_name(model.path) else None
    return read_shape(replace(model, path=str(snapshot)) if snapshot else model, field=field)


def numbers(shape: ModelShape | None) -> ShapeNumbers | None:
    """The sizes that the plan's rules check; None: the shape is not known."""
    if shape is None:
        return None
    return ShapeNumbers(shape.layers, shape.heads, shape.kv_heads, shape.experts, shape.dense_at)


def _unknown(model: ModelSourceConfig, field: str, shape: ModelShape | None) -> Iterator[str]:
    if shape is None:
        named = f"{model.path} has no config.json on this machine" if model.path else "is not given"
        yield (
            f"{field}.path: {named}; memory is not estimated without it, or {field}.override_config with"
            f" {SIZES}"
        )
