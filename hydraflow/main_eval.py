"""python -m hydraflow.main_eval [overrides]: scores a file of responses with a reward function.

In: Parquet with responses, as main_generate writes it. Out: averages by data source, printed and written as
JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraflow.system.interrupts import command

if TYPE_CHECKING:
    from hydraflow.compose.command import Command
    from hydraflow.schema import EvalConfig


def run(config: EvalConfig, command: Command) -> None:
    """Scores as configured. The import is here so that configuration errors are reported within a second."""
    from hydraflow.jobs.evaluate import run_eval

    run_eval(config)


def main() -> int:
    """Composes the configuration and runs; returns the exit code."""
    from hydraflow.compose.judges import missing
    from hydraflow.compose.launch import launch
    from hydraflow.compose.loading import EntryPoint
    from hydraflow.schema import EvalConfig

    return launch(EntryPoint("eval", EvalConfig, judges=(missing,)), run)


if __name__ == "__main__":
    command(main)
