"""Losses: values computed by hand, agreement with plain loops, and the metrics that they report."""

import math
from types import SimpleNamespace

import pytest
import torch
from algorithms.losses_by_name import policy_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.algorithms.actor_loss import ActorLoss
from hydraflow.algorithms.aggregate import LOSS_AGG_MODES, Denominators, token_weights
from hydraflow.algorithms.correction import Correction, Weighting
from hydraflow.algorithms.critic_loss import ValueLoss, clipped_value_loss
from hydraflow.algorithms.distillation.config import DistillationLossConfig
from hydraflow.algorithms.distillation.terms import Distillation
from hydraflow.algorithms.gspo import gspo
from hydraflow.algorithms.policy_loss import vanilla
from hydraflow.algorithms.sapo import sapo
from hydraflow.algorithms.sft_loss import SFTLoss
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def f64(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def output(log_probs=None, entropy=None, values=None):
    return SimpleNamespace(log_probs=log_probs, entropy=entropy, values=values)


def plain_ppo(ratio: float, advantage: float, low: float, high: float, c: float) -> float:
    """The piecewise definition: what a token costs, case by case."""
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    return -advantage * min(max(ratio, 1 - low), c)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "at_dual_clip"),
    [
        (1.0, 2.0, -2.0, 0, 0),
        (1.5, 2.0, -2.6, 1, 0),  # clipped above at 1.3
        (0.5, 2.0, -1.0, 0, 0),  # a lower ratio is not clipped for a good token
        (0.5, -2.0, 1.6, 1, 0),  # clipped below at 0.8
        (1.5, -2.0, 3.0, 0, 0),
        (7.0, -2.0, 6.0, 0, 1),  # dual clip: at most 3 * 2
        (7.0, 0.0, 0.0, 0, 0),
    ],
)
def test_vanilla_by_hand(ratio, advantage, loss, clipped, at_dual_clip):
    logp = f64([[math.log(ratio)]])
    terms = vanilla(
        TokenInputs(logp, torch.zeros_like(logp), f64([[advantage]]), torch.ones(1, 1)),
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        clip_ratio_c=3.0,
    )
    assert terms.loss.item() == pytest.approx(loss)
    assert terms.stats["actor/pg_clipfrac"].item() == clipped
    assert terms.stats["actor/pg_clipfrac_lower"].item() == at_dual_clip


@settings(deadline=None, max_examples=60)
@given(st.floats(-3, 3), st.floats(-5, 5), st.sampled_from([(0.2, 0.2, 3.0), (0.1, 0.4, 1.5)]))
def test_vanilla_is_its_piecewise_definition(log_ratio, advantage, clips):
    low, high, c = clips
    logp = f64([[log_ratio]])
    terms = vanilla(
        TokenInputs(logp, torch.zeros_like(logp), f64([[advantage]]), torch.ones(1, 1)),
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=c,
    )
    assert terms.loss.item() == pytest.approx(
        plain_ppo(math.exp(log_ratio), advantage, low, high, c), abs=1e-12
    )


