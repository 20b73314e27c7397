"""The law of losses: for fixed rows neither the loss, nor a gradient, nor a metric depends on how the rows
were split into micro-batches and ranks, in which order they came, or how far they were padded. In float64 to
1e-12.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from algorithms.losses_by_name import policy_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow import metrics
from hydraflow.algorithms.actor_loss import ActorLoss
from hydraflow.algorithms.aggregate import LOSS_AGG_MODES, Denominators
from hydraflow.algorithms.config import (
    POLICY_LOSSES,
    REJECTION_RULES,
    ROLLOUT_IS_LEVELS,
    PolicyLossConfig,
)
from hydraflow.algorithms.correction import Correction, Rejection, Weighting
from hydraflow.algorithms.critic_loss import ValueLoss
from hydraflow.algorithms.distillation.config import DIVERGENCES, DistillationLossConfig
from hydraflow.algorithms.distillation.terms import Distillation
from hydraflow.algorithms.kl import KL_ESTIMATORS
from hydraflow.algorithms.reinforce import reinforce
from hydraflow.algorithms.sft_loss import SFTLoss
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates
from hydraflow.workers.correcting import Corrector
from hydraflow.workers.token_selection import TokenSelector

B, R = 6, 5
SCALE = 16.0


@dataclass
class Output:
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    target_log_probs: torch.Tensor | None = None


Split = list[list[int]]
SPLITS: list[tuple[list[Split], int]] = [
    ([[[i] for i in range(B)]], 0),
    ([[[0, 1], [2, 3], [4, 5]]], 3),
    ([[[0], [1, 2, 3, 4], [5]]], 3),
    ([[[4, 1, 5, 0, 3, 2]]], 3),
    ([[[4, 1, 5], [0, 3, 2]]], 0),
    ([[[0, 3], [5]], [[1], [2, 4]]], 0),
    ([[[0, 3], [5]], [[1], [2, 4]]], 2),
]
"""Micro-batches of one rank or two, and their padding. The property test pads any split in any way."""


def make_rows(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Rows of unequal length with observations in the middle and one row without a trained token."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(B, R, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = torch.rand(B, R, generator=generator) < 0.7
    mask[0], mask[1] = False, True
    rows = {"response_mask": mask.to(torch.int64)}
    names = (
        "old_log_probs",
        "advantages",
        "ref_log_prob",
        "values",
        "returns",
        "x_log_probs",
        "x_entropy",
        "x_values",
        "rollout_log_probs",
        "teacher_log_probs",
    )
    return rows | {name: (draw() * mask).to(dtype) for name in names}


def with_targets(rows: dict[str, torch.Tensor], tokens: int = 3) -> dict[str, torch.Tensor]:
    """With log-probabilities of a teacher's likeliest tokens, (B, R, K)."""
    draw = torch.Generator().manual_seed(8)
    names = ("teacher_top_log_probs", "x_target_log_probs")
    every = torch.randn(len(names), B, R, tokens + 2, generator=draw, dtype=torch.float64).log_softmax(-1)
    return rows | {name: one[..., :tokens] for name, one in zip(names, every, strict=True)}


def padded(x: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, columns))


def evaluate(
    loss_of,
    rows,
    ranks: list[Split],
    padding: int = 0,
    correction: Correction | None = None,
    loss_mode: str = "vanilla",
):
    """The summed loss, the gradient of every output (B, R), and the merged metrics, with each rank's part
    computed apart. `correction`: one that needs the mini-batch. `loss_mode`: for the choice of tokens."""
    total, reports = 0.0, []
    if correction is not None:
        rows, reports = corrected(correction, rows, ranks)
    rows = with_choice(loss_mode, rows, ranks)
    # What the ranks do: count their own masks, add the counts up.
    counts = [Denominators.count(rows["response_mask"][sum(split, [])]) for split in ranks]
    loss_fn = loss_of(sum(counts[1:], counts[0]))
    outputs = [name.removeprefix("x_") for name in rows if name.startswith("x_")]
    leaves = {name: rows[f"x_{name}"].clone().requires_grad_() for name in outputs}
    for split in ranks:
        for number, part in enumerate(split):
            width = padding * (number + 1)  # micro-batches of different widths
            columns = {name: padded(column[part], width) for name, column in rows.items()}
            loss, report = loss_fn(
                Output(**{name: padded(leaf[part], width) for name, leaf in leaves.items()}), columns
            )
            loss.backward()
            total += loss.item()
            reports.append(report)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return total, gradients, metrics.values(metrics.merge(reports))


