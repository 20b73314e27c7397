"""Trajectories per second of hydraflow and of TRL's GRPOTrainer: same model, prompts, samples and response
length, same cores.

    python scripts/bench/vs_trl.py [--steps 40] [--venv .bench/trl]

The two run one after the other. TRL gets a virtual environment of its own (made here the first time, some
minutes) and is measured with one process of two threads and of one thread; its better figure counts.
hydraflow runs its default: two processes of one thread. Prints one JSON object with both figures and their
ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from steady import default_assets, hydraflow_steps

TRL = "trl==1.16.0"
HERE = Path(__file__).parent
SETUP = HERE.parent / "setup_env.sh"
PROMPTS, SAMPLES, UPDATES, MAX_TOKENS, LR = 64, 8, 2, 8, 1e-4


def trl_python(venv: Path) -> Path:
    """The interpreter of TRL's environment, made if need be; torch goes in first, as scripts/setup_env.sh
    chooses its build."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        # Standard output is for the figures alone.
        subprocess.run(
            ["bash", "-c", 'source "$0"; PYTHON="$1" install_torch', SETUP, python],
            check=True,
            stdout=sys.stderr,
        )
        subprocess.run(
            [python, "-m", "pip", "install", "-q", TRL, "pyarrow", "jinja2"], check=True, stdout=sys.stderr
        )
    return python


def trl_steps(python: Path, steps: int, threads: int) -> dict[str, float]:
    """Seconds per step of TRL on the default recipe's model and problems."""
    assets = default_assets()
    command = [
        python,
        HERE / "trl_side.py",
        "--model",
        assets.model,
        "--prompts",
        assets.train,
        "--steps",
        steps,
        "--lr",
        LR,
    ]
    command += [
        "--prompts-per-step",
        PROMPTS,
        "--samples",
        SAMPLES,
        "--updates",
        UPDATES,
        "--max-tokens",
        MAX_TOKENS,
    ]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [str(part) for part in command], env=env, check=True, capture_output=True, text=True, timeout=1800
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Runs both sides and prints the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--venv", type=Path, default=Path(".bench/trl"))
    args = parser.parse_args()
    ours = hydraflow_steps(
        args.steps,
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // UPDATES}",
        f"data.max_response_length={MAX_TOKENS}",
        f"actor_rollout_ref.actor.optim.lr={LR}",
    )
    python = trl_python(args.venv)
    theirs = {threads: trl_steps(python, args.steps, threads) for threads in (2, 1)}
    best = min(result["seconds_per_step"] for result in theirs.values())
    trajectories = PROMPTS * SAMPLES
    figures = {
        "trajectories_per_step": trajectories,
        "hydraflow_trajectories_per_s": round(trajectories / ours.median, 1),
        "trl_trajectories_per_s": round(trajectories / best, 1),
        "ratio": round(best / ours.median, 2),
        "trl": theirs,
        "hydraflow_phases_s": ours.phases,
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