def test_gspo_clips_a_row_as_one():
    """Log-ratios 0.6 and 0 make a row's ratio exp(0.3), above 1.2; the last token is not trained."""
    logp = f64([[0.6, 0.0, 9.0], [0.1, -0.1, 9.0]]).requires_grad_()
    advantages, mask = f64([[2.0, 1.0, 0.0], [-3.0, -3.0, 0.0]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
    terms = gspo(
        TokenInputs(logp, torch.zeros_like(logp), advantages, mask), clip_ratio_low=0.2, clip_ratio_high=0.2
    )
    assert terms.loss[:, :2].flatten().tolist() == pytest.approx([-2.4, -1.2, 3.0, 3.0])
    assert terms.stats["actor/pg_clipfrac"][:, :2].tolist() == [[1, 1], [0, 0]]
    (terms.loss * mask).sum().backward()
    assert logp.grad.flatten().tolist() == pytest.approx([0, 0, 0, 3.0, 3.0, 0])


def test_gspo_takes_the_mean_before_it_bounds_it():
    """30 and -29 have the mean 0.5, and the bound of 20 is for the row; 3000 and 0 are beyond it."""
    logp = f64([[30.0, -29.0], [3000.0, 0.0]])
    advantages, mask = f64([[-1.0, -1.0], [-1.0, -1.0]]), torch.ones(2, 2)
    terms = gspo(
        TokenInputs(logp, torch.zeros_like(logp), advantages, mask), clip_ratio_low=0.2, clip_ratio_high=0.2
    )
    assert terms.loss[:, 0].tolist() == pytest.approx([math.exp(0.5), math.exp(20.0)])


def test_sapo_by_hand():
    """At ratio 2: 4/tau sigmoid(tau), and the gradient by log p is -A 4 sigmoid (1 - sigmoid) ratio."""
    logp = f64([[math.log(2.0), math.log(2.0)]]).requires_grad_()
    tokens = TokenInputs(logp, torch.zeros_like(logp), f64([[3.0, -3.0]]), torch.ones(1, 2))
    terms = sapo(tokens, tau_pos=1.0, tau_neg=2.0)
    up, down = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(-2.0))
    assert terms.loss[0].tolist() == pytest.approx([-3 * 4 * up, 3 * 2 * down])
    terms.loss.sum().backward()
    assert logp.grad[0].tolist() == pytest.approx([-3 * 4 * up * (1 - up) * 2, 3 * 4 * down * (1 - down) * 2])


def test_log_ratio_is_bounded():
    logp = torch.tensor([[500.0, -500.0]], requires_grad=True)
    terms = vanilla(
        TokenInputs(logp, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2)),
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
    )
    terms.loss.sum().backward()
    assert terms.loss[0].tolist() == pytest.approx([3.0, -math.exp(-20.0)])
    assert logp.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [(1.0, 1.0, 3.0, 2.0, 0), (2.0, 1.0, 3.0, 1.125, 1), (0.0, 1.0, 3.0, 4.5, 0), (2.0, 1.0, 1.0, 0.5, 0)],
)
def test_value_loss_by_hand(value, old, target, loss, clipped):
    # second row: 2 is clipped to 1.5, which is 1.5 from the return; 1.5^2 / 2
    terms = clipped_value_loss(f64([[value]]), f64([[old]]), f64([[target]]), cliprange=0.5)
    assert terms.loss.item() == loss
    assert terms.stats["critic/vf_clipfrac"].item() == clipped
    assert terms.stats["critic/vpred_mean"].item() == value


def test_value_loss_has_no_gradient_where_it_is_clipped():
    values = f64([[2.0, 1.2]]).requires_grad_()
    clipped_value_loss(values, f64([[1.0, 1.0]]), f64([[3.0, 3.0]]), cliprange=0.5).loss.sum().backward()
    assert values.grad[0].tolist() == pytest.approx([0.0, -1.8])


MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
WEIGHTS = {  # 3 tokens, 2 sequences with one; loss_scale_factor 10
    "token-mean": [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]],
    "token-sum": [[1, 1, 0], [1, 0, 0], [0, 0, 0]],
    "seq-mean-token-sum": [[1 / 2, 1 / 2, 0], [1 / 2, 0, 0], [0, 0, 0]],
    "seq-mean-token-mean": [[1 / 4, 1 / 4, 0], [1 / 2, 0, 0], [0, 0, 0]],
    "seq-mean-token-sum-norm": [[1 / 20, 1 / 20, 0], [1 / 20, 0, 0], [0, 0, 0]],
}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_token_weights_by_hand(mode, mask_dtype):
    denominators = Denominators.count(MASK)
    assert denominators == Denominators(tokens=3.0, sequences=2.0)
    weights = token_weights(MASK.to(mask_dtype), mode, denominators, 10.0, dtype=torch.float64)
    assert torch.equal(weights, f64(WEIGHTS[mode]))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_mini_batch_without_a_trained_token_costs_nothing(mode):
    mask = torch.zeros(2, 3)
    assert (
        token_weights(mask, mode, Denominators.count(mask), 10.0, dtype=torch.float32).tolist()
        == [[0.0] * 3] * 2
    )


def test_denominators_add():
    total = Denominators.count(MASK[:1]) + Denominators.count(MASK[1:])
    assert total == Denominators.count(MASK)


