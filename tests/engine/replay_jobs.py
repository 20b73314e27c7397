"""What ranks do in the tests of routing replay, and what a model of transformers' says whose routers are
given which experts to take; in a file of its own so that spawned processes can import it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from engine import rank_jobs
from engine.megatron_jobs import TEMPERATURE, gradients, make_engine
from engine.megatron_models import learned
from engine.oom_jobs import Trouble, caught
from engine.ulysses_jobs import make_rows

from hydraflow.models.ask import Ask
from hydraflow.models.packing import read_tokens
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


def routed(rows: DataProto, layers: int, experts: int, chosen: int) -> DataProto:
    """The rows with experts drawn for every token, also for those of prompts that are the same."""
    sizes = read_tokens(rows)
    draw = torch.Generator().manual_seed(7)
    drawn = torch.rand(int(sizes.sum()), layers, experts, generator=draw).topk(chosen).indices
    return rows.with_columns({"routed_experts": ragged.from_parts(drawn.to(torch.uint8), sizes)})


def recorded(path: str, options: Mapping[str, Any], rows: DataProto, size: int) -> tuple[Any, ...] | None:
    """The experts of this rank's rows, in micro-batches of that size; None where answers are not
    collected."""
    engine = make_engine(path, options)
    answers = engine.forward(rank_jobs.my_share(rows, engine).split(size), Ask(TEMPERATURE, routes=True))
    return ragged.parts(answers.get("routed_experts")) if engine.coordinates().is_collect else None


def replayed(
    path: str, options: Mapping[str, Any], rows: DataProto, size: int, short: bool = False
) -> dict[str, Any]:
    """What the engine says of this rank's rows, metrics of their loss, and its gradient. short: memory runs
    out on rank 0 before, in larger micro-batches."""
    engine = make_engine(path, options)
    parts = rank_jobs.my_share(rows, engine).split(size)
    ask = Ask(TEMPERATURE, entropy=True)
    if short:
        trouble = Trouble(engine, "layer_backward", [0], at=1)
        assert caught(
            lambda: engine.forward_backward(
                rank_jobs.my_share(rows, engine).split(2 * size), trouble.loss(rank_jobs.loss_of), ask
            )
        )
        trouble.leave()
    said = {name: ragged.parts(column)[0] for name, column in engine.forward(parts, ask).items()}
    reported = engine.forward_backward(parts, rank_jobs.loss_of, ask)
    return {
        "said": said,
        "reported": reported,
        "gradient": gradients(engine),
        "collect": engine.coordinates().is_collect,
    }


def free_after_an_error(path: str, rows: DataProto) -> list[torch.Tensor]:
    """Log-probabilities without given experts: before calls that end in an error, and after each."""

    def broken(*args: Any, **options: Any) -> Any:
        raise ValueError("a test")

    engine = rank_jobs.make_engine(path)
    without = rows.select([name for name in rows.keys() if name != "routed_experts"])
    found = [engine.forward([without])]
    with pytest.raises(ValueError, match="a test"):
        engine.forward_backward([rows], broken)
    found.append(engine.forward([without]))
    with pytest.raises(ValueError, match="a test"), patch.object(engine, "_run", broken):
        engine.forward([rows])
    found.append(engine.forward([without]))
    return [ragged.parts(one.get("log_probs"))[0] for one in found]


def with_and_without(path: str, options: Mapping[str, Any], kind: str, size: int) -> list[dict[str, Any]]:
    """`replayed` without given experts, and with those that the same weights chose."""
    engine = make_engine(path, options)
    rows = rank_jobs.my_share(make_rows(kind), engine)
    ask, found = Ask(TEMPERATURE, entropy=True), []
    routes = engine.forward(rows.split(size), Ask(TEMPERATURE, routes=True)).get("routed_experts")
    for some in (rows, rows.with_columns({"routed_experts": routes})):
        parts = some.split(size)
        said = {name: ragged.parts(column)[0] for name, column in engine.forward(parts, ask).items()}
        reported = engine.forward_backward(parts, rank_jobs.loss_of, ask)
        found.append({"said": said, "reported": reported, "gradient": gradients(engine)})
        engine._drop_gradient()
    return found


def oracle(path: str | Path, rows: DataProto) -> dict[str, Any]:
    """What transformers' own layers say in float64, one row at a time, with experts as given; the gradient of
    the loss, and the share of tokens in training that would have taken others."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )
    gates = [layer.mlp.gate for layer in lm.model.layers if hasattr(layer.mlp, "gate")]
    reported: dict[int, torch.Tensor] = {}
    own: dict[int, torch.Tensor] = {}

    def gate(number: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        module = gates[number]
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), module.weight)
        probabilities = logits.softmax(-1)
        own[number] = probabilities.topk(module.top_k).indices
        weights = torch.stack([row[to] for row, to in zip(probabilities, reported[number], strict=True)])
        if lm.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, reported[number]

    for number, module in enumerate(gates):
        module.forward = lambda hidden, number=number: gate(number, hidden)
    said: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropys": []}
    changed, counted = 0, 0
    columns = [
        ragged.rows(rows.get(name)) for name in ("prompts", "responses", "routed_experts", "response_mask")
    ]
    for prompt, response, routes, mask in zip(*columns, strict=True):
        reported |= dict(enumerate(routes.long().unbind(1)))
        ids = torch.cat([prompt, response])[None, :-1]
        full = (lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :] / TEMPERATURE).log_softmax(-1)
        said["log_probs"].append(full.gather(-1, response[:, None])[:, 0])
        said["entropys"].append(-(full.exp() * full).sum(-1))
        asked = torch.cat([torch.zeros(len(prompt) - 1), mask]).bool()
        for number, chosen in own.items():
            differs = [
                set(a.tolist()) != set(b.tolist()) for a, b in zip(chosen, reported[number], strict=True)
            ]
            changed += int(torch.tensor(differs)[asked].sum())
            counted += int(asked.sum())
    return learned(rows, said, dict(lm.named_parameters())) | {"changed": changed / counted}


def own_choices(path: str | Path, rows: DataProto) -> torch.Tensor:
    """(all tokens that the model reads, L, K) experts that transformers' own routers choose in float64."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )
    seen: list[torch.Tensor] = []
    for layer in lm.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda module, given, output: seen.append(output[2]))
    found = []
    for prompt, response in zip(ragged.rows(rows.get("prompts")), ragged.rows(rows.get("responses"))):
        seen.clear()
        lm(input_ids=torch.cat([prompt, response])[None, :-1], use_cache=False)
        found.append(torch.stack(seen, 1))
    return torch.cat(found)


def of_all(found: Sequence[Any]) -> torch.Tensor:
    """What the collecting ranks have recorded, as the column's values."""
    return torch.cat([one[0] for one in found if one is not None])
