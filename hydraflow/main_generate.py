"""python -m hydraflow.main_generate [overrides]: samples responses to a file of prompts.

In: a model directory and prompts. Out: the prompts' rows with a column `responses`, as Parquet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraflow.dispatch.environment import settle_command
from hydraflow.dispatch.forked_template import fork_template
from hydraflow.system.importing import importing
from hydraflow.system.interrupts import command

if TYPE_CHECKING:
    from hydraflow.compose.command import Command
    from hydraflow.schema import GenerateConfig


def run(config: GenerateConfig, command: Command) -> None:
    """Samples as configured. The import is here so that configuration errors are reported within a second."""
    settle_command()
    with importing():
        fork_template(config.ray_init, config.trainer)
        from hydraflow.jobs.generate import run_generate

    run_generate(config)


def main() -> int:
    """Composes the configuration and runs; returns the exit code."""
    from hydraflow.compose.judges import judge, missing
    from hydraflow.compose.launch import launch
    from hydraflow.compose.loading import EntryPoint
    from hydraflow.schema import GenerateConfig

    return launch(EntryPoint("generate", GenerateConfig, judges=(judge,), missing=missing), run)


if __name__ == "__main__":
    command(main)
