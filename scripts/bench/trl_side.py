"""The GRPO job of vs_trl.py in TRL's GRPOTrainer; runs in TRL's own virtual environment, called by vs_trl.py.

In: model directory, Parquet file of prompts, sizes. Out: one JSON line with seconds per step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import pyarrow.parquet
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Records the end of each optimizer step, and the rewards and lengths that were logged."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.rewards: list[float] = []
        self.lengths: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])
            self.lengths.append(logs["completions/mean_length"])


def exact_match(completions: list[Any], ground_truth: list[str], **kwargs: Any) -> list[float]:
    """1 if the text is the answer, else 0."""
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [float(text.strip() == truth) for text, truth in zip(texts, ground_truth, strict=True)]


def main() -> None:
    """Trains for a few steps and prints the seconds per step; the first two do not count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
    for name in ("steps", "prompts-per-step", "samples", "updates", "max-tokens", "min-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    args = parser.parse_args()
    rows = pyarrow.parquet.read_table(args.prompts).to_pylist()
    data = Dataset.from_list(
        [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]
    )
    trajectories = args.prompts_per_step * args.samples
    config = GRPOConfig(
        output_dir="/tmp/hydraflow-trl",
        use_cpu=True,
        bf16=args.dtype == "bf16",
        gradient_checkpointing=False,
        per_device_train_batch_size=trajectories // args.updates,
        steps_per_generation=args.updates,
        num_generations=args.samples,
        max_completion_length=args.max_tokens,
        generation_kwargs={"min_new_tokens": args.min_tokens},
        max_steps=args.steps * args.updates,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
    )
    clock = StepClock()
    trainer = GRPOTrainer(
        model=args.model, reward_funcs=exact_match, args=config, train_dataset=data, callbacks=[clock]
    )
    trainer.train()
    ends = clock.ends[args.updates - 1 :: args.updates]
    seconds = [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)][1:]
    found = {
        "seconds_per_step": statistics.median(seconds),
        "fastest": min(seconds),
        "reward": clock.rewards[-1],
        "response_tokens": statistics.mean(clock.lengths[2 * args.updates :]),
    }
    print(json.dumps(found | {"steps": len(seconds)}))


if __name__ == "__main__":
    main()
