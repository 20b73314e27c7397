"""Seconds per training step of the default recipe in steady state, by phase, and the time from launch to the
first step.

    python scripts/bench/grpo_step.py [--steps 40] [overrides ...]

Prints one JSON object. `ray_share` is the fraction of a step in which no worker of the phase was running:
dispatch, transport, waiting for the slower rank.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from steady import default_assets, hydraflow_steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    args, overrides = parser.parse_known_args()
    default_assets(*overrides)
    print(json.dumps(asdict(hydraflow_steps(args.steps, *overrides)), indent=2))


if __name__ == "__main__":
    main()
