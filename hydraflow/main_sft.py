"""python -m hydraflow.main_sft [overrides]: supervised training on conversations.

In: the configuration. Out: a run folder with the trained model. Errors are found before Ray starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraflow.dispatch.environment import settle_command
from hydraflow.dispatch.forked_template import fork_template
from hydraflow.system.importing import importing
from hydraflow.system.interrupts import command

if TYPE_CHECKING:
    from hydraflow.compose.command import Command
    from hydraflow.schema import SupervisedConfig


def run(config: SupervisedConfig, command: Command) -> None:
    """Trains as configured. The import is here so that configuration errors are reported within a second."""
    settle_command()
    with importing():
        fork_template(config.ray_init, config.trainer)
        from hydraflow.jobs.sft import run_sft

    run_sft(config, command=command)


def train(config_name: str, schema: type[SupervisedConfig]) -> int:
    """The main function of main_sft, main_dpo and main_rm; returns the exit code."""
    from hydraflow.compose.advice import advice
    from hydraflow.compose.judges import judge, missing
    from hydraflow.compose.launch import launch
    from hydraflow.compose.loading import EntryPoint

    return launch(EntryPoint(config_name, schema, judges=(judge,), missing=missing, advise=advice), run)


def main() -> int:
    """Trains on conversations; returns the exit code."""
    from hydraflow.schema import SFTConfig

    return train("sft", SFTConfig)


if __name__ == "__main__":
    command(main)