def test_actor_loss_by_hand():
    log_probs = f64([[math.log(0.5), math.log(0.5), float("nan")]])
    columns = {
        "response_mask": torch.tensor([[1, 1, 0]]),
        "old_log_probs": f64([[math.log(0.5), math.log(0.25), 0.0]]),  # ratios 1 and 2
        "advantages": f64([[1.0, 1.0, 0.0]]),
        "ref_log_prob": f64([[math.log(0.25), math.log(0.5), 0.0]]),  # k1 is log 2 and 0
    }
    loss_fn = ActorLoss(
        policy_loss=policy_loss("vanilla"),
        denominators=Denominators(4.0, 2.0),
        scale_factor=8.0,
        entropy_coeff=0.1,
        kl_coef=0.5,
        kl_type="kl",
    )
    loss, metrics = loss_fn(output(log_probs, entropy=f64([[0.3, 0.5, float("inf")]])), columns)
    pg, entropy, kl = (-1.0 - 1.2) / 4, (0.3 + 0.5) / 4, math.log(2) / 4
    assert loss.item() == pytest.approx(pg - 0.1 * entropy + 0.5 * kl)
    assert {name: metric.how for name, metric in metrics.items()} == {
        "actor/pg_clipfrac": "mean",
        "actor/pg_clipfrac_lower": "mean",
        "actor/ppo_kl": "mean",
        "actor/entropy": "mean",
        "actor/pg_loss": "sum",
        "actor/kl_loss": "sum",
        "actor/kl_coef": "mean",
    }
    assert metrics["actor/pg_loss"].value == pytest.approx(pg)
    assert metrics["actor/kl_loss"].value == pytest.approx(kl)
    assert metrics["actor/kl_coef"].value == 0.5
    assert metrics["actor/entropy"].value == pytest.approx(0.4) and metrics["actor/entropy"].weight == 2.0
    assert metrics["actor/pg_clipfrac"].value == 0.5
    assert metrics["actor/ppo_kl"].value == pytest.approx(-math.log(2) / 2)


def test_terms_of_untrained_tokens_may_be_anything():
    """A row's mean over its trained tokens, which a row without one does not have."""

    def by_row(tokens: TokenInputs) -> TokenTerms:
        ratio = (tokens.log_probs - tokens.old_log_probs) * tokens.mask
        mean = (ratio.sum(1, keepdim=True) / tokens.mask.sum(1, keepdim=True)).exp()
        return TokenTerms(-tokens.advantages * mean, {"actor/mine": mean.detach().expand_as(ratio)})

    columns = {
        "response_mask": torch.tensor([[1, 1], [0, 0]]),
        "old_log_probs": f64([[0.0, 0.0], [0.0, 0.0]]),
        "advantages": f64([[1.0, 3.0], [0.0, 0.0]]),
    }
    loss_fn = ActorLoss(policy_loss=by_row, denominators=Denominators(2.0, 1.0), scale_factor=1.0)
    log_probs = f64([[math.log(4), 0.0], [5.0, 5.0]]).requires_grad_()
    loss, metrics = loss_fn(output(log_probs), columns)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == pytest.approx(-(1 + 3) / 2 * 2), "the mean ratio is 2"
    assert gradient.tolist() == [[pytest.approx(-2.0)] * 2, [0.0, 0.0]]
    assert metrics["actor/pg_loss"].value == pytest.approx(-4) and metrics[
        "actor/mine"
    ].value == pytest.approx(2)


def test_a_kl_penalty_without_weight_is_reported():
    columns = {"response_mask": torch.ones(1, 1), "old_log_probs": f64([[0.0]]), "advantages": f64([[2.0]])}
    loss_fn = ActorLoss(
        policy_loss=policy_loss("vanilla"),
        denominators=Denominators(1.0, 1.0),
        scale_factor=1.0,
        kl_coef=0.0,
        kl_type="kl",
    )
    loss, metrics = loss_fn(output(f64([[0.0]])), columns | {"ref_log_prob": f64([[-30.0]])})
    assert (loss.item(), metrics["actor/kl_loss"].value, metrics["actor/kl_coef"].value) == (-2.0, 30.0, 0.0)


