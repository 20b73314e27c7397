"""KL estimators, their gradients, the penalty in the reward, and the controllers."""

import math

import pytest
import torch

from hydraflow.algorithms.config import KLControlConfig
from hydraflow.algorithms.kl import KL_ESTIMATORS, kl_penalty
from hydraflow.algorithms.kl_control import KLController

LOGP, REF = math.log(0.5), math.log(0.25)  # d = log 2
D = math.log(2.0)
VALUES = {
    "kl": D,
    "k1": D,
    "abs": D,
    "mse": D * D / 2,
    "k2": D * D / 2,
    "low_var_kl": 0.5 + D - 1,
    "k3": 0.5 + D - 1,
}
GRADIENTS = {
    "kl": 1.0,
    "k1": 1.0,
    "abs": 1.0,
    "mse": D,
    "k2": D,
    "low_var_kl": 0.5,
    "k3": 0.5,
}  # k3: 1 - exp(-d)


def value_and_gradient(name: str, logp: float, ref: float) -> tuple[float, float]:
    x = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    estimate = KL_ESTIMATORS[name](x, torch.tensor([ref], dtype=torch.float64))
    assert estimate.dtype == torch.float64
    estimate.sum().backward()
    return estimate.item(), x.grad.item()


@pytest.mark.parametrize("name", VALUES)
def test_values_and_gradients_by_hand(name):
    assert value_and_gradient(name, LOGP, REF) == pytest.approx((VALUES[name], GRADIENTS[name]), abs=1e-12)


@pytest.mark.parametrize("name", VALUES)
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(name):
    assert value_and_gradient(name + "+", LOGP, REF) == pytest.approx((VALUES[name], D), abs=1e-12)


def test_k3_of_close_log_probabilities_is_not_negative():
    """In float32: 1 would swallow most digits of the gap."""
    gap = 1e-3 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    ref = torch.zeros(1000)
    found, wanted = KL_ESTIMATORS["k3"](gap, ref), KL_ESTIMATORS["k3"](gap.double(), ref.double())
    assert float(found.min()) >= 0
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-10)


def of_softmax(name: str, over: str) -> torch.Tensor:
    """The gradient of the logits, in the mean over sampled tokens; over "reverse" or "forward", that of the
    divergence itself."""
    logits = torch.tensor([0.3, -0.4, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.5, 0.4, -0.7], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    wanted = {
        "reverse": (logp.exp() * (logp - reference)).sum(),
        "forward": (reference.exp() * (reference - logp)).sum(),
        "sampled": (logp.detach().exp() * KL_ESTIMATORS[name](logp, reference)).sum(),
    }
    return torch.autograd.grad(wanted[over], logits)[0]


@pytest.mark.parametrize(
    ("name", "divergence"),
    [("k1+", "reverse"), ("k2", "reverse"), ("k3+", "reverse"), ("k3", "forward"), ("k1", None)],
)
def test_whose_gradient_it_is_in_the_mean(name, divergence):
    found = of_softmax(name, "sampled")
    wanted = of_softmax(name, divergence) if divergence else torch.zeros_like(found)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-15)


def test_signs_when_the_reference_is_more_likely():
    assert value_and_gradient("kl", REF, LOGP)[0] == pytest.approx(-D)
    assert value_and_gradient("abs", REF, LOGP) == pytest.approx((D, -1.0))
    assert value_and_gradient("k3", REF, LOGP)[0] == pytest.approx(2 - D - 1)


def test_k3_is_bounded():
    for logp in (-100.0, -1000.0):  # exp(1000) is infinite
        assert value_and_gradient("k3", logp, 0.0) == (10.0, 0.0)
    assert value_and_gradient("k3", 0.0, -5.0)[0] == pytest.approx(math.exp(-5) + 4)


def test_table_holds_each_name_with_and_without_plus():
    assert set(KL_ESTIMATORS) == set(VALUES) | {f"{name}+" for name in VALUES}


def test_penalty_in_the_reward_by_hand():
    """Rows of 3, 1, 2 and 0 tokens."""
    logp = torch.tensor([0.3, 9.0, 0.5, 0.6, 9.0, float("nan")], dtype=torch.float64)
    mask, lengths = torch.tensor([1, 0, 1, 1, 0, 0]), torch.tensor([3, 1, 2, 0])
    ref = torch.where(mask.bool(), 0.0, math.nan)
    penalty, level = kl_penalty(logp, ref, mask, lengths, kind="kl")
    assert penalty.tolist() == [0.3, 0.0, 0.5, 0.6, 0.0, 0.0]
    assert level == pytest.approx((0.4 + 0.6) / 2)  # the other trajectories have no trained token
    assert kl_penalty(logp[:3], ref[:3], mask[:3], lengths[:1], kind="kl")[1] == pytest.approx(0.4)


def test_no_trained_token_has_no_kl():
    assert kl_penalty(torch.ones(2), torch.zeros(2), torch.zeros(2), torch.tensor([2]), kind="kl")[1] == 0


def test_adaptive_controller_by_hand_and_over_a_resume():
    controller = KLController(KLControlConfig("adaptive", kl_coef=1.0, target_kl=0.1, horizon=1000))
    controller.update(kl=5.0, trajectories=100)  # clipped to +0.2: 1 + 0.2 * 100 / 1000
    assert controller.value == pytest.approx(1.02)
    resumed = KLController(controller.config)
    resumed.load_state_dict(controller.state_dict())
    for either in (controller, resumed):
        either.update(kl=0.09, trajectories=100)  # -0.1: 1 - 0.1 * 0.1
    assert controller.value == resumed.value == pytest.approx(1.02 * 0.99)


def test_fixed_controller_does_not_move_and_a_resume_takes_the_new_coefficient():
    controller = KLController(KLControlConfig("fixed", kl_coef=0.001, target_kl=0.1, horizon=1000))
    controller.update(kl=9.0, trajectories=100)
    assert controller.value == 0.001
    resumed = KLController(KLControlConfig("fixed", kl_coef=0.002))
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == 0.002
