"""What ranks do in the tests of memory that runs out; in a file of its own so that spawned processes can
import it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import rank_jobs

from hydraflow.engine.base import LossFn, OutOfMemory
from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.models import attention
from hydraflow.models.fused_head import _Logits
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

ON_A_CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
    " allocate 8589934592 bytes."
)
PLACES = ("pack", "embed", "attention", "layer", "head", "loss")
PLACES += ("head_backward", "layer_backward", "attention_backward", "embed_backward")
"""Where memory may run out, in the order in which a pass gets there. Attention is between the exchanges of
ranks that share rows."""

ROWS = 6
"""Of each rank."""


class Trouble:
    """Has memory run out on some ranks at a place of their passes: once, in pass number `at` (from 0), or in
    all that do not `fit`. error: what is raised instead."""

    def __init__(
        self,
        engine: FSDPEngine,
        place: str,
        ranks: Sequence[int],
        *,
        at: int | None = None,
        fit: Callable[[DataProto], bool] = lambda data: True,
        error: Exception | None = None,
    ):
        self.error = error
        self.at, self.fit, self.passes, self.fits = at, fit, -1, True
        self.place, self.mine = place, dist.get_rank() in ranks
        self._engine, self._pack = engine, engine._pack
        engine._pack = self._noted  # type: ignore[method-assign]
        hf = engine.module.hf
        parts = {"embed": hf.get_input_embeddings(), "layer": hf.base_model.layers[-1].mlp}
        self._hooks = []
        for name, part in parts.items():
            self._hooks.append(part.register_forward_pre_hook(lambda *_, name=name: self._reached(name)))
            self._hooks.append(
                part.register_forward_hook(lambda *args, name=name: self._watch(args[-1], f"{name}_backward"))
            )
        self._patch = pytest.MonkeyPatch()
        for name, place in (("log_probs", "head"), ("gradient", "head_backward")):
            self._patch.setattr(_Logits, name, self._before(getattr(_Logits, name), place))
        self._patch.setattr(attention, "attend_rows", self._attention(attention.attend_rows))

    def leave(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._patch.undo()
        self._engine._pack = self._pack  # type: ignore[method-assign]

    def loss(self, loss_fn: LossFn) -> LossFn:
        def watched(output: Any, columns: Any) -> Any:
            self._reached("loss")
            return loss_fn(output, columns)

        return watched

    def _before(self, method: Callable[..., Any], place: str) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            self._reached(place)
            return method(*args)

        return watched

    def _attention(self, attend_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(*args: Any) -> torch.Tensor:
            self._reached("attention")
            out = attend_rows(*args)
            self._watch(out, "attention_backward")
            return out

        return watched

    def _noted(self, data: DataProto, *args: Any, **options: Any) -> Any:
        self.passes, self.fits = self.passes + 1, self.fit(data)
        self._reached("pack")
        return self._pack(data, *args, **options)

    def _watch(self, output: torch.Tensor, name: str) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._reached(name))

    def _reached(self, place: str) -> None:
        if not self.mine or place != self.place:
            return
        if self.passes == self.at or not self.fits:
            self.at = None
            if self.error is not None:
                raise self.error
            raise torch.OutOfMemoryError("no memory") if dist.get_rank() else RuntimeError(ON_A_CPU)


@dataclass(frozen=True)
class Case:
    """Memory runs out at a place of pass `at`, of three, on these ranks."""

    place: str
    ranks: tuple[int, ...]
    at: int


def cases_of_two_ranks(places: Sequence[str]) -> list[Case]:
    """Every place in the first and in the last pass, on one rank, the other, or both."""
    return [
        Case(place, ((0,), (1,), (0, 1))[(number + at) % 3], at)
        for number, place in enumerate(places)
        for at in (0, 2)
    ]


def cases_of_four_ranks() -> list[Case]:
    """Every place in the first or the last pass: on one rank, on two that share a copy or rows, on two that
    do not."""
    short = ((0,), (3,), (2, 3), (1, 2))
    return [Case(place, short[number % len(short)], 2 * (number % 2)) for number, place in enumerate(PLACES)]


def disturbed(path: str, options: Mapping[str, Any], cases: Sequence[Case]) -> list[str]:
    """For each case what is wrong: a call with two rows in a pass is interrupted, and the one with all rows
    in a pass that comes after it must be as if nothing had happened before. All cases with one engine."""
    # an out-of-memory error has garbage collected, which takes half a second for all that is imported
    gc.freeze()
    engine = rank_jobs.make_engine(path, options)
    batch = rank_jobs.make_batch(rows=ROWS * engine.coordinates().data_size)
    share = rank_jobs.my_share(batch, engine)
    sizes = [tokens_of(part) for part in batch.split(2)]
    sharers = dist.get_world_size() // engine.coordinates().data_size
    after = [share]
    wanted = engine.forward_backward(after, rank_jobs.loss_of), rank_jobs.gradients(engine)
    wrong = []
    for case in cases:
        engine.module.zero_grad()
        trouble = Trouble(engine, case.place, case.ranks, at=case.at)
        loss = trouble.loss(rank_jobs.loss_of)
        found = caught(lambda loss=loss: engine.forward_backward(share.split(2), loss))
        trouble.leave()
        if found != [(rank, 2, sizes[ROWS // 2 * (rank // sharers) + case.at]) for rank in case.ranks]:
            wrong.append(f"{case}: reported {found}")
        if rank_jobs.gradients(engine):
            wrong.append(f"{case}: a gradient is left")
        reported, gradient = engine.forward_backward(after, rank_jobs.loss_of), rank_jobs.gradients(engine)
        if reported != wanted[0] or not _equal(gradient, wanted[1]):
            wrong.append(f"{case}: another gradient")
    return wrong


def fails_at_call(number: int, loss_fn: LossFn) -> LossFn:
    calls = iter(range(1, number + 1))

    def counted(output: Any, columns: Any) -> Any:
        if next(calls) == number:
            raise ValueError("after memory ran out")
        return loss_fn(output, columns)

    return counted


def after_errors(path: str, options: Mapping[str, Any], places: Sequence[str]) -> list[str]:
    """What is wrong with an update by two calls, if every rank fails in other calls before, between and after
    them, in the second pass or in the last one."""
    parts = rank_jobs.my_share(rank_jobs.make_batch()).split(1)
    everyone, last, wrong = range(dist.get_world_size()), len(parts) - 1, []

    def fail(engine: FSDPEngine) -> None:
        before = rank_jobs.gradients(engine)
        for number, place in enumerate(places):
            trouble = Trouble(engine, place, everyone, at=(1, last)[number % 2], error=ValueError(place))
            with pytest.raises(ValueError, match=place):
                engine.forward_backward(parts, trouble.loss(rank_jobs.loss_of))
            trouble.leave()
            if not _equal(rank_jobs.gradients(engine), before):
                wrong.append(f"{place}: another gradient")
        trouble = Trouble(engine, "layer", everyone, at=1, error=ValueError("forward"))
        with pytest.raises(ValueError, match="forward"):
            engine.forward(parts)
        trouble.leave()
        trouble = Trouble(engine, "layer_backward", everyone, at=1)
        with pytest.raises(ValueError, match="after memory ran out"):
            engine.forward_backward(parts, fails_at_call(3, rank_jobs.loss_of))
        trouble.leave()

    def update(fail: Callable[[FSDPEngine], None]) -> tuple[dict[str, torch.Tensor], Any, torch.Tensor]:
        engine = rank_jobs.make_engine(path, options)
        fail(engine)
        for some in (parts[:2], parts[2:]):
            engine.forward_backward(some, rank_jobs.loss_of)
            fail(engine)
        gradient, reported = rank_jobs.gradients(engine), engine.optimizer_step()
        return gradient, reported, ragged.parts(engine.forward(parts).get("log_probs"))[0]

    (gradient, *others), (wanted, *undisturbed) = update(fail), update(lambda engine: None)
    if not _equal(gradient, wanted):
        wrong.append("another gradient in the end")
    if others[0] != undisturbed[0] or not torch.equal(others[1], undisturbed[1]):
        wrong.append("another update")
    return wrong


def gradient_after_out_of_memory(
    path: str, options: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The gradient of all rows in one pass, and that of four passes, of which one was interrupted before."""
    engine = rank_jobs.make_engine(path, options)
    share = rank_jobs.my_share(rank_jobs.make_batch(), engine)
    engine.forward_backward([share], rank_jobs.loss_of)
    whole = rank_jobs.gradients(engine)
    engine.module.zero_grad()
    Trouble(engine, "layer_backward", [0], at=1)
    caught(lambda: engine.forward_backward(share.split(2), rank_jobs.loss_of))
    engine.forward_backward(share.split(1), rank_jobs.loss_of)
    return whole, rank_jobs.gradients(engine)


