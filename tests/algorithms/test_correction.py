"""Importance weights and rejection: against their definitions, written out with loops, and by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from algorithms.correction_oracle import oracle_kept, oracle_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.algorithms.actor_loss import ActorLoss
from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.config import POLICY_LOSSES, REJECTION_RULES, ROLLOUT_IS_LEVELS
from hydraflow.algorithms.correction import Correction, Rejection, Weighting
from hydraflow.algorithms.reinforce import reinforce
from hydraflow.workers.config import ActorConfig

OLD = torch.tensor([[0.5, 0.4, 0.0], [0.9, 0.0, 0.0]]).double()
SAMPLED = torch.tensor([[0.1, 0.8, 0.0], [0.6, 0.0, 0.0]]).double()
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
"""Ratios 5, 1/2 and 3/2; the first row's product is 5/2."""


def log(probabilities: torch.Tensor) -> torch.Tensor:
    return torch.where(MASK.bool(), probabilities.log(), 0.0)


LOG_RATIO = log(OLD) - log(SAMPLED)


@pytest.mark.parametrize(
    ("level", "lower", "weights"),
    [
        ("token", None, [[2.0, 0.5, 1.0], [1.5, 1.0, 1.0]]),
        ("sequence", None, [[2.0, 2.0, 2.0], [1.5, 1.5, 1.5]]),
        ("token", 0.6, [[0.0, 0.0, 1.0], [1.5, 1.0, 1.0]]),
        ("token", 0.4, [[0.0, 0.5, 1.0], [1.5, 1.0, 1.0]]),
        ("sequence", 0.4, [[0.0, 0.0, 0.0], [1.5, 1.5, 1.5]]),
    ],
)
def test_weights_by_hand(level: str, lower: float | None, weights: list[list[float]]) -> None:
    weighting = Weighting(level, 2.0, lower)
    found = weighting.weights(weighting.ratios(LOG_RATIO))
    assert torch.allclose(found, torch.tensor(weights).double())


def test_ratios_that_overflow_are_bounded() -> None:
    far = torch.tensor([[1e4]])
    assert float(Weighting("token", math.inf).ratios(far)) == pytest.approx(math.exp(20))
    assert float(Weighting("sequence", 2.0).ratios(-far)) == pytest.approx(math.exp(-20))
    for rule in REJECTION_RULES:
        measure = Rejection(rule, 1.0).measure(far, far > 0)
        bounded = {"k1": -20.0, "k2": 200.0, "k3": math.exp(20) - 21}
        assert float(measure) == pytest.approx(bounded[rule[-2:]]), rule
        assert not Rejection(rule, 100.0, 0.01).keeps(measure).any(), rule


@pytest.mark.parametrize(
    ("rule", "upper", "lower", "kept"),
    [
        ("token_k1", 2.0, 0.4, [[0, 1, 0], [1, 0, 0]]),
        ("token_k1", 6.0, 0.6, [[1, 0, 0], [1, 0, 0]]),
        ("seq_sum_k1", 2.0, 0.5, [[0, 0, 0], [1, 0, 0]]),
        ("seq_sum_k1", 3.0, 2.0, [[1, 1, 0], [0, 0, 0]]),
        ("seq_mean_k1", 1.55, 0.5, [[0, 0, 0], [1, 0, 0]]),  # the square root of 5/2 is 1.58
        ("seq_mean_k1", 1.6, 0.5, [[1, 1, 0], [1, 0, 0]]),
        ("token_k2", 0.25, 0.0, [[0, 1, 0], [1, 0, 0]]),  # log(1/2)^2 / 2 is 0.240
        ("seq_max_k2", 0.25, 0.0, [[0, 0, 0], [1, 0, 0]]),
        ("seq_sum_k3", 2.5, 0.0, [[0, 0, 0], [1, 0, 0]]),  # 5 - 1 - log 5 is 2.391, 1/2 - 1 + log 2 is 0.193
        ("seq_mean_k3", 2.5, 0.0, [[1, 1, 0], [1, 0, 0]]),
        ("seq_max_k3", 2.4, 0.0, [[1, 1, 0], [1, 0, 0]]),
        ("token_k3", 0.1, 0.0, [[0, 0, 0], [1, 0, 0]]),  # 3/2 - 1 - log 3/2 is 0.095
    ],
)
def test_rejection_by_hand(rule: str, upper: float, lower: float, kept: list[list[int]]) -> None:
    correction = Correction(rejections=(Rejection(rule, upper, lower),))
    assert correction.kept(LOG_RATIO, MASK.bool()).int().tolist() == kept


