"""Times updates with and without `fsdp_config.use_torch_compile`, in turn, for a model of `held.py`.

    python scripts/bench/compiled.py [--model 31.7M] [--dtype bf16] [--steps 3] [--rounds 3]

Prints one JSON object: the fastest round of each. The first steps, which compile, are not counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from held import MODELS, write_model
from steady import default_assets
from vs_trl import JOBS, our_steps

from hydraflow.models.compiled import KEY


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="31.7M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    assets = default_assets()
    updates: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(args.model, Path(folder) / args.model)
        for _ in range(args.rounds):
            for value in (False, True):
                chosen = f"actor_rollout_ref.actor.{KEY}={value}"
                run = our_steps(JOBS[args.model], model, assets.train, args.dtype, args.steps, chosen)
                updates[value].append(run.phases["timing_s/update_actor"])
    found = {"plain_s": min(updates[False]), "compiled_s": min(updates[True])}
    print(json.dumps({"model": args.model, "dtype": args.dtype, **found, "rounds": updates}, indent=2))


if __name__ == "__main__":
    main()