def disturbed_inference(path: str, cases: Sequence[Case]) -> list[str]:
    """The same in forward passes; an interrupted call has two."""
    gc.freeze()
    engine = rank_jobs.make_engine(path, {"fsdp": {"model_dtype": "fp64", "dtype": "fp64"}})
    share = rank_jobs.my_share(rank_jobs.make_batch(), engine)
    wanted = engine.forward([share]).get("log_probs").values().clone()
    wrong = []
    for case in cases:
        trouble = Trouble(engine, case.place, case.ranks, at=case.at)
        found = caught(lambda: engine.forward(share.split(2)))
        trouble.leave()
        if found is None or [(rank, rows) for rank, rows, _ in found] != [(rank, 2) for rank in case.ranks]:
            wrong.append(f"{case}: reported {found}")
        if not torch.equal(engine.forward([share]).get("log_probs").values(), wanted):
            wrong.append(f"{case}: other log-probabilities")
    return wrong


def tokens_of(data: DataProto) -> int:
    return int(ragged.lengths(data.get("prompts")).sum() + ragged.lengths(data.get("responses")).sum())


def _equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], value) for name, value in wanted.items()
    )


def caught(call: Callable[[], Any]) -> list[tuple[int, int, int]] | None:
    """The micro-batches that a call reports: rank, rows, tokens."""
    try:
        call()
    except OutOfMemory as error:
        return [(report.rank, report.rows, report.tokens) for report in error.reports]
    return None