def test_each_of_several_rules_judges_all_that_was_sampled() -> None:
    """The second rule sees the mean of both tokens, though the first one rejects one of them."""
    first, second = Rejection("token_k1", 2.0, 0.4), Rejection("seq_mean_k1", 1.55, 0.4)
    assert Correction(rejections=(first, second)).kept(LOG_RATIO, MASK.bool()).int().tolist() == [
        [0, 0, 0],
        [1, 0, 0],
    ]


rows = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-3, 3)), min_size=4, max_size=4), min_size=1, max_size=3
)


def tensors(drawn: list[list[tuple[bool, float]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """log r, 0 where nothing is trained, and the mask."""
    mask = torch.tensor([[on for on, _ in row] for row in drawn])
    log_ratio = [[x if on else 0.0 for on, x in row] for row in drawn]
    return torch.tensor(log_ratio, dtype=torch.float64), mask


@settings(deadline=None)
@given(rows, st.sampled_from(REJECTION_RULES), st.floats(1.1, 3), st.floats(0.1, 0.9))
def test_rejection_is_its_definition(
    drawn: list[list[tuple[bool, float]]], rule: str, upper: float, lower: float
) -> None:
    log_ratio, mask = tensors(drawn)
    kept = Correction(rejections=(Rejection(rule, upper, lower),)).kept(log_ratio, mask)
    assert not (kept & ~mask).any()
    for row, of_row, found in zip(drawn, mask, kept):
        expected = oracle_kept([x for on, x in row if on], rule, upper, lower)
        assert found[of_row].tolist() == expected


@settings(deadline=None)
@given(rows, st.sampled_from(ROLLOUT_IS_LEVELS), st.floats(1.1, 3), st.one_of(st.none(), st.floats(0.1, 0.9)))
def test_weights_are_their_definition(
    drawn: list[list[tuple[bool, float]]], level: str, upper: float, lower: float | None
) -> None:
    log_ratio, mask = tensors(drawn)
    weighting = Weighting(level, upper, lower)
    weights = weighting.weights(weighting.ratios(log_ratio))
    means = []
    for row, of_row, found in zip(drawn, mask, weights):
        if expected := oracle_weights([x for on, x in row if on], level, upper, lower):
            assert found[of_row].tolist() == pytest.approx(expected, rel=1e-12)
            means += expected if level == "token" else expected[:1]
    total, count = weighting.total(weights, mask)
    assert (total, count) == (pytest.approx(math.fsum(means)), len(means))


# --- in the loss -------------------------------------------------------


def gradient(
    correction: Correction | None, old_is_this_pass: bool = False, **options: object
) -> tuple[torch.Tensor, dict[str, float]]:
    """Of the loss with respect to each token's log-probability; and metrics."""
    logp = log(OLD).requires_grad_()
    given_loss = {"policy_loss": POLICY_LOSSES["vanilla"].bound(ActorConfig()), **options}
    loss = ActorLoss(
        denominators=Denominators.count(MASK),
        scale_factor=1.0,
        old_is_this_pass=old_is_this_pass,
        correction=correction,
        **given_loss,  # type: ignore[arg-type]
    )
    columns = {
        "response_mask": MASK,
        "advantages": torch.ones(2, 3).double(),
        "rollout_log_probs": log(SAMPLED),
    }
    if not old_is_this_pass:
        columns["old_log_probs"] = log(OLD)
    value, metrics = loss(SimpleNamespace(log_probs=logp, entropy=None), columns)
    value.backward()
    assert logp.grad is not None
    return logp.grad, {name: metric.value for name, metric in metrics.items()}


@pytest.mark.parametrize("old_is_this_pass", [False, True])
@pytest.mark.parametrize("level", ROLLOUT_IS_LEVELS)
def test_a_tokens_gradient_is_multiplied_by_its_weight(level: str, old_is_this_pass: bool) -> None:
    weighting = Weighting(level, 2.0)
    plain, _ = gradient(None, old_is_this_pass)
    weighted, metrics = gradient(Correction(weighting), old_is_this_pass)
    weights = weighting.weights(weighting.ratios(LOG_RATIO))
    assert torch.allclose(weighted, plain * weights) and not torch.allclose(weighted, plain)
    expected = float(weights[MASK.bool()].mean())
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(expected)
    assert metrics["actor/pg_loss"] == pytest.approx(-expected)


@pytest.mark.parametrize("level", ROLLOUT_IS_LEVELS)
def test_reinforce_is_corrected_by_the_ratio_of_this_pass(level: str) -> None:
    """-w A, a third of it for each of three tokens; no gradient flows through w."""
    correction = Correction(Weighting(level, 2.0), of_current_policy=True)
    found, _ = gradient(correction, policy_loss=reinforce)
    first = [2.0, 0.5] if level == "token" else [2.0, 2.0]
    assert found.tolist() == [pytest.approx([-first[0] / 3, -first[1] / 3, 0]), pytest.approx([-0.5, 0, 0])]


def test_metrics_by_hand() -> None:
    _, found = gradient(Correction(Weighting("token", 1.8)))
    metrics = {name.removeprefix("rollout_corr/"): value for name, value in found.items()}
    mean = (1.8 + 0.5 + 1.5) / 3
    square = (3.24 + 0.25 + 2.25) / 3
    row = (0.5 * 0.4) ** -0.5, (0.1 * 0.8) ** -0.5  # perplexities of the first row
    expected = {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt((square - mean**2) * 3 / 2),
        "rollout_is_max": 5.0,
        "rollout_is_min": 0.5,
        "rollout_is_eff_sample_size": mean**2 / square,
        "rollout_is_ratio_fraction_high": 1 / 3,
        "rollout_is_ratio_fraction_low": 1 / 3,
        "rollout_is_seq_mean": (1.15 + 1.5) / 2,
        "rollout_is_seq_std": 0.35 / math.sqrt(2),
        "rollout_is_seq_max": 1.5,
        "rollout_is_seq_min": 1.15,
        "rollout_is_seq_max_deviation": 0.5,
        "rollout_is_seq_fraction_high": 0.5,  # the mean of 5 and 1/2
        "rollout_is_seq_fraction_low": 0.0,
        "kl": -(math.log(5) + math.log(0.5) + math.log(1.5)) / 3,
        "k3_kl": (5 - 1 - math.log(5) + 0.5 - 1 - math.log(0.5) + 1.5 - 1 - math.log(1.5)) / 3,
        "training_ppl": (row[0] + 1 / 0.9) / 2,
        "training_log_ppl": (math.log(row[0]) - math.log(0.9)) / 2,
        "rollout_ppl": (row[1] + 1 / 0.6) / 2,
        "rollout_log_ppl": (math.log(row[1]) - math.log(0.6)) / 2,
        "log_ppl_diff": -(math.log(2.5) / 2 + math.log(1.5)) / 2,
        "log_ppl_abs_diff": (math.log(2.5) / 2 + math.log(1.5)) / 2,
        "log_ppl_diff_max": -math.log(1.5),
        "log_ppl_diff_min": -math.log(2.5) / 2,
        "ppl_ratio": (2.5**-0.5 + 1 / 1.5) / 2,
        "chi2_token": (25 + 0.25 + 2.25) / 3 - 1,
        "chi2_seq": (2.5**2 + 1.5**2) / 2 - 1,
    }
    of_the_loss = {"actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"}
    assert {name: metrics[name] for name in metrics.keys() - of_the_loss} == pytest.approx(expected)


def test_a_response_has_one_ratio_at_sequence_level() -> None:
    """However long it is: 5/2 of two tokens, and 3/2 of one."""
    _, metrics = gradient(Correction(Weighting("sequence", 2.0)))
    for name in ("ratio_fraction_high", "seq_fraction_high"):
        assert metrics[f"rollout_corr/rollout_is_{name}"] == 0.5
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 0.0


def test_icepop_reports_the_share_of_weights_that_are_0() -> None:
    _, metrics = gradient(Correction(Weighting("token", 2.0, 0.6)))
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(0.5)
    assert metrics["rollout_corr/rollout_is_seq_max_deviation"] == 1.0  # the first row's mean is 0
