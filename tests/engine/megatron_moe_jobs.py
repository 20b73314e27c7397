"""What ranks do in the tests of mixtures of experts on Megatron-Core; in a file of its own so that spawned
processes can import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from engine import rank_jobs
from engine.megatron_jobs import TEMPERATURE, Pieces, gradients, make_engine, refusal
from engine.ulysses_jobs import make_rows

from hydraflow.engine.megatron.experts import Load, Router, take_load
from hydraflow.models.ask import Ask

BALANCE = 2.0
"""Coefficient of a loss of the experts' load."""


def reported_load(
    path: str, options: Mapping[str, Any], kind: str, rows: int
) -> tuple[dict[str, float], Load]:
    """What is reported to a rank about its experts, and the load when every token of every rank goes to the
    first of each layer. rows: of a micro-batch, the last of which may be smaller."""
    engine = make_engine(path, options)
    engine.forward([rank_jobs.my_share(make_rows(kind), engine)])  # does not count
    parts = rank_jobs.my_share(make_rows(kind), engine).split(rows)
    reported = engine.forward_backward(parts, rank_jobs.loss_of)
    chunks = engine._built.chunks
    for router in (one for chunk in chunks for one in chunk.modules() if isinstance(one, Router)):
        router.counts[0] = 1 + dist.get_rank()
    shares = {what: float(reported[f"actor/{what}_expert_share"].value) for what in ("busiest", "idle")}
    return shares, take_load(chunks)


def balanced(
    path: str, options: Mapping[str, Any], kind: str, untrained: slice, rows: int
) -> list[tuple[Pieces, dict[str, Any]]]:
    """The gradient and its metrics, without a loss of the experts' load and with one, and then once
    more: the loss of a call does not depend on what was before. rows: of a micro-batch."""
    data, found = rank_jobs.untrained(make_rows(kind), untrained), []
    for coefficient in (0.0, BALANCE, BALANCE):
        settings = {**options["megatron"], "moe_aux_loss_coeff": coefficient}
        if coefficient == 0 or not found[1:]:
            engine = make_engine(path, {**options, "megatron": settings})
        parts = rank_jobs.my_share(data, engine).split(rows)
        reported = engine.forward_backward(parts, rank_jobs.loss_of, Ask(TEMPERATURE, entropy=True))
        found.append((gradients(engine), reported))
        engine._drop_gradient()
    return found


def moved_biases(
    path: str, options: Mapping[str, Any], kind: str, rows: int
) -> list[dict[str, torch.Tensor]]:
    """Biases of routers by name: after a step that is skipped, and after one that is not."""
    engine = make_engine(path, options)
    parts = rank_jobs.my_share(make_rows(kind), engine).split(rows)

    def infinite(*args: Any) -> Any:
        loss, reported = rank_jobs.loss_of(*args)
        return loss * float("inf"), reported

    found = []
    for loss in (infinite, rank_jobs.loss_of):
        engine.forward_backward(parts, loss, Ask(TEMPERATURE))
        engine.optimizer_step()
        weights = rank_jobs.full_weights(engine)
        found.append({name: weights[name] for name in weights if name.endswith("correction_bias")})
    return found


def refusal_of_noise(path: str, options: Mapping[str, Any]) -> str:
    """What is reported to a rank about a router that draws random numbers."""
    plain = Router.gating

    def gating(self: Router, input: torch.Tensor) -> torch.Tensor:
        found = plain(self, input)
        return found + 0.01 * torch.randn_like(found)

    try:
        Router.gating = gating  # type: ignore[method-assign]
        return refusal(path, options)
    finally:
        Router.gating = plain  # type: ignore[method-assign]
