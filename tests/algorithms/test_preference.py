"""Losses over pairs: the papers' formulas in plain Python, and the law that no split of whole pairs changes a
gradient or a metric. In float64 to 1e-12."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow import metrics
from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.config import BradleyTerryConfig, PreferenceConfig
from hydraflow.algorithms.preference import BradleyTerry, DirectPreference, Objective, PairLoss

PAIRS, R = 5, 4
OBJECTIVES: dict[str, Objective] = {
    "DPO": DirectPreference(PreferenceConfig(beta=0.3)),
    "cDPO": DirectPreference(PreferenceConfig(beta=0.3, label_smoothing=0.2)),
    "IPO": DirectPreference(PreferenceConfig(loss_type="ipo", beta=0.7)),
    "RM": BradleyTerry(BradleyTerryConfig(center_rewards_coefficient=0.05)),
}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def of_pair(name: str, chosen: float, rejected: float, margin: float) -> float:
    """The loss of a pair whose rows have these sums of (logp - ref), or these scores."""
    gap = chosen - rejected
    if name == "DPO":
        return -math.log(sigmoid(0.3 * gap))
    if name == "cDPO":
        return -0.8 * math.log(sigmoid(0.3 * gap)) - 0.2 * math.log(1 - sigmoid(0.3 * gap))
    if name == "IPO":
        return (gap - 1 / 1.4) ** 2
    return -math.log(sigmoid(gap - margin)) + 0.05 * (chosen + rejected) ** 2


def make_rows(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = (torch.rand(2 * PAIRS, R, generator=generator) < 0.6).long()
    mask[:, 0] = 1
    return {
        "response_mask": mask,
        "answer": draw(2 * PAIRS, R),
        "ref_log_prob": draw(2 * PAIRS, R),
        "margin": draw(PAIRS).repeat_interleave(2),
    }


def evaluate(objective: Objective, rows: dict[str, torch.Tensor], parts: list[list[int]], padding: int = 0):
    """Loss, gradient of every answer and metrics, with the parts, lists of pairs, computed apart."""
    answer = rows["answer"].clone().requires_grad_()
    loss_fn = PairLoss(Denominators.count(rows["response_mask"]), objective)
    total, reports = 0.0, []
    for pairs in parts:
        chosen = [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
        wide = lambda x: torch.nn.functional.pad(x, (0, padding)) if x.dim() == 2 else x  # noqa: E731
        columns = {name: wide(column[chosen]) for name, column in rows.items()}
        given = wide(answer[chosen])
        loss, report = loss_fn(SimpleNamespace(log_probs=given, values=given), columns)
        loss.backward()
        total += loss.item()
        reports.append(report)
    return total, answer.grad, metrics.values(metrics.merge(reports))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_are_the_papers(name: str) -> None:
    rows = make_rows(seed=0)
    answer, mask = rows["answer"], rows["response_mask"]
    if name != "RM":
        answer = answer - rows["ref_log_prob"]
    sums = [sum(a for a, m in zip(*both, strict=True) if m) for both in zip(answer.tolist(), mask.tolist())]
    expected = [
        of_pair(name, sums[2 * i], sums[2 * i + 1], float(rows["margin"][2 * i])) for i in range(PAIRS)
    ]
    loss, _, found = evaluate(OBJECTIVES[name], rows, [list(range(PAIRS))])
    assert loss == pytest.approx(sum(expected) / PAIRS, rel=1e-12)
    assert found["train/loss"] == pytest.approx(loss, rel=1e-12)
    right = [sums[2 * i] > sums[2 * i + 1] for i in range(PAIRS)]
    assert found["train/accuracy"] == pytest.approx(sum(right) / PAIRS)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000),
    order=st.permutations(range(PAIRS)),
    cuts=st.sets(st.integers(1, PAIRS - 1)),
    padding=st.integers(0, 2),
)
def test_no_split_of_whole_pairs_changes_anything(name: str, seed: int, order, cuts, padding) -> None:
    rows, edges = make_rows(seed), [0, *sorted(cuts), PAIRS]
    whole = evaluate(OBJECTIVES[name], rows, [list(range(PAIRS))])
    parts = [list(order[start:stop]) for start, stop in zip(edges, edges[1:])]
    split = evaluate(OBJECTIVES[name], rows, parts, padding)
    assert split[0] == pytest.approx(whole[0], abs=1e-12)
    assert torch.allclose(split[1], whole[1], rtol=0, atol=1e-12) and whole[1].abs().sum() > 0
    assert split[2] == pytest.approx(whole[2], abs=1e-12)


@pytest.mark.parametrize("name", ["DPO", "IPO", "cDPO"])
def test_shifting_both_rows_changes_nothing(name: str) -> None:
    """The loss sees a pair's difference alone."""
    rows = make_rows(seed=3)
    rows["response_mask"] = torch.ones_like(rows["response_mask"])
    moved = rows | {"answer": rows["answer"] + 0.25}
    losses = [evaluate(OBJECTIVES[name], one, [list(range(PAIRS))])[0] for one in (rows, moved)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
