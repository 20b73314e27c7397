"""Corrections of whole mini-batches on the real engine: masks, denominators, weights and metrics by hand, and
a training step that is the same on one rank, on two ranks and in a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithms.correction_oracle import oracle_kept, oracle_weights
from engine.pool import Ranks
from workers import gradient_jobs as jobs
from workers import naive
from workers.test_gradient_law import MASKS, Plain, make_batch, make_columns

from hydraflow.algorithms.config import BYPASS_LOSSES
from hydraflow.algorithms.correction import Correction, Rejection, Weighting
from hydraflow.metrics import merge, values
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.correcting import Corrector
from hydraflow.workers.training import global_denominators

ALONE: Any = SimpleNamespace(reduce=lambda values, how="sum": values)


def rows_of(ratios: list[list[float]], masks: list[list[int]]) -> DataProto:
    """Rows whose tokens have these ratios of old to sampled probability; NaN where nothing is trained."""
    masks_, old = [torch.tensor(mask) for mask in masks], [torch.tensor(row).double().log() for row in ratios]
    old = [torch.where(mask.bool(), row, math.nan) for mask, row in zip(masks_, old)]
    columns = {
        "response_mask": masks_,
        "old_log_probs": old,
        "rollout_log_probs": [torch.zeros_like(row) for row in old],
    }
    return DataProto.from_dict({name: ragged.from_rows(column) for name, column in columns.items()})


def correct(correction: Correction, rows: DataProto) -> tuple[DataProto, dict[str, float]]:
    changed, metrics = Corrector(correction, ALONE, lambda rows: rows.get("old_log_probs"))(rows)
    return changed, values(metrics)


def listed(column: torch.Tensor) -> list[list[float]]:
    return [row.tolist() for row in ragged.rows(column)]


ROWS = rows_of([[4.0, 1.0, 1.0, 0.5], [3.0], [1.0, 1.0, 1.25]], [[1, 0, 1, 1], [1], [0, 1, 1]])
"""A hole in the first mask; the second row has one token."""


def test_a_rejected_token_reaches_no_denominator() -> None:
    correction = Correction(rejections=(Rejection("token_k1", 2.0, 0.5),))
    changed, metrics = correct(correction, ROWS)
    assert listed(changed.get("response_mask")) == [[0, 0, 1, 1], [0], [0, 1, 1]]
    [before], [after] = global_denominators(ALONE, [ROWS]), global_denominators(ALONE, [changed])
    assert (before.tokens, before.sequences) == (6, 3) and (after.tokens, after.sequences) == (4, 2)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 6)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_rs_token_k1_max"] == pytest.approx(math.log(2))
    assert metrics["rollout_corr/rollout_rs_token_k1_min"] == pytest.approx(-math.log(4))


def test_weights_look_at_the_whole_row_also_where_tokens_are_rejected() -> None:
    """The first row's product is 2, of which the rejected token has 4."""
    rejected = (Rejection("token_k1", 2.5, 0.4),)
    changed, _ = correct(Correction(Weighting("sequence", 10.0), rejected), ROWS)
    assert listed(changed.get("response_mask")) == [[0, 0, 1, 1], [0], [0, 1, 1]]
    found = listed(changed.get("rollout_is_weights"))
    assert found == [[pytest.approx(2.0)] * 4, [pytest.approx(3.0)], [pytest.approx(1.25)] * 3]


@pytest.mark.parametrize(
    ("level", "mean"), [("token", (2 + 1 + 0.5 + 2 + 1 + 1.25) / 6), ("sequence", (2 + 2 + 1.25) / 3)]
)
def test_normalized_weights_have_a_mean_of_1(level: str, mean: float) -> None:
    """Of tokens, or of sequences; after truncation at 2."""
    plain, _ = correct(Correction(Weighting(level, 2.0), (Rejection("token_k2", 9.0),)), ROWS)
    changed, metrics = correct(Correction(Weighting(level, 2.0, normalized=True)), ROWS)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(mean)
    one, other = (ragged.parts(rows.get("rollout_is_weights"))[0] for rows in (plain, changed))
    torch.testing.assert_close(other * mean, one)