@dataclass
class RankEngine:
    """The part of a rank's engine that adds up numbers over data ranks; ranks are threads."""

    data_rank: int
    data_size: int
    noted: dict[int, torch.Tensor]
    barrier: threading.Barrier

    def coordinates(self) -> Coordinates:
        return Coordinates(self.data_rank, self.data_size, is_collect=True)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        self.noted[self.data_rank] = values
        self.barrier.wait(20)
        total = torch.stack([self.noted[rank] for rank in range(self.data_size)]).sum(0)
        self.barrier.wait(20)
        return total


def on_ranks(parts: list, work) -> list:
    """`work(part, engine)` of every rank, all at the same time."""
    noted: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(len(parts))
    engines = [RankEngine(rank, len(parts), noted, barrier) for rank in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(work, parts, engines))


def changed(rows, ranks: list[Split], change_of):
    """The rows as the ranks have them after a change of their mini-batch, and each rank's metrics.
    `change_of` takes a rank's engine."""
    lengths = [int(mask.nonzero().max()) + 1 if mask.any() else 2 for mask in rows["response_mask"]]
    whole = DataProto.from_dict(
        {
            name: ragged.from_rows([row[:length] for row, length in zip(column, lengths)])
            for name, column in rows.items()
        }
        | {"group": torch.arange(B) // 2, "sample": torch.arange(B) % 2}
    )
    orders = [order for split in ranks if (order := sum(split, []))]
    answers = on_ranks([whole.select_idxs(order) for order in orders], lambda part, e: change_of(e)(part))
    found, reports = dict(rows), []
    for order, (part, report) in zip(orders, answers):
        reports.append(report)
        for name in ("response_mask", "rollout_is_weights", "chosen_tokens"):
            if name in part.keys():
                column = ragged.to_padded(part.get(name), R)
                found[name] = found.get(name, torch.zeros(B, R, dtype=column.dtype)).clone()
                found[name][order] = column
    return found, reports


def current_log_probs(part: DataProto) -> torch.Tensor:
    return part.get("x_log_probs")


def corrected(correction: Correction, rows, ranks: list[Split]):
    return changed(rows, ranks, lambda engine: Corrector(correction, engine, current_log_probs))


def with_choice(loss_mode: str, rows, ranks: list[Split]):
    """As `changed` by the loss's choice of tokens, if it has one."""
    if POLICY_LOSSES[loss_mode].chooses is None:
        return rows
    keys = PolicyLossConfig(clip_cov_ratio=0.2, clip_cov_lb=0.05, clip_cov_ub=1.0, kl_cov_ratio=0.3)
    choice = POLICY_LOSSES[loss_mode].chooses.bound(keys)
    return changed(rows, ranks, lambda engine: TokenSelector(choice, engine, current_log_probs, (1, 7)))[0]


def assert_same(one, other, tolerance: float) -> None:
    assert one[0] == pytest.approx(other[0], abs=tolerance)
    assert one[1].keys() == other[1].keys() and one[1]
    for name, gradient in one[1].items():
        assert torch.allclose(gradient, other[1][name], rtol=0, atol=tolerance), name
    assert one[2] == pytest.approx(other[2], abs=tolerance, rel=tolerance)


def check_law(loss_of, rows, tolerance: float = 1e-12, **options) -> None:
    whole = evaluate(loss_of, rows, [[list(range(B))]], **options)
    assert all(gradient.abs().sum() > 0 for gradient in whole[1].values())
    for ranks, padding in SPLITS:
        assert_same(whole, evaluate(loss_of, rows, ranks, padding=padding, **options), tolerance)


def actor(loss_mode="vanilla", **options):
    return lambda denominators: ActorLoss(
        policy_loss=policy_loss(loss_mode), denominators=denominators, scale_factor=SCALE, **options
    )


@pytest.mark.parametrize("agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", POLICY_LOSSES)
def test_policy_losses_in_every_aggregation(loss_mode, agg_mode):
    check_law(actor(loss_mode=loss_mode, agg_mode=agg_mode), make_rows(seed=0), loss_mode=loss_mode)


@pytest.mark.parametrize("loss_mode", [name for name, loss in POLICY_LOSSES.items() if loss.chooses])
def test_every_choice_of_these_tests_leaves_some_tokens_unchosen(loss_mode):
    rows = make_rows(seed=0)
    after = with_choice(loss_mode, rows, [[list(range(B))]])
    assert 1 < after["chosen_tokens"].sum() < rows["response_mask"].sum() / 2


@pytest.mark.parametrize("agg_mode", LOSS_AGG_MODES)
def test_entropy_bonus(agg_mode):
    check_law(actor(agg_mode=agg_mode, entropy_coeff=0.1), make_rows(seed=1))


@pytest.mark.parametrize("kl_type", KL_ESTIMATORS)
@pytest.mark.parametrize("agg_mode", LOSS_AGG_MODES)
def test_kl_penalty(kl_type, agg_mode):
    check_law(actor(agg_mode=agg_mode, kl_coef=0.3, kl_type=kl_type), make_rows(seed=2))


@pytest.mark.parametrize("loss_mode", KL_ESTIMATORS)
@pytest.mark.parametrize("agg_mode", LOSS_AGG_MODES)
def test_distillation(loss_mode, agg_mode):
    distillation = Distillation(DistillationLossConfig(loss_mode=loss_mode, loss_max_clamp=2.0))
    check_law(actor(agg_mode=agg_mode, distillation=distillation), make_rows(seed=2))


@pytest.mark.parametrize("loss_mode", DIVERGENCES)
@pytest.mark.parametrize("agg_mode", LOSS_AGG_MODES)
def test_divergences_from_a_teacher(loss_mode, agg_mode):
    """With the rewards, and alone."""
    for use_task_rewards in (True, False):
        config = DistillationLossConfig(loss_mode=loss_mode, use_task_rewards=use_task_rewards)
        loss_of = actor(agg_mode=agg_mode, distillation=Distillation(config))
        rows = with_targets(make_rows(seed=2))
        whole = evaluate(loss_of, rows, [[list(range(B))]])
        assert ("log_probs" in whole[1]) == use_task_rewards == ("actor/pg_loss" in whole[2])
        check_law(loss_of, rows)


LIMITS = dict.fromkeys(REJECTION_RULES, 2.5) | {
    "seq_sum_k2": 4.0,
    "seq_sum_k3": 8.0,
    "seq_mean_k1": 1.2,
    "seq_mean_k2": 0.8,
}
"""Some of the rows' tokens are beyond them, and some are not."""
CORRECTIONS = {
    f"{level} {kind}": Correction(Weighting(level, 1.5, lower, normalized))
    for level in ROLLOUT_IS_LEVELS
    for kind, lower, normalized in [("TIS", None, False), ("IcePop", 0.4, False), ("normalized", None, True)]
} | {
    **{rule: Correction(rejections=(Rejection(rule, LIMITS[rule], 0.3),)) for rule in REJECTION_RULES},
    "everything": Correction(
        Weighting("sequence", 2.0, 0.2, normalized=True),
        (Rejection("token_k1", 2.5, 0.3), Rejection("seq_max_k2", 2.0)),
    ),
}


@pytest.mark.parametrize(
    ("name", "of_current_policy"),
    [
        (name, of_current_policy)
        for name, correction in CORRECTIONS.items()
        for of_current_policy in (False, True)
        if correction.weighting is not None or not of_current_policy
    ],
)
@pytest.mark.parametrize("agg_mode", LOSS_AGG_MODES)
def test_corrections(name, agg_mode, of_current_policy):
    correction = replace(CORRECTIONS[name], of_current_policy=of_current_policy)
    needs = correction if correction.needs_mini_batch else None
    loss_of = functools.partial(
        ActorLoss,
        policy_loss=reinforce if of_current_policy else policy_loss("vanilla"),
        agg_mode=agg_mode,
        scale_factor=SCALE,
        correction=correction,
        entropy_coeff=0.1,
    )
    check_law(lambda denominators: loss_of(denominators=denominators), make_rows(seed=6), correction=needs)


@pytest.mark.parametrize("rule", REJECTION_RULES)
def test_every_rejection_of_these_tests_leaves_some_tokens_out(rule):
    rows = make_rows(seed=6)
    after, _ = corrected(CORRECTIONS[rule], rows, [[list(range(B))]])
    assert 0 < after["response_mask"].sum() < rows["response_mask"].sum()


@pytest.mark.parametrize("agg_mode", LOSS_AGG_MODES)
def test_value_loss(agg_mode):
    check_law(
        lambda denominators: ValueLoss(denominators=denominators, scale_factor=SCALE, agg_mode=agg_mode),
        make_rows(seed=3),
    )


def test_sft_loss():
    check_law(SFTLoss, make_rows(seed=4))


def test_everything_together_in_float32():
    rows = make_rows(seed=5, dtype=torch.float32)
    check_law(actor(entropy_coeff=0.1, kl_coef=0.3, agg_mode="seq-mean-token-mean"), rows, tolerance=1e-5)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    order=st.permutations(range(B)),
    cuts=st.sets(st.integers(1, B - 1)),
    rank_cut=st.integers(0, B),
    padding=st.integers(0, 3),
    agg_mode=st.sampled_from(list(LOSS_AGG_MODES)),
    loss_mode=st.sampled_from(list(POLICY_LOSSES)),
    correction=st.sampled_from([None, *CORRECTIONS.values()]),
)
def test_any_split_of_any_rows(seed, order, cuts, rank_cut, padding, agg_mode, loss_mode, correction):
    rows = make_rows(seed)
    edges = [0, *sorted(cuts | {rank_cut} - {0, B}), B]
    parts = [(start, list(order[start:stop])) for start, stop in zip(edges, edges[1:])]
    ranks = [
        [part for start, part in parts if start < rank_cut],
        [part for start, part in parts if start >= rank_cut],
    ]
    needs = correction if correction is not None and correction.needs_mini_batch else None
    loss_of = actor(
        loss_mode=loss_mode, agg_mode=agg_mode, entropy_coeff=0.05, kl_coef=0.2, correction=correction
    )
    options = {"correction": needs, "loss_mode": loss_mode}
    whole = evaluate(loss_of, rows, [[list(range(B))]], **options)
    assert_same(whole, evaluate(loss_of, rows, ranks, padding=padding, **options), 1e-12)


def test_the_law_can_fail():
    """A mean over each micro-batch, as trainers often have it, breaks the law: the checks above would see
    it."""

    class MeanOfMicroBatch:
        def __init__(self, denominators):
            pass

        def __call__(self, output, columns):
            mask = columns["response_mask"].bool()
            return -output.log_probs[mask].sum() / mask.sum().clamp(min=1), {}

    with pytest.raises(AssertionError):
        check_law(MeanOfMicroBatch, make_rows(seed=6))
