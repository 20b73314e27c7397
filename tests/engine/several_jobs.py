"""What ranks do in the tests of several passes before an optimizer step, and of asked tokens; in a file of
its own so that spawned processes can import it. Engines of either kind, as `megatron_jobs.make_engine` makes
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from engine import megatron_jobs, rank_jobs
from engine.megatron_models import SIZES

from hydraflow import metrics
from hydraflow.algorithms.distillation.config import DistillationLossConfig
from hydraflow.algorithms.distillation.terms import Distillation
from hydraflow.engine.base import OutOfMemory, StepOptions
from hydraflow.models.ask import Ask
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

K = 3
"""Tokens asked for at each position."""
VOCABULARY: int = SIZES["vocab_size"]
TEACHER = 0.4
"""The teacher's temperature where a model learns from itself."""


def updated(
    path: str,
    options: Mapping[str, Any],
    calls: int,
    steps: Sequence[StepOptions],
    disturbed: bool = False,
) -> dict[str, Any]:
    """Optimizer steps with these settings, the rows of each in that many calls; several calls have several
    passes each, and another one after each, in which the loss raises; disturbed: and one in which the last
    rank has no memory."""
    engine = megatron_jobs.make_engine(path, options)
    reported = []
    for number, settings in enumerate(steps):
        for part in rank_jobs.my_share(rank_jobs.make_batch(number), engine).chunk(calls):
            engine.forward_backward(part.split(1) if calls > 1 else [part], rank_jobs.loss_of)
            if calls > 1:
                try_in_vain(engine, part, ValueError("a test"))
            if disturbed:
                try_in_vain(engine, part, MemoryError("a test"), first=dist.get_world_size() - 1)
        reported.append(engine.optimizer_step(settings))
    return {"reported": reported, "weights": rank_jobs.full_weights(engine)}


def try_in_vain(engine: Any, rows: DataProto, error: Exception, first: int = 0) -> None:
    """A call whose loss raises that error, on ranks from `first`."""
    left = [error] if dist.get_rank() >= first else []

    def loss(*args: Any) -> Any:
        if left:
            raise left.pop()  # only once: without memory the rank then makes a pass over a few tokens
        return rank_jobs.loss_of(*args)

    try:
        engine.forward_backward([rows], loss)
    except (OutOfMemory, ValueError):
        return
    raise AssertionError("nobody failed")


def rows_with_targets(several: bool) -> DataProto:
    """Texts whose every position but the first is asked for; tokens to ask for may repeat."""
    batch, draw = rank_jobs.make_batch(), torch.Generator().manual_seed(3)
    texts = [
        torch.cat(pair)
        for pair in zip(ragged.rows(batch.get("prompts")), ragged.rows(batch.get("responses")))
    ]
    lengths = torch.tensor([len(text) - 1 for text in texts])
    shape = (int(lengths.sum()), K) if several else (int(lengths.sum()),)
    asked = torch.randint(17, shape, generator=draw)
    weights = torch.randn(shape, generator=draw)
    return DataProto.from_dict(
        {
            "prompts": ragged.from_rows([text[:1] for text in texts]),
            "responses": ragged.from_rows([text[1:] for text in texts]),
            "response_mask": ragged.from_parts(torch.ones(len(asked), dtype=torch.int64), lengths),
            "target_tokens": ragged.from_parts(asked, lengths),
            "returns": ragged.from_parts(weights, lengths),
        }
    )


def weighted(output: Any, columns: Mapping[str, torch.Tensor]) -> Any:
    """Each asked log-probability has a weight of its own."""
    return (output.log_probs * columns["returns"]).sum(), {"n": metrics.summed(1.0)}


def asked(path: str, options: Mapping[str, Any], several: bool) -> dict[str, Any]:
    """Log-probabilities of the asked tokens of this rank's rows, and the gradient of their weighted sum."""
    engine = megatron_jobs.make_engine(path, options)
    share = rank_jobs.my_share(rows_with_targets(several), engine)
    found = engine.forward(share.split(2)).get("log_probs")
    engine.forward_backward(share.split(2), weighted)
    return {
        "said": ragged.parts(found)[0],
        "place": tuple(engine.coordinates()),
        "gradient": megatron_jobs.gradients(engine),
    }


def refusals(path: str, options: Mapping[str, Any]) -> list[str]:
    """What an engine says to wrong requests."""
    engine, rows = megatron_jobs.make_engine(path, options), rank_jobs.make_batch()
    responses = ragged.rows(rows.get("responses"))
    wrong_targets = ([torch.cat([row, row]) for row in responses], [row + VOCABULARY for row in responses])
    given = [rows.with_columns({"target_tokens": ragged.from_rows(each)}) for each in wrong_targets]
    calls = [
        *(lambda one=one: engine.forward([one]) for one in given),
        lambda: engine.forward([]),
        lambda: engine.forward_backward([], rank_jobs.loss_of),
        lambda: engine.forward([rows], Ask(likeliest=VOCABULARY + 1, among=VOCABULARY + 1)),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def distilled(path: str, options: Mapping[str, Any], mode: str, most: int) -> dict[str, Any]:
    """The model learns from itself at another temperature, on all tokens of its likeliest or of all: the loss
    of this rank's rows, and the gradient."""
    engine = megatron_jobs.make_engine(path, options)
    share = rank_jobs.my_share(rank_jobs.make_batch(), engine)
    taught = engine.forward(share.split(2), Ask(TEACHER, likeliest=most, among=VOCABULARY))
    ids, lengths = ragged.parts(taught.get("top_tokens"))
    own = ragged.parts(share.get("responses"))[0]
    targets = ragged.from_parts(torch.cat([own[:, None], ids], 1), lengths)
    rows = share.with_columns({"target_tokens": targets, "teacher_top_log_probs": taught.get("log_probs")})
    distillation = Distillation(DistillationLossConfig(loss_mode=mode))

    def loss(output: Any, given: Mapping[str, torch.Tensor]) -> Any:
        """Summed, so that no rank needs the others' counts."""
        mask = given["response_mask"].bool()
        terms = distillation.divergences(output.log_probs[..., 1:], given["teacher_top_log_probs"])
        return terms[mask].sum(), {"loss": metrics.summed(float(terms[mask].sum()))}

    reported = engine.forward_backward(rows.split(2), loss)
    gradient = megatron_jobs.gradients(engine)
    loss_here = reported["loss"].value if reported else 0.0
    return {"loss": loss_here, "place": tuple(engine.coordinates()), "gradient": gradient}
