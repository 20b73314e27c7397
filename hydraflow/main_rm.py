"""python -m hydraflow.main_rm [overrides]: a reward model from pairs of responses.

In: the configuration. Out: a run folder with the trained model. Errors are found before Ray starts.
"""

from __future__ import annotations

from hydraflow.main_sft import train
from hydraflow.system.interrupts import command


def main() -> int:
    """Composes the configuration and runs; returns the exit code."""
    from hydraflow.schema import RMConfig

    return train("rm", RMConfig)


if __name__ == "__main__":
    command(main)
