"""Log-probabilities and entropies of a divided vocabulary against autograd through log_softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import megatron_jobs as jobs
from engine.pool import Ranks

from hydraflow.models.ask import Ask

HIDDEN, TOKENS = 5, 7
ASKS = [Ask(), Ask(0.7), Ask(0.7, entropy=True), Ask(1.3, greedy_match=True), Ask(0.7, sum_pi_squared=True)]
CHUNKS = (1, 3, 100)


def inputs(vocabulary: int, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the whole output matrix, targets: the first and the last token, and others."""
    draw = torch.Generator().manual_seed(vocabulary)
    hidden, weight = (
        torch.randn(rows, HIDDEN, generator=draw, dtype=torch.float64, requires_grad=True)
        for rows in (tokens, vocabulary)
    )
    targets = torch.randint(vocabulary, (tokens,), generator=draw)
    targets[:2] = torch.tensor([0, vocabulary - 1])[:tokens]
    return hidden, weight, targets


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ask: Ask) -> list[torch.Tensor]:
    """Outputs and the gradients of the loss in `jobs.head_loss`."""
    logits = hidden @ weight.t() / ask.temperature
    full = logits.log_softmax(-1)
    found = [full.gather(-1, targets[:, None])[:, 0]]
    if ask.entropy:
        found.append(-(full.exp() * full).sum(-1))
    if ask.greedy_match:
        found.append((logits.argmax(-1) == targets).double())
    if ask.sum_pi_squared:
        found.append(full.exp().square().sum(-1))
    return [*found, *torch.autograd.grad(jobs.head_loss(found, ask), (hidden, weight))]


def assert_same(got: list[Any], wanted: list[torch.Tensor]) -> None:
    for mine, value in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, value.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ask", ASKS, ids=["plain", "temperature", "entropy", "greedy", "pi_squared"])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("ranks", "vocabulary"), [(1, 11), (2, 12), (2, 11), (4, 11), (4, 9)])
def test_is_that_of_log_softmax(
    pools: dict[int, Ranks], ranks: int, vocabulary: int, chunk: int, ask: Ask
) -> None:
    """Also with shares that are not full; of nine tokens the last of four ranks has none."""
    given = inputs(vocabulary)
    detached = [tensor.detach() for tensor in given]
    found = pools[ranks].run(jobs.head, *detached, ask, chunk)
    wanted = plain(*given, ask)
    outputs = len(wanted) - 2
    for rank in found:
        assert_same(rank["outputs"], wanted[:outputs])
    assert_same([sum(rank["hidden"] for rank in found)], wanted[-2:-1])
    assert_same([torch.cat([rank["weight"] for rank in found])[:vocabulary]], wanted[-1:])
    assert not torch.cat([rank["weight"] for rank in found])[vocabulary:].any(), "rows that are no tokens"


def test_no_token(pools: dict[int, Ranks]) -> None:
    """A rank without trained tokens computes with the others, and adds nothing."""
    detached = [tensor.detach() for tensor in inputs(11, tokens=0)]
    for rank in pools[2].run(jobs.head, *detached, Ask(0.7, entropy=True), 3):
        assert [len(output) for output in rank["outputs"]] == [0, 0]
        assert rank["hidden"].shape == (0, HIDDEN) and not rank["weight"].any()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_of_equally_probable_tokens_the_first_is_the_best(pools: dict[int, Ranks], ranks: int) -> None:
    """Tokens 2, 5, 6 and 9 have the same logit, on one, on two and on three of the ranks."""
    hidden = torch.ones(4, HIDDEN, dtype=torch.float64)
    weight = torch.zeros(11, HIDDEN, dtype=torch.float64)
    weight[[2, 5, 6, 9]] = 1.0
    targets = torch.tensor([2, 5, 6, 9])
    for rank in pools[ranks].run(jobs.head, hidden, weight, targets, Ask(greedy_match=True), 3):
        assert rank["outputs"][1].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_logits_that_would_overflow(pools: dict[int, Ranks]) -> None:
    hidden, weight, targets = inputs(11)
    wanted = plain(hidden, weight * 1000, targets, Ask(entropy=True))
    detached = [tensor.detach() for tensor in (hidden, weight * 1000, targets)]
    for rank in pools[2].run(jobs.head, *detached, Ask(entropy=True), 3):
        torch.testing.assert_close(rank["outputs"], [value.detach() for value in wanted[:2]])
        assert bool(rank["weight"].isfinite().all()) and bool(rank["hidden"].isfinite().all())


@pytest.mark.parametrize("among", [11, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_likeliest_tokens_of_all_ranks(pools: dict[int, Ranks], ranks: int, among: int) -> None:
    """More than a rank has, and of the first rank's alone."""
    hidden, weight, targets = (tensor.detach() for tensor in inputs(11))
    wanted = (hidden @ weight.t() / 0.7).log_softmax(-1)[:, :among].topk(4)
    ask = Ask(0.7, likeliest=4, among=among)
    for log_probs, ids in pools[ranks].run(jobs.likeliest, hidden, weight, targets, ask, 3):
        torch.testing.assert_close(log_probs, wanted.values, rtol=0, atol=1e-12)
        assert ids.tolist() == wanted.indices.tolist()
