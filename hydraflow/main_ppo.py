"""python -m hydraflow.main_ppo [overrides]: reinforcement learning, PPO and its relatives.

In: the configuration. Out: a run folder. Errors are found before Ray starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraflow.dispatch.environment import settle_command
from hydraflow.dispatch.forked_template import fork_template
from hydraflow.system.importing import importing
from hydraflow.system.interrupts import command

if TYPE_CHECKING:
    from hydraflow.compose.command import Command
    from hydraflow.schema import PPOConfig


def run(config: PPOConfig, command: Command) -> None:
    """Trains as configured. The import is here so that configuration errors are reported within a second."""
    settle_command()
    with importing():
        fork_template(config.ray_init, config.trainer)
        from hydraflow.jobs.ppo import run_ppo

    run_ppo(config, command=command)


def main() -> int:
    """Composes the configuration and runs; returns the exit code."""
    from hydraflow.compose.advice import advice
    from hydraflow.compose.judges import judge, missing
    from hydraflow.compose.launch import launch
    from hydraflow.compose.loading import EntryPoint
    from hydraflow.schema import PPOConfig

    return launch(EntryPoint("ppo", PPOConfig, judges=(judge,), missing=missing, advise=advice), run)


if __name__ == "__main__":
    command(main)
