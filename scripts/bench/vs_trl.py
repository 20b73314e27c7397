"""Compares trajectories per second of hydraflow and TRL's GRPOTrainer, with the same model, prompts, samples,
response length and cores.

    python scripts/bench/vs_trl.py [--model recipe|0.85M|31.7M|llama|...] [--dtype fp32|bf16] [--steps 40]
                                   [--tokens 32] [--prompts 16] [--ragged] [--venv .bench/trl]

The two run one after the other. TRL has its own virtual environment (created on first use, a few minutes) and
is measured as one process with two threads and with one; its better figure counts. hydraflow runs its
default, two processes with one thread each. Models other than the recipe's have random weights, and their
responses have `--tokens` tokens each; with `--ragged` they end at random, after about twice as many if there
were no limit, so about 40 % end before it. bf16 is the compute type; weights stay in fp32 in both. Prints one
JSON object with both figures, their ratio, and the seconds that the matrix products of sampling and training
would take at the machine's peak, which is measured before and after our steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from held import MODELS, write_model
from steady import Steady, default_assets, hydraflow_steps

from hydraflow.device import measured_flops, resolve_dtype, usable_cores
from hydraflow.models.config import ModelConfig
from hydraflow.workers.utilization import ModelWork

TRL = "trl==1.16.0"
HERE = Path(__file__).parent
SETUP = HERE.parent / "setup_env.sh"
LR = 1e-4
PROMPT_TOKENS = 6
"""Tokens of one of the recipe's problems."""


@dataclass(frozen=True)
class Job:
    """The work of one step, the same on both sides."""

    prompts: int
    samples: int
    updates: int
    tokens: int
    """Maximum response length; without `ends`, the length of every response."""
    ends: bool
    """Whether a response may end earlier."""
    warm_up: int
    """Steps that are not counted."""

    @property
    def trajectories(self) -> int:
        """Per step."""
        return self.prompts * self.samples


OF_SMALL = Job(16, 8, updates=1, tokens=32, ends=False, warm_up=3)
JOBS = dict.fromkeys(MODELS, OF_SMALL) | {
    "recipe": Job(64, 8, updates=2, tokens=8, ends=True, warm_up=5),
    "31.7M": replace(OF_SMALL, warm_up=1),
}


def trl_python(venv: Path) -> Path:
    """The interpreter of TRL's environment, which is created if it is missing, with the build of torch that
    scripts/setup_env.sh chooses."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        # stdout is for the figures only
        subprocess.run(
            ["bash", "-c", 'source "$0"; PYTHON="$1" install_torch', SETUP, python],
            check=True,
            stdout=sys.stderr,
        )
        subprocess.run(
            [python, "-m", "pip", "install", "-q", TRL, "pyarrow", "jinja2"], check=True, stdout=sys.stderr
        )
    return python


def trl_steps(
    python: Path, job: Job, model: Path, problems: Path, dtype: str, steps: int, threads: int
) -> dict[str, float]:
    """Seconds per step of TRL, whose first two steps are not counted."""
    options = {
        "model": model,
        "prompts": problems,
        "dtype": dtype,
        "steps": steps + 2,
        "lr": LR,
        "prompts-per-step": job.prompts,
        "samples": job.samples,
        "updates": job.updates,
        "max-tokens": job.tokens,
        "min-tokens": 0 if job.ends else job.tokens,
    }
    command = [str(python), str(HERE / "trl_side.py")]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"TRL's side failed: {done.stderr.strip()[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def our_steps(job: Job, model: Path | None, problems: Path, dtype: str, steps: int, *more: str) -> Steady:
    """Seconds per step of hydraflow. `model`: None for the recipe's. `more`: overrides."""
    overrides = {
        "data.train_batch_size": job.prompts,
        "actor_rollout_ref.rollout.n": job.samples,
        "actor_rollout_ref.actor.ppo_mini_batch_size": job.prompts // job.updates,
        "data.max_response_length": job.tokens,
        "actor_rollout_ref.actor.optim.lr": LR,
        "actor_rollout_ref.actor.fsdp_config.dtype": dtype,
        "actor_rollout_ref.rollout.dtype": dtype,
        "actor_rollout_ref.rollout.ignore_eos": not job.ends,
    }
    if model is not None:
        overrides |= {
            "actor_rollout_ref.model.path": model,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "data.train_files": problems,
            "data.val_files": problems,
            "data.val_max_samples": 8,  # a run always validates after its last step
            "data.max_prompt_length": 16,
            "algorithm.adv_estimator": "grpo",
        }
    return hydraflow_steps(
        steps, *(f"{key}={value}" for key, value in overrides.items()), *more, warm_up=job.warm_up
    )


