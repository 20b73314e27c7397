"""An entry point that prints what it was given, for the tests of the command line.

Use: python tests/compose/dummy_entry.py NAME [arguments]. Where HYDRAFLOW_TEST_ERROR is set, `run` raises
that error.
"""

import os
import sys
from dataclasses import asdict
from json import dumps

from hydraflow import schema
from hydraflow.compose.command import Command
from hydraflow.compose.launch import launch
from hydraflow.compose.loading import EntryPoint
from hydraflow.errors import WorkerError

SCHEMAS = {
    "ppo": schema.PPOConfig,
    "sft": schema.SFTConfig,
    "generate": schema.GenerateConfig,
    "eval": schema.EvalConfig,
}


def run(config: object, command: Command) -> int:
    error = os.environ.get("HYDRAFLOW_TEST_ERROR")
    if error == "worker":
        raise WorkerError(role="actor", rank=1, node="here", method="update", cause="it broke")
    if error == "interrupt":
        raise KeyboardInterrupt
    if error == "ours":
        raise RuntimeError("a fault of our own")
    print(dumps({"config": asdict(config), "given": sorted(command.given)}))
    return int(error or 0)


if __name__ == "__main__":
    name = sys.argv.pop(1)
    sys.exit(launch(EntryPoint(name, SCHEMAS[name]), run))
