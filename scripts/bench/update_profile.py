#!/usr/bin/env python
"""Profiles an update: fractions of time in matrix products, attention, the head and the rest.

    python scripts/bench/update_profile.py [--model 0.85M|31.7M] [--dtype fp32|bf32|bf16] [--rows 128]
                                           [--tokens 32] [--operators 20]

One rank with one thread, which keeps freed memory as a worker does: a forward and a backward pass and an
optimizer step, over rows with 6 prompt tokens and `--tokens` trained tokens. Prints one JSON object: CPU
seconds of the fastest of three updates, and each kind's fraction of the fastest of three more, from torch's
profiler; with `--operators`, also that many of the slowest operators, each with its kind and fraction.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from held import MODELS, write_model
from torch.profiler import ProfilerActivity, profile

from hydraflow.device import keep_freed_memory
from hydraflow.engine.config import FSDPConfig, OptimConfig
from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.models.ask import Ask
from hydraflow.models.config import ModelConfig
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

PROMPT_TOKENS = 6
REPEATS = 3
KINDS: Mapping[str, str] = {
    "products": r"(add)?mm_?|linear|_linear_pointwise|mkldnn_linear\w*|_Product(Backward)?",
    "attention": r"\w*scaled_dot_product\w*|bmm|baddbmm_?|_softmax\w*|Attend\w*",
    "softmax of the head": r"_log_softmax|exp|scatter_add_?|FusedHead(Backward)?",
    "optimizer": r"_fused_adamw_|linalg_vector_norm",
    "copies": r"copy_|_to_copy|(_chunk_)?cat|index\w*|fill_|zero_|clone|embedding\w*",
}
"""Kind of work -> pattern of its operators' names."""


def kind_of(operator: str) -> str:
    """The kind of an operator; "other" for norms, rotary embeddings, activations and sums."""
    name = operator.rpartition("::")[2]
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), "other")


def make_rows(count: int, tokens: int) -> DataProto:
    """Rows of random tokens, no two with the same prompt."""
    draw = torch.Generator().manual_seed(0)

    def ids(length: int) -> torch.Tensor:
        return ragged.from_rows([torch.randint(2, 16, (length,), generator=draw) for _ in range(count)])

    mask = ragged.from_rows([torch.ones(tokens, dtype=torch.int64)] * count)
    return DataProto.from_dict(
        {"prompts": ids(PROMPT_TOKENS), "responses": ids(tokens), "response_mask": mask}
    )


def make_engine(model: str, dtype: str) -> FSDPEngine:
    """A single-rank training engine."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(model, Path(folder) / model)
        return FSDPEngine(
            ModelConfig(path=str(path), enable_gradient_checkpointing=False),
            FSDPConfig(dtype=dtype, model_dtype="fp32"),
            OptimConfig(lr=1e-6),
            head="policy",
            device=torch.device("cpu"),
        )


def loss(output: Any, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The negative mean log-probability."""
    mask = columns["response_mask"]
    return -(output.log_probs * mask).sum() / mask.sum(), {}


def update(engine: FSDPEngine, rows: DataProto) -> float:
    """Runs one update; returns its CPU seconds."""
    start = time.process_time()
    engine.forward_backward([rows], loss, Ask(entropy=True, entropy_is_trained=False))
    engine.optimizer_step()
    return time.process_time() - start


def operators_of(engine: FSDPEngine, rows: DataProto) -> dict[str, Any]:
    """Operator -> microseconds of one update, without those of the operators that it calls."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        update(engine, rows)
    return {event.key: event.self_cpu_time_total for event in profiled.key_averages()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*MODELS], default="31.7M")
    parser.add_argument("--dtype", choices=["fp32", "bf32", "bf16"], default="fp32")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--operators", type=int, default=0)
    args = parser.parse_args()
    keep_freed_memory("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine, rows = make_engine(args.model, args.dtype), make_rows(args.rows, args.tokens)
    update(engine, rows)
    seconds = min(update(engine, rows) for _ in range(REPEATS))
    of_operators = min(
        (operators_of(engine, rows) for _ in range(REPEATS)), key=lambda found: sum(found.values())
    )
    dist.destroy_process_group()
    total, of_kinds = sum(of_operators.values()), Counter[str]()
    for operator, taken in of_operators.items():
        of_kinds[kind_of(operator)] += taken / total
    shares = {kind: round(share, 4) for kind, share in of_kinds.most_common()}
    longest = Counter(of_operators).most_common(args.operators)
    facts = {name: value for name, value in vars(args).items() if name != "operators"}
    operators = {name: (kind_of(name), round(taken / total, 4)) for name, taken in longest}
    print(json.dumps({**facts, "cpu_s": seconds, "shares": shares, "operators": operators}))


if __name__ == "__main__":
    main()