def test_the_mean_weight_is_that_of_tokens_that_are_trained() -> None:
    """Without those that are rejected: 1, 1/2, 1 and 5/4 are left."""
    correction = Correction(Weighting("token", 2.0, normalized=True), (Rejection("token_k1", 2.1, 0.4),))
    _, metrics = correct(correction, ROWS)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(3.75 / 4)


@pytest.mark.parametrize(
    "correction",
    [
        Correction(Weighting("token", 2.0, 0.99, normalized=True)),
        Correction(Weighting("sequence", 2.0, normalized=True), (Rejection("seq_mean_k1", 2.0, 0.5),)),
    ],
)
def test_a_mini_batch_of_which_nothing_is_left(correction: Correction) -> None:
    changed, metrics = correct(correction, rows_of([[3.0, 4.0]], [[1, 1]]))
    found = ragged.parts(changed.get("rollout_is_weights"))[0]
    assert torch.isfinite(found).all() and metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0
    untrained, metrics = correct(correction, rows_of([[3.0], [4.0]], [[0], [0]]))
    assert metrics == {"rollout_corr/rollout_is_batch_norm_factor": 1.0}
    assert listed(untrained.get("response_mask")) == [[0], [0]]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_columns_in_single_precision_are_corrected_in_double(level: str) -> None:
    old, mask = torch.tensor([-0.1, -2.3, -0.7]), torch.ones(3, dtype=torch.int64)
    columns = {"response_mask": mask, "old_log_probs": old, "rollout_log_probs": 1.1 * old}
    rows = DataProto.from_dict({name: ragged.from_rows([column]) for name, column in columns.items()})
    gaps = [a - b for a, b in zip(old.tolist(), columns["rollout_log_probs"].tolist())]
    wanted = math.exp(math.fsum(gaps)) if level == "sequence" else math.fsum(map(math.exp, gaps)) / 3
    changed, metrics = correct(Correction(Weighting(level, 2.0, normalized=True)), rows)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(wanted, rel=1e-13)
    assert changed.get("rollout_is_weights").dtype == torch.float32


@pytest.mark.parametrize("rule", ["token_k1", "seq_sum_k1", "seq_mean_k1", "seq_max_k1"])
def test_responses_without_a_token(rule: str) -> None:
    """A data rank may have no others."""
    correction = Correction(Weighting("sequence", 2.0, normalized=True), (Rejection(rule, 2.0, 0.5),))
    changed, metrics = correct(correction, rows_of([[], []], [[], []]))
    assert listed(changed.get("response_mask")) == listed(changed.get("rollout_is_weights")) == [[], []]
    assert metrics == {"rollout_corr/rollout_is_batch_norm_factor": 1.0}


# --- a training step ---------------------------------------------------

REINFORCE = BYPASS_LOSSES["reinforce"]
STEPS = {
    "old policy": (
        Correction(Weighting("sequence", 2.0, normalized=True), (Rejection("token_k1", 1.8, 0.4),)),
        None,
    ),
    "whole sequences": (Correction(Weighting("token", 1.5, 0.5), (Rejection("seq_mean_k2", 0.12),)), None),
    "current policy": (
        Correction(Weighting("token", 2.0, normalized=True), (Rejection("seq_max_k3", 0.9),), True),
        REINFORCE,
    ),
    "current policy, as each pass finds it": (
        Correction(Weighting("sequence", 2.0), (), of_current_policy=True),
        REINFORCE,
    ),
}


@pytest.fixture(scope="module")
def model(tiny: str) -> Plain:
    """On columns that are close to what the model says."""
    said = Plain(tiny, "policy", make_batch({})).said()
    draw, trained = torch.Generator().manual_seed(5), torch.tensor([int(m) for m in "".join(MASKS)]).bool()
    noise = 0.5 * torch.randn(len(said), generator=draw, dtype=torch.float64)
    columns = make_columns(said, torch.zeros_like(said))
    columns["rollout_log_probs"] = torch.where(trained, columns["old_log_probs"] + noise, math.nan)
    return Plain(tiny, "policy", make_batch(columns))


