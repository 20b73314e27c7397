"""What ranks do in the tests of sequence parallelism; in a file of its own so that spawned processes can
import it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from engine import rank_jobs

from hydraflow.metrics import Metric
from hydraflow.models.ask import Ask
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

LENGTHS = {
    "usual": [(1 + 3 * i % 7, 1 + 5 * i % 9) for i in range(8)],
    "one token": [(1, 1)] * 4,
    "far apart": [(1, 1), (70, 3), (2, 50), (1, 2), (33, 1), (1, 41), (5, 5), (2, 1)],
    "samples": [(9, 1), (9, 12), (9, 5), (9, 7), (3, 3), (3, 2), (3, 9), (3, 1)],
}
"""Prompt and response tokens of each row; with "samples", four neighbours have the same prompt."""


def make_rows(kind: str) -> DataProto:
    """Rows of random tokens, most of them trained, with a weight for each."""
    draw = torch.Generator().manual_seed(5)
    lengths = LENGTHS[kind]
    prompts = [torch.randint(2, 17, (n,), generator=draw) for n, _ in lengths]
    if kind == "samples":
        prompts = [prompts[i - i % 4] for i in range(len(prompts))]
    sizes = torch.tensor([n for _, n in lengths])
    total = int(sizes.sum())
    columns = {
        "responses": torch.randint(2, 17, (total,), generator=draw),
        "response_mask": (torch.rand(total, generator=draw) > 0.2).long(),
        "advantages": torch.randn(total, generator=draw, dtype=torch.float64),
    }
    return DataProto.from_dict(
        {"prompts": ragged.from_rows(prompts)}
        | {name: ragged.from_parts(values, sizes) for name, values in columns.items()}
    )


def observed(
    engine: Any, kind: str, micro_batches: int, *, head: str
) -> tuple[dict[str, Any], Callable[[], dict[str, Metric]]]:
    """Log-probabilities, entropies and greedy matches (or values) of this rank's rows, metrics of their loss,
    the rank's place, and the sum and maximum over data ranks of the number of rows; and a function that adds
    the gradient of the loss, which has been called once."""
    share = rank_jobs.my_share(make_rows(kind), engine)
    parts = share.chunk(micro_batches)
    ask = Ask(0.8, entropy=head == "policy")
    columns = dict(engine.forward(parts, ask).items())
    if ask.entropy:
        columns["greedy_match"] = engine.forward([share], Ask(greedy_match=True)).get("greedy_match")
    learn = partial(engine.forward_backward, parts, rank_jobs.loss_of, ask)
    rows = torch.tensor([float(len(share))])
    found = {
        "said": {name: ragged.parts(column)[0] for name, column in columns.items()},
        "reported": learn(),
        "place": tuple(engine.coordinates()),
        "counted": [float(engine.reduce(rows, how)) for how in ("sum", "max")],
    }
    return found, learn


def numbers(path: str, options: Mapping[str, Any], kind: str, micro_batches: int) -> dict[str, Any]:
    """What `observed` finds, and the gradient."""
    engine = rank_jobs.make_engine(path, options)
    found, _ = observed(engine, kind, micro_batches, head=options.get("head", "policy"))
    return found | {"gradient": rank_jobs.gradients(engine)}


def kept_bytes(path: str, options: Mapping[str, Any], rows: int, prompt: int, response: int) -> int:
    """Bytes that autograd keeps on this rank for the backward pass over rows of this length, of different
    prompts, all in one pass; without weights, which must be kept gathered."""
    engine = rank_jobs.make_engine(path, options)
    lengths = torch.full((rows,), response)
    data = DataProto.from_dict(
        {"prompts": ragged.from_rows([torch.full((prompt,), 2 + row) for row in range(rows)])}
        | {
            name: ragged.from_parts(torch.ones(rows * response, dtype=torch.int64), lengths)
            for name in ("responses", "response_mask", "advantages")
        }
    )
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def loss_of(*args: Any) -> Any:
        weights = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
        found.append(sum(size for place, size in kept.items() if place not in weights))
        return rank_jobs.loss_of(*args)

    found: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.forward_backward([data], loss_of)
    return found[0]