def test_actor_loss_without_extras_reads_no_reference_and_no_entropy():
    columns = {"response_mask": torch.ones(1, 1), "old_log_probs": f64([[0.0]]), "advantages": f64([[2.0]])}
    loss_fn = ActorLoss(
        policy_loss=policy_loss("vanilla"), denominators=Denominators(1.0, 1.0), scale_factor=1.0
    )
    loss, metrics = loss_fn(output(f64([[0.0]])), columns)
    assert loss.item() == -2.0
    assert set(metrics) == {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/pg_loss"}


def test_divergence_from_a_teacher_by_hand():
    """Two likely tokens at each of two positions, all others as one; the teacher is the second argument."""
    policy, teacher = f64([[[0.5, 0.25], [0.8, 0.1]]]), f64([[[0.25, 0.25], [0.4, 0.2]]])
    columns = {
        "response_mask": torch.ones(1, 2),
        "old_log_probs": torch.zeros(1, 2),
        "advantages": torch.zeros(1, 2),
        "teacher_top_log_probs": teacher.log(),
    }
    config = DistillationLossConfig(loss_mode="reverse_kl_topk", use_task_rewards=False)
    loss_fn = ActorLoss(
        policy_loss=policy_loss("vanilla"),
        denominators=Denominators(4.0, 1.0),
        scale_factor=1.0,
        distillation=Distillation(config),
    )
    said = SimpleNamespace(log_probs=torch.zeros(1, 2), entropy=None, target_log_probs=policy.log())
    loss, metrics = loss_fn(said, columns)
    first = 0.5 * math.log(2) + 0.25 * math.log(1 / 2)
    second = 0.8 * math.log(2) + 0.1 * math.log(1 / 2) + 0.1 * math.log(1 / 4)
    assert loss.item() == pytest.approx((first + second) / 4)
    assert metrics["actor/distillation_loss"].value == pytest.approx((first + second) / 4)
    assert metrics["actor/distillation_policy_mass"].value == pytest.approx((0.75 + 0.9) / 2)
    assert metrics["actor/distillation_teacher_mass"].value == pytest.approx((0.5 + 0.6) / 2)


@pytest.mark.parametrize("loss_mode", ["k1", "reverse_kl_topk"])
@pytest.mark.parametrize("normalized", [False, True])
def test_what_is_not_trained_may_hold_anything(loss_mode, normalized):
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    draw = torch.Generator().manual_seed(0)
    names = ["old_log_probs", "advantages", "ref_log_prob", "rollout_log_probs", "rollout_is_weights", "own"]
    shapes = dict.fromkeys([*names, "teacher_log_probs", "log_probs", "entropy"], (2, 3))
    shapes |= dict.fromkeys(["teacher_top_log_probs", "target_log_probs"], (2, 3, 2))
    drawn = {name: torch.rand(size, generator=draw).double() - 1.5 for name, size in shapes.items()}
    loss_fn = ActorLoss(
        policy_loss=lambda tokens, own: TokenTerms(tokens.log_probs * tokens.advantages * own, {"own": own}),
        loss_columns=("own",),
        denominators=Denominators.count(mask),
        scale_factor=1.0,
        entropy_coeff=0.1,
        kl_coef=0.2,
        correction=Correction(Weighting("token", 2.0, normalized=normalized)),
        distillation=Distillation(DistillationLossConfig(loss_mode=loss_mode)),
    )
    found = []
    for anything in (0.0, math.nan):
        columns = {
            name: x.masked_fill(mask.bool().logical_not()[(...,) + (None,) * (x.ndim - 2)], anything)
            for name, x in drawn.items()
        }
        said = {
            name: columns.pop(name).requires_grad_() for name in ("log_probs", "entropy", "target_log_probs")
        }
        loss, metrics = loss_fn(SimpleNamespace(**said), {"response_mask": mask, **columns})
        loss.backward()
        gradients = {name: x.grad for name, x in said.items() if x.grad is not None}
        found.append((loss, gradients, {name: metric.value for name, metric in metrics.items()}))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_critic_loss_by_hand():
    columns = {
        "response_mask": torch.tensor([[1, 1, 0]]),
        "values": f64([[1, 1, 5]]),
        "returns": f64([[3, 1, 5]]),
    }
    loss_fn = ValueLoss(denominators=Denominators(4.0, 1.0), scale_factor=1.0, cliprange=0.5)
    loss, metrics = loss_fn(output(values=f64([[2, 2, float("nan")]])), columns)
    assert loss.item() == (1.125 + 0.5) / 4
    assert metrics["critic/vf_loss"].value == loss.item() and metrics["critic/vf_loss"].how == "sum"
    assert metrics["critic/vf_clipfrac"].value == 0.5
    assert metrics["critic/vpred_mean"].value == 2.0


def test_sft_loss_by_hand():
    loss, metrics = SFTLoss(Denominators(4.0, 2.0))(
        output(f64([[-1.0, -3.0, float("nan")]])), {"response_mask": torch.tensor([[1, 1, 0]])}
    )
    assert loss.item() == 1.0  # 4 of this micro-batch over 4 tokens of the mini-batch
    assert metrics["train/loss"].value == 2.0 and metrics["train/loss"].weight == 2.0


def test_supervised_rows_without_a_trained_token_cost_nothing():
    loss, _ = SFTLoss(Denominators(0.0, 0.0))(output(f64([[-1.0]])), {"response_mask": torch.zeros(1, 1)})
    assert loss.item() == 0.0