def corrected_by_hand(
    rows: list[naive.Row], correction: Correction, *, reinforce: bool
) -> tuple[list[naive.Row], int]:
    """Rows as the plain loss takes them, and how many of them are rejected whole. Its terms grow with the
    advantage, so a weight can go there; and at a ratio of 1 the gradient of the clipped loss is
    reinforce's."""
    weighting, kept_rows, all_weights, gone = correction.weighting, [], [], 0
    assert weighting is not None
    for row in rows:
        said = [logp.item() for logp in row.said]
        ours = said if correction.of_current_policy else row.columns["old_log_probs"]
        gaps = [ours[t] - row.columns["rollout_log_probs"][t] for t in row.trained]
        weights = oracle_weights(gaps, weighting.level, weighting.upper, weighting.lower)
        kept = [True] * len(gaps)
        for rule in correction.rejections:
            kept = [a and b for a, b in zip(kept, oracle_kept(gaps, rule.rule, rule.upper, rule.lower))]
        columns = {name: list(column) for name, column in row.columns.items()}
        for t, weight, keep in zip(row.trained, weights, kept):
            columns["response_mask"][t] = int(keep)
            columns["advantages"][t] *= weight
            if reinforce:
                columns["old_log_probs"][t] = said[t]
        chosen = [weight for weight, keep in zip(weights, kept) if keep]
        all_weights += chosen if weighting.level == "token" else chosen[:1]
        gone += bool(gaps) and not any(kept)
        kept_rows.append(replace(row, columns=columns))
    if weighting.normalized:
        factor = math.fsum(all_weights) / len(all_weights)
        for row in kept_rows:
            row.columns["advantages"] = [a / factor for a in row.columns["advantages"]]
    return kept_rows, gone


def plain_weights(model: Plain, training: jobs.Training) -> tuple[dict[str, torch.Tensor], int]:
    """After two epochs of two mini-batches, and how many rows were rejected whole."""
    assert training.correction is not None
    fresh = Plain(model.path, "policy", model.batch)
    parameters, gone = list(fresh.parameters.values()), 0
    optimizer = torch.optim.AdamW(parameters, lr=training.lr, weight_decay=training.weight_decay)
    options = {"agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.02, "kl_coef": 0.3}
    for first in (0, 4, 0, 4):
        rows = fresh.read(range(first, first + 4))
        fresh.rows, lost = corrected_by_hand(rows, training.correction, reinforce=training.loss is not None)
        optimizer.zero_grad()
        fresh.loss(options).backward()
        optimizer.step()
        gone += lost
    return fresh.parameters, gone


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_is_the_plain_one_however_it_is_split(name: str, model: Plain, ranks: Ranks) -> None:
    correction, loss = STEPS[name]
    training = jobs.Training("policy", jobs.rows(1), correction=correction, loss=loss)
    wanted, gone = plain_weights(model, training)
    assert gone or not any(rule.rule.startswith("seq") for rule in correction.rejections)
    alone, weights = jobs.train(model.path, training, model.batch)
    by_tokens = jobs.train(model.path, replace(training, micro=jobs.tokens(24)), model.batch)
    both = ranks.run(jobs.train, model.path, replace(training, micro=jobs.rows(2)), model.batch)
    one, others = values(alone), (by_tokens[0], merge(metrics for metrics, _ in both))
    assert any(name.startswith("rollout_corr/rollout_is") for name in one)
    for other in others:
        assert values(other) == pytest.approx(one, rel=1e-9, abs=1e-11)
    for found in (weights, by_tokens[1], *(of_rank for _, of_rank in both)):
        for key, parameter in wanted.items():
            assert (found[key] - parameter.detach()).abs().max() < 1e-9, key


def test_no_step_is_taken_on_mini_batches_of_which_nothing_is_left(model: Plain, ranks: Ranks) -> None:
    """Weight decay alone would change the weights."""
    nothing = Correction(None, (Rejection("token_k1", 1.0 + 1e-12, 1.0 - 1e-12),))
    training = jobs.Training("policy", jobs.rows(1), correction=nothing)
    assert training.weight_decay > 0
    for _, weights in (
        jobs.train(model.path, training, model.batch),
        *ranks.run(jobs.train, model.path, training, model.batch),
    ):
        assert all(torch.equal(weights[name], initial) for name, initial in model.parameters.items())
