#!/usr/bin/env python
"""Measures time and memory of a policy's head, forward and backward: the fused head, and the same computation
by calling the head as a module under gradient checkpointing.

    python scripts/bench/head.py --tokens 2048 --vocabulary 32768 --hidden 512 --dtype fp32 --entropy
    python scripts/bench/head.py --tokens 32768 --vocabulary 151936 --hidden 896 --repeats 1 --fused-only

Prints one JSON object per way: CPU seconds of the fastest repetition (the two ways take turns), the largest
growth of the process's memory, and the gradients of matrix and hidden states, which are part of it, in MiB.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hydraflow.device import resolve_dtype
from hydraflow.models import heads
from hydraflow.models.ask import Ask

Pass = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


class OnlyHead(nn.Module):
    """A language model without a backbone."""

    base_model_prefix = "model"

    def __init__(self, hidden: int, vocabulary: int, dtype: torch.dtype):
        super().__init__()
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
        self.base_model, self.config = None, SimpleNamespace(get_text_config=lambda: None)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "tokens": 2048,
        "vocabulary": 32768,
        "hidden": 512,
        "chunk": 2048,
        "repeats": 5,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--entropy", action="store_true", help="compute entropies, with their gradient")
    parser.add_argument("--fused-only", action="store_true")
    args = parser.parse_args()
    ways = passes(args)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, way in ways.items():
            took, held = measure(way)
            seconds[name].append(took)
            peaks[name].append(held)
    numbers = args.hidden * (args.vocabulary + args.tokens)
    gradients = numbers * resolve_dtype(args.dtype, "cpu").itemsize / 2**20
    for name in ways:
        result = {"way": name, **vars(args), "cpu_s": min(seconds[name]), "peak_mib": max(peaks[name])}
        print(json.dumps(result | {"gradients_mib": gradients}), flush=True)


def passes(args: argparse.Namespace) -> dict[str, Pass]:
    """Way -> forward pass; both with the same head and tokens."""
    torch.manual_seed(0)
    dtype = resolve_dtype(args.dtype, "cpu")
    hidden = torch.randn(args.tokens, args.hidden, dtype=dtype, requires_grad=True)
    targets = torch.randint(args.vocabulary, (args.tokens,))
    model = heads.PolicyModel(OnlyHead(args.hidden, args.vocabulary, dtype), chunk_tokens=args.chunk)
    ask = Ask(args.temperature, entropy=args.entropy)
    # there is no backbone to compute them
    heads.asked_hidden_states = lambda backbone, batch, dtype: hidden
    batch: Any = SimpleNamespace(targets=targets)
    ways: dict[str, Pass] = {"fused": partial(model, batch, ask)}
    if not args.fused_only:
        ways["module"] = partial(model._by_module, hidden, targets, ask, model.chunk_tokens)
    return ways


def measure(way: Pass) -> tuple[float, float]:
    """CPU seconds and MiB of one forward and backward pass."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current VmRSS
    before, start = status_mib("VmRSS"), time.process_time()
    loss = sum(column.sum() for column in way() if column is not None)
    loss.backward()  # type: ignore[union-attr]
    return time.process_time() - start, status_mib("VmHWM") - before


def status_mib(key: str) -> float:
    """MiB of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
