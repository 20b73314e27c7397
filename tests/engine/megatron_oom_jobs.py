"""What ranks do in the tests of memory that runs out on Megatron-Core; in a file of its own so that spawned
processes can import it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from engine import rank_jobs
from engine.megatron_jobs import make_engine, whole_gradients
from engine.oom_jobs import ON_A_CPU, ROWS, Case, caught, tokens_of

from hydraflow.engine.megatron.engine import MegatronEngine
from hydraflow.models.ask import LOG_PROBS

PLACES = ("pack", "layer", "loss", "layer_backward")
"""Where memory may run out, in the order in which a pass gets there."""


@contextmanager
def trouble(engine: MegatronEngine, case: Case) -> Iterator[Any]:
    """Has memory run out once; a loss function that has it run out there."""
    passes, pack, armed = -1, engine._pack, dist.get_rank() in case.ranks

    def reached(place: str) -> None:
        nonlocal armed
        if armed and place == case.place and passes == case.at:
            armed = False
            raise torch.OutOfMemoryError("no memory") if dist.get_rank() else RuntimeError(ON_A_CPU)

    def noted(*args: Any, **options: Any) -> Any:
        nonlocal passes
        passes += 1
        found = pack(*args, **options)
        reached("pack")
        return found

    def watch(module: Any, args: Any, output: Any) -> None:
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: reached("layer_backward"))

    def loss_of(*args: Any) -> Any:
        reached("loss")
        return rank_jobs.loss_of(*args)

    layer = engine._trunk.decoder.layers[-1]
    hooks = [layer.register_forward_pre_hook(lambda *_: reached("layer")), layer.register_forward_hook(watch)]
    engine._pack = noted  # type: ignore[method-assign]
    yield loss_of
    engine._pack = pack  # type: ignore[method-assign]
    for hook in hooks:
        hook.remove()


def disturbed(path: str, options: Mapping[str, Any], cases: Sequence[Case]) -> list[str]:
    """For each case what is wrong: a call with two rows in a pass is interrupted, and the one with three in
    a pass that comes after it must be as if nothing had happened before. All cases with one engine."""
    gc.freeze()
    engine = make_engine(path, options)
    batch = rank_jobs.make_batch(rows=ROWS * engine.coordinates().data_size)
    share = rank_jobs.my_share(batch, engine)
    sizes = [tokens_of(part) for part in batch.split(2)]
    wanted, wrong = _update(engine, share), []
    for case in cases:
        with trouble(engine, case) as loss_of:
            found = caught(lambda loss_of=loss_of: engine.forward_backward(share.split(2), loss_of))
        if found != [(rank, 2, sizes[ROWS // 2 * rank + case.at]) for rank in case.ranks]:
            wrong.append(f"{case}: reported {found}")
        if any(bool(gradient.any()) for gradient in _gradients(engine)):
            wrong.append(f"{case}: a gradient is left")
        reported, gradients = _update(engine, share)
        if reported != wanted[0] or not all(map(torch.equal, gradients, wanted[1])):
            wrong.append(f"{case}: another gradient")
    return wrong


def disturbed_inference(path: str, options: Mapping[str, Any], cases: Sequence[Case]) -> list[str]:
    """The same in forward passes."""
    engine = make_engine(path, {**options, "optim": None})
    share = rank_jobs.my_share(rank_jobs.make_batch(rows=ROWS * engine.coordinates().data_size), engine)

    def said() -> torch.Tensor:
        return engine.forward(share.split(ROWS // 2)).get("log_probs").values().clone()

    wanted, wrong = said(), []
    for case in cases:
        with trouble(engine, case):
            found = caught(lambda: engine.forward(share.split(2), LOG_PROBS))
        if found is None or [(rank, rows) for rank, rows, _ in found] != [(rank, 2) for rank in case.ranks]:
            wrong.append(f"{case}: reported {found}")
        if not torch.equal(said(), wanted):
            wrong.append(f"{case}: other log-probabilities")
    return wrong


def interrupted_reduction(path: str, options: Mapping[str, Any]) -> str:
    """What ranks raise when memory runs out on rank 1 while gradients are reduced."""
    engine = make_engine(path, options)

    def reduce(*_: Any, **__: Any) -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("no memory")

    with patch("hydraflow.engine.megatron.engine.finalize_model_grads", reduce):
        try:
            engine.forward_backward([rank_jobs.make_batch()], rank_jobs.loss_of)
        except RuntimeError as error:
            return type(error).__name__
    return ""


def divided(path: str, options: Mapping[str, Any]) -> str:
    """What ranks of a divided model raise."""
    engine = make_engine(path, options)
    with trouble(engine, Case("pack", (0, 1), 0)) as loss_of:
        try:
            engine.forward_backward([rank_jobs.make_batch()], loss_of)
        except RuntimeError as error:
            return type(error).__name__
    return ""


def _update(engine: MegatronEngine, share: Any) -> tuple[Any, list[torch.Tensor]]:
    """Metrics and gradient, which is dropped."""
    reported = engine.forward_backward(share.split(ROWS // 2), rank_jobs.loss_of)
    found = _gradients(engine)
    engine._drop_gradient()
    return reported, found


def _gradients(engine: MegatronEngine) -> list[torch.Tensor]:
    return [gradient.clone() for gradient in whole_gradients(engine).values()]