def peaks(dtype: str) -> list[float]:
    """Fifteen measurements of the peak FLOP/s of all cores."""
    torch.set_num_threads(usable_cores())
    return [measured_flops(resolve_dtype(dtype, "cpu")) for _ in range(15)]


def response_lengths(job: Job, model: Path | None, problems: Path, dtype: str, steps: int) -> torch.Tensor:
    """(S, B) lengths of the responses in the steps that count. Where they may end early, from the texts of
    another run, which are the same: writing them takes time. A token is a character, and a response that ends
    early has an end token; the few padding tokens that a random model samples are not seen."""
    if not job.ends:
        return torch.full((1, job.trajectories), job.tokens)
    with tempfile.TemporaryDirectory() as folder:
        our_steps(job, model, problems, dtype, steps, f"trainer.rollout_data_dir={folder}")
        files = sorted(Path(folder).iterdir(), key=lambda file: int(file.stem))[job.warm_up :]
        texts = [[json.loads(line)["output"] for line in file.read_text().splitlines()] for file in files]
    return torch.tensor([[min(len(text) + 1, job.tokens) for text in of_step] for of_step in texts])


def least_seconds(lengths: torch.Tensor, model: Path, peak: float) -> tuple[float, float] | None:
    """Seconds of a step's sampling and of its update at the peak rate of all cores: a forward pass over each
    response and its prompt, and one update. None if the model's FLOPs are unknown. lengths: (S, B) of S
    steps."""
    work = ModelWork.of(ModelConfig(path=str(model)), "policy", "model")
    if work is None:
        return None
    rows = torch.full((lengths.numel(),), PROMPT_TOKENS), lengths.flatten()
    return work.forward(*rows) / len(lengths) / peak, work.update(*rows) / len(lengths) / peak


def compare(name: str, job: Job, dtype: str, steps: int, venv: Path) -> dict[str, object]:
    """Measures both sides; the JSON object to print."""
    assets = default_assets()
    with tempfile.TemporaryDirectory() as folder:
        end_every = 2 * job.tokens if job.ends else None
        held = None if name == "recipe" else write_model(name, Path(folder) / name, end_every=end_every)
        before = peaks(dtype)
        ours = our_steps(job, held, assets.train, dtype, steps)
        peak = statistics.median([*before, *peaks(dtype)])
        model, python = held or assets.model, trl_python(venv)
        theirs = {
            threads: trl_steps(python, job, model, assets.train, dtype, steps, threads) for threads in (2, 1)
        }
        lengths = response_lengths(job, held, assets.train, dtype, steps)
        least = least_seconds(lengths, model, peak)
    best = min(result["seconds_per_step"] for result in theirs.values())
    return {
        "model": name,
        "dtype": dtype,
        "tokens": job.tokens,
        "ragged": job.ends,
        "response_tokens": float(lengths.double().mean()),
        "trajectories_per_step": job.trajectories,
        "hydraflow_trajectories_per_s": round(job.trajectories / ours.median, 1),
        "trl_trajectories_per_s": round(job.trajectories / best, 1),
        "ratio": round(best / ours.median, 2),
        "peak_gflops": round(peak / 1e9),
        "least_seconds_per_step": None if least is None else sum(least),
        "least_seconds_per_update": None if least is None else least[1],
        "trl": theirs,
        "hydraflow_phases_s": ours.phases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=JOBS, default="recipe")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--tokens", type=int, help="maximum tokens per response")
    parser.add_argument("--prompts", type=int, help="prompts per step")
    parser.add_argument("--ragged", action="store_true", help="responses end at random")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--venv", type=Path, default=Path(".bench/trl"))
    args = parser.parse_args()
    job = JOBS[args.model]
    job = replace(
        job,
        tokens=args.tokens or job.tokens,
        prompts=args.prompts or job.prompts,
        ends=args.ragged or job.ends,
    )
    print(json.dumps(compare(args.model, job, args.dtype, args.steps, args.venv), indent=2))


if __name__ == "__main__":
    main()
