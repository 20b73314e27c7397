"""python -m hydraflow.main_dpo [overrides]: direct preference optimization on pairs of responses.

In: the configuration. Out: a run folder with the trained model. Errors are found before
Ray starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraflow.dispatch.environment import settle_command
from hydraflow.dispatch.forked_template import fork_template
from hydraflow.system.importing import importing
from hydraflow.system.interrupts import command

if TYPE_CHECKING:
    from hydraflow.compose.command import Command
    from hydraflow.schema import DPOConfig


def run(config: DPOConfig, command: Command) -> None:
    """Trains as configured. The import is here so that configuration errors are reported within a second."""
    settle_command()
    with importing():
        fork_template(config.ray_init, config.trainer)
        from hydraflow.jobs.sft import run_sft

    run_sft(config, command=command)


def main() -> int:
    """Composes the configuration and runs; returns the exit code."""
    from hydraflow.compose.advice import advice
    from hydraflow.compose.judges import judge, missing
    from hydraflow.compose.launch import launch
    from hydraflow.compose.loading import EntryPoint
    from hydraflow.schema import DPOConfig

    return launch(EntryPoint("dpo", DPOConfig, judges=(judge,), missing=missing, advise=advice), run)


if __name__ == "__main__":
    command(main)
