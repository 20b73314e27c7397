"""Times GAE for 1,024 responses of 2,048 tokens, against the loop over time of its definition.

    python scripts/bench/advantages.py [--rows 1024] [--tokens 2048] [--repeats 5]

Uses one thread. Prints one JSON object for responses with all tokens trained, and one for responses with a
tenth of the tokens untrained (observations): milliseconds of both, and the largest difference of their
results, relative to the largest result. Fails if that is over `MOST_OFF`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hydraflow.algorithms.gae import gae

GAMMA, LAM = 0.99, 0.95
MOST_OFF = 1e-6


def by_loop(rewards: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Advantages (B, T) of padded rows, token by token from the last, skipping untrained ones."""
    found, after, ahead = torch.zeros_like(rewards), torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        trained = mask[:, t]
        delta = rewards[:, t] + GAMMA * ahead - values[:, t]
        after = torch.where(trained, delta + GAMMA * LAM * after, after)
        ahead = torch.where(trained, values[:, t], ahead)
        found[:, t] = after * trained
    return found


def milliseconds(function: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Milliseconds of the fastest of `repeats` calls, and the result."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = function()
        taken.append(1000 * (time.perf_counter() - start))
    return min(taken), found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rewards, values = torch.randn(2, args.rows, args.tokens)
    lengths = torch.full((args.rows,), args.tokens)
    for holes in (0.0, 0.1):
        mask = torch.rand(args.rows, args.tokens) >= holes
        flat = (rewards.flatten(), mask.flatten().long(), lengths)
        knobs: dict[str, Any] = {"gamma": GAMMA, "lam": LAM, "values": values.flatten()}
        ours, (found, _) = milliseconds(partial(gae, *flat, **knobs), args.repeats)
        theirs, wanted = milliseconds(partial(by_loop, rewards, mask, values), 1)
        off = float((found - wanted.flatten()).abs().max() / wanted.abs().max())
        if not off <= MOST_OFF:  # a NaN fails, too
            raise SystemExit(f"GAE differs from the loop by {off:.2g} of the largest advantage")
        print(json.dumps({**vars(args), "holes": holes, "ms": ours, "loop_ms": theirs, "off": off}))


if __name__ == "__main__":
    main()
