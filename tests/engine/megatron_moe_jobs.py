"""What ranks do in the tests of mixtures of experts on Megatron-Core; in a file of its own so that spawned
processes can import it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine import rank_jobs
from engine.megatron_jobs import TEMPERATURE, make_engine, whole_gradients
from engine.ulysses_jobs import make_rows

from hydraflow.engine.megatron.engine import MegatronEngine
from hydraflow.engine.megatron.experts import Load, Router, take_load
from hydraflow.engine.megatron.names import Part
from hydraflow.engine.megatron.optimizer import SLOTS, WEIGHT
from hydraflow.errors import ConfigError
from hydraflow.models.ask import Ask
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

BALANCE = 2.0
"""Coefficient of a loss of the experts' load."""
Pieces = list[tuple[Part, torch.Tensor]]
"""Parts of Hugging Face tensors, and their values."""


def assembled(found: Sequence[Pieces]) -> dict[str, torch.Tensor]:
    """Whole tensors. What several ranks have must be the same on all, and every number must be on one."""
    whole: dict[str, torch.Tensor] = {}
    for part, value in (piece for of_rank in found for piece in of_rank):
        place = part.of(whole.setdefault(part.name, value.new_full(part.shape, torch.nan)))
        known = ~place.isnan()
        assert torch.equal(place[known], value[known]), f"copies of {part.name} differ"
        place.copy_(value)
    assert not [name for name, tensor in whole.items() if bool(tensor.isnan().any())]
    return whole


def pieces(engine: MegatronEngine, of: Any) -> Pieces:
    """This rank's parts of everything; `of` gives each parameter's values."""
    return [
        (part, value.detach().clone())
        for parameter, holding in engine._built.holdings(copies=True).values()
        for part, value in zip(holding.parts, holding.cut(of(parameter)), strict=True)
    ]


def gradients(engine: MegatronEngine) -> Pieces:
    """This rank's parts of the gradient."""
    return pieces(engine, whole_gradients(engine).__getitem__)


def numbers(path: str, options: Mapping[str, Any], micro_batches: int) -> dict[str, Any]:
    """What the engine says of this rank's rows, metrics of their loss, its gradient, and two steps."""
    engine = make_engine(path, options)
    parts = rank_jobs.my_share(make_rows("usual"), engine).chunk(micro_batches)
    ask = Ask(TEMPERATURE, entropy=options.get("head", "policy") == "policy")
    columns = dict(engine.forward(parts, ask).items())
    found: dict[str, Any] = {"said": {name: ragged.parts(column)[0] for name, column in columns.items()}}
    found["reported"] = engine.forward_backward(parts, rank_jobs.loss_of, ask)
    is_core = isinstance(engine, MegatronEngine)
    found["gradient"] = gradients(engine) if is_core else rank_jobs.gradients(engine)
    found["steps"] = [engine.optimizer_step()]
    engine.lr_step()
    engine.forward_backward(parts, rank_jobs.loss_of, ask)
    found["steps"].append(engine.optimizer_step())
    found["weights"] = rank_jobs.full_weights(engine)
    found["collect"] = engine.coordinates().is_collect
    return found


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


def rows_of(kind: str, untrained: int) -> DataProto:
    """The rows, of which one has no trained token."""
    found = make_rows(kind)
    mask, lengths = ragged.parts(found.get("response_mask"))
    rows = ragged.rows(ragged.from_parts(mask.clone(), lengths))
    rows[untrained].zero_()
    columns: dict[str, Any] = dict(found.items())
    return DataProto.from_dict({**columns, "response_mask": ragged.from_rows(rows)})


def balanced(
    path: str, options: Mapping[str, Any], kind: str, untrained: int, rows: int
) -> list[tuple[Pieces, dict[str, Any]]]:
    """The gradient and its metrics, without a loss of the experts' load and with one, and then once
    more: the loss of a call does not depend on what was before. rows: of a micro-batch."""
    found = []
    for coefficient in (0.0, BALANCE, BALANCE):
        settings = {**options["megatron"], "moe_aux_loss_coeff": coefficient}
        if coefficient == 0 or not found[1:]:
            engine = make_engine(path, {**options, "megatron": settings})
        parts = rank_jobs.my_share(rows_of(kind, untrained), engine).split(rows)
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


def save_hf(path: str, options: Mapping[str, Any], directory: str) -> None:
    make_engine(path, options).save_hf(directory)


def held(engine: Any) -> dict[str, Any]:
    """All weights and the optimizer's state (Megatron-Core's: this rank's parts)."""
    found: dict[str, Any] = {"weights": rank_jobs.full_weights(engine)}
    if not isinstance(engine, MegatronEngine):
        return found | {"moments": rank_jobs.moments(engine)}
    optimizer = engine._optimizer
    assert optimizer is not None
    for slot in (WEIGHT, *SLOTS):
        found[slot] = pieces(engine, lambda p, slot=slot: optimizer.whole(p, slot))
    return found


def write(path: str, options: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """Two steps and a checkpoint; what is in it."""
    engine = make_engine(path, options)
    for step in range(2):
        rank_jobs.step_once(engine, step)
    engine.snapshot(rank_jobs.CONTENTS).write(Path(directory))
    found = held(engine)
    rank_jobs.step_once(engine, 2)
    return found | {"next": rank_jobs.full_weights(engine)}


def read(path: str, options: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """What an engine holds after reading, and after another step."""
    engine = make_engine(path, options)
    engine.load(directory, rank_jobs.CONTENTS)
    found = held(engine)
    rank_jobs.step_once(engine, 2)
    return found | {"next": rank_jobs.full_weights(engine)}


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


def refusal(path: str, options: Mapping[str, Any]) -> str:
    """What a rank raises that cannot have this model."""
    try:
        make_engine(path, options)
    except ConfigError as error:
        return str(error)
    return ""
