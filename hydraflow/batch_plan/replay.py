"""Routing replay needs a model with routers.

In: the actor's section, and whether its engine can replay the routers of its model. Out: problems. The plan
asks where config.json is on this machine, a job before it starts, and the worker for models with their own
code. Left out on purpose: which engines report experts (`compose/rules.py`).
"""

from __future__ import annotations

from hydraflow.errors import Problem
from hydraflow.workers.config import ActorConfig


def replay_problems(actor: ActorConfig, *, has_routers: bool) -> list[Problem]:
    """One for routing replay with a model that has nothing to replay.

    >>> actor = ActorConfig()
    >>> actor.router_replay.mode = "R2"
    >>> print(*replay_problems(actor, has_routers=False))
    actor_rollout_ref.actor.router_replay.mode=R2: the model has no experts that can be replayed
          -> actor_rollout_ref.actor.router_replay.mode=disabled
    """
    key, mode = "actor_rollout_ref.actor.router_replay.mode", actor.router_replay.mode
    if has_routers or mode == "disabled":
        return []
    return [Problem(key, mode, "the model has no experts that can be replayed", f"{key}=disabled")]
