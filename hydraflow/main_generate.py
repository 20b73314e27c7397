"""python -m hydraflow.main_generate [overrides]: responses to a file of prompts.

In: a model directory and prompts. Out: the prompts' rows with a column `responses`, as Parquet.
"""

from __future__ import annotations

import sys

from hydraflow.compose.command import Command
from hydraflow.compose.judges import missing_for_generate
from hydraflow.compose.launch import launch
from hydraflow.node_folder import keep_modules_here
from hydraflow.schema import GenerateConfig


def run(config: GenerateConfig, command: Command) -> None:
    """Samples as `config` says. The import is here so that configuration mistakes are answered in a second."""
    keep_modules_here()
    from hydraflow.jobs.generate import run_generate

    run_generate(config)


if __name__ == "__main__":
    sys.exit(launch("generate", GenerateConfig, run, missing=missing_for_generate))
