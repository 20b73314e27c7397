"""python -m hydraflow.main_ppo [overrides]: reinforcement learning, PPO and its relatives.

In: the configuration. Out: a run folder. Everything that can be wrong is found before Ray starts.
"""

from __future__ import annotations

import sys

from hydraflow import compose
from hydraflow.schema import PPOConfig


def run(config: PPOConfig) -> None:
    """Trains as `config` says. The import is here so that configuration mistakes are answered in a second."""
    from hydraflow.jobs.ppo import PPOJob

    PPOJob(config, given=compose.given_keys()).run()


if __name__ == "__main__":
    sys.exit(compose.launch("ppo", PPOConfig, run))
