"""Applies `+debug=true` and `trainer.debug.local=true` to a configuration: one process per role, and no
timeout that a breakpoint could trip.

In: the user's configuration. Out: the configuration that runs. Left out on purpose: rejecting contradictions
(`rules.py`), and the debugging itself (`dispatch/`, `trainer/`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from hydraflow.schema import GenerateConfig, JobConfig, PPOConfig

Config = TypeVar("Config", bound=JobConfig)

NO_DEADLINE = 30 * 86400.0
"""Seconds: effectively no timeout while a breakpoint waits."""


def applied(config: Config) -> Config:
    """The configuration that runs; unchanged unless debugging is on.

    >>> config = applied(PPOConfig(debug=True))
    >>> config.trainer.n_gpus_per_node, config.reward.num_workers, config.trainer.rpc_timeout
    (1, 0, 2592000.0)
    """
    if not (config.debug or config.trainer.debug.local):
        return config
    changed: Any = replace(config.trainer, n_gpus_per_node=config.trainer.n_gpus_per_node or 1)
    if config.debug:
        changed = replace(changed, rpc_timeout=NO_DEADLINE, start_timeout=NO_DEADLINE)
    parts: dict[str, Any] = {"trainer": changed}
    if isinstance(config, PPOConfig):
        parts["reward"] = replace(config.reward, num_workers=0)
    if config.debug and not isinstance(config, GenerateConfig):
        parts["log"] = replace(config.log, console=config.log.console or "info")
    return replace(config, **parts)
