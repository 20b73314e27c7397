"""python -m hydraflow.doctor [--json] [--all] [overrides]: checks that this machine has what a main_ppo
configuration needs.

In: the configuration of `main_ppo`. Out: state, evidence and remedy of each check; exit code 2 if one found a
problem. Starts nothing and leaves nothing behind. The checks are the table in `checkup/table.py`.
"""

from __future__ import annotations

import sys

from hydraflow.compose.advice import advice
from hydraflow.compose.arguments import CommandLineOption
from hydraflow.compose.command import Command
from hydraflow.compose.debugging import applied
from hydraflow.compose.launch import launch
from hydraflow.compose.loading import EntryPoint
from hydraflow.schema import PPOConfig
from hydraflow.system.printing import reader_may_leave

SWITCHES = (
    CommandLineOption("--json", doc="Print JSON for machines."),
    CommandLineOption("--all", doc="Also check what this configuration does not need: vLLM, SGLang."),
)


def run(config: PPOConfig, command: Command) -> int:
    """Runs every check. The imports are here so that configuration errors are reported within a second."""
    from rich.console import Console

    from hydraflow.checkup.context import CheckContext
    from hydraflow.checkup.report import as_json, exit_code, print_report
    from hydraflow.checkup.table import run_checks

    context = CheckContext(
        applied(config),
        origins=command.origins,
        notes=command.notes,
        unsupported=command.unsupported,
        everything="--all" in command.switches,
    )
    results = run_checks(context)
    with reader_may_leave():
        if "--json" not in command.switches:
            return print_report(results, Console())
        kept = list(results)
        print(as_json(kept))
        return exit_code(kept)
    return 0  # the reader left


if __name__ == "__main__":
    sys.exit(launch(EntryPoint("ppo", PPOConfig, SWITCHES, tolerant=True, advise=advice), run))
