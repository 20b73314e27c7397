"""Divergences from a teacher over the vocabulary and over its likeliest tokens, against loops over the whole
distributions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.algorithms.distillation.config import DIVERGENCES, TOPK, DistillationLossConfig
from hydraflow.algorithms.distillation.terms import Distillation

V = 7


def distributions(seed: int, scale: float = 1.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the policy, and log-probabilities of the teacher, for two tokens: (2, V)."""
    draw = torch.Generator().manual_seed(seed)
    policy, teacher = scale * torch.randn(2, 2, V, generator=draw, dtype=torch.float64)
    return policy.requires_grad_(), teacher.log_softmax(-1)


def divergence(mode: str, policy: torch.Tensor, teacher: torch.Tensor, most: int, **keys) -> torch.Tensor:
    """As in a run: the teacher's likeliest tokens of each place, and both models' log-probabilities."""
    top = teacher.topk(most)
    mine = policy.log_softmax(-1).gather(-1, top.indices)
    return Distillation(DistillationLossConfig(loss_mode=mode, **keys)).divergences(mine, top.values)


def test_a_token_that_the_teacher_excludes() -> None:
    """0 log 0 is 0: against (1/2, 1/2, 0), a uniform policy of three has log 3/2, without NaN anywhere."""
    policy = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    for mode, value in (("forward_kl", math.log(1.5)), ("jsd", None), ("reverse_kl", None)):
        found = divergence(mode, policy, teacher, 3)
        if value is not None:
            assert float(found.detach()) == pytest.approx(value)
        (gradient,) = torch.autograd.grad(found.sum(), policy)
        assert torch.isfinite(found).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("mode", ["forward_kl", "jsd", "reverse_kl"])
def test_a_token_that_both_models_exclude(mode: str) -> None:
    policy = torch.tensor([[0.0, 1.0, 2.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64).log()
    found = divergence(mode, policy, teacher, 4)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    (without,) = torch.autograd.grad(divergence(mode, policy[:, :3], teacher[:, :3], 3).sum(), policy)
    assert torch.allclose(gradient[:, :3], without[:, :3]) and torch.isfinite(gradient).all()


def by_hand(mode: str, policy: torch.Tensor, teacher: torch.Tensor, most: int) -> list[torch.Tensor]:
    """The formula with loops over the tokens, and all others as one."""
    found = []
    for logits, theirs in zip(policy, teacher, strict=True):
        p, q = logits.exp() / logits.exp().sum(), theirs.exp()
        chosen = sorted(range(V), key=lambda j: -float(q[j]))[:most]
        others = [j for j in range(V) if j not in chosen]
        buckets = [(p[j], q[j]) for j in chosen]
        if others:
            buckets.append((sum(p[j] for j in others), sum(q[j] for j in others)))
        if mode.startswith("forward"):
            found.append(sum(b * (b.log() - a.log()) for a, b in buckets))
        elif mode.startswith("jsd"):
            found.append(sum(jensen_shannon(a, b) for a, b in buckets))
        else:
            found.append(sum(a * (a.log() - b.log()) for a, b in buckets))
    return found


def jensen_shannon(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A bucket's part, each side to the middle of both."""
    middle = (a + b) / 2
    return 0.5 * a * (a / middle).log() + 0.5 * b * (b / middle).log()


@pytest.mark.parametrize("most", [1, 3, V - 1, V])
@pytest.mark.parametrize("mode", DIVERGENCES)
def test_values_and_gradients_are_those_of_the_formula(mode: str, most: int) -> None:
    policy, teacher = distributions(seed=0)
    found = divergence(mode, policy, teacher, most)
    wanted = torch.stack(by_hand(mode, policy, teacher, most))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    weights = torch.tensor([1.0, -0.5], dtype=torch.float64)
    gradients = [torch.autograd.grad((one * weights).sum(), policy)[0] for one in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), most=st.integers(1, V), mode=st.sampled_from(list(DIVERGENCES)))
def test_is_never_negative_and_at_most_that_of_the_whole_vocabulary(seed: int, most: int, mode: str) -> None:
    policy, teacher = distributions(seed)
    few, all_of_it = (divergence(mode, policy, teacher, number) for number in (most, V))
    assert bool((few >= -1e-12).all() and (few <= all_of_it + 1e-12).all())


def test_jsd_lies_between_both_and_has_a_bound() -> None:
    """Near 0 and 1 the share of the teacher makes it either KL, and at 1/2 it is at most log 2."""
    policy, teacher = distributions(seed=2)
    for mode, beta in (("forward_kl", 1e-7), ("reverse_kl", 1 - 1e-7)):
        found = divergence("jsd", policy, teacher, V, jsd_beta=beta) / min(beta, 1 - beta)
        torch.testing.assert_close(found, divergence(mode, policy, teacher, V), rtol=0, atol=1e-5)
    apart = torch.tensor([[1.0, 1e-12]], dtype=torch.float64).log()
    assert divergence("jsd", apart, apart.flip(1), 2).item() == pytest.approx(math.log(2), abs=1e-9)


@pytest.mark.parametrize("most", [1, 3, V])
@pytest.mark.parametrize("mode", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_policy_like_the_teacher_stays_where_it_is(mode: str, most: int, dtype: torch.dtype) -> None:
    """Also where the likeliest tokens have nearly all probability, or all of it."""
    for scale in (1.0, 30.0):
        _, teacher = distributions(seed=1, scale=scale)
        policy = teacher.to(dtype).clone().requires_grad_()
        found = divergence(mode, policy, teacher.to(dtype), most)
        (gradient,) = torch.autograd.grad(found.sum(), policy)
        atol = 1e-12 if dtype == torch.float64 else 1e-5
        for number in (found, gradient):
            torch.testing.assert_close(number, torch.zeros_like(number), rtol=0, atol=atol)


@pytest.mark.parametrize("mode", [f"forward_kl{TOPK}", f"reverse_kl{TOPK}"])
def test_what_the_policy_gives_to_other_tokens_counts(mode: str) -> None:
    """A sum over the two tokens alone would have a gradient at the teacher itself."""
    teacher = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    policy = torch.tensor([[0.25, 0.125, 0.625]], dtype=torch.float64).log().requires_grad_()
    found = divergence(mode, policy, teacher, 2)
    forward = 0.75 * math.log(2) + 0.25 * math.log(0.25 / 0.625)
    reverse = 0.375 * math.log(0.5) + 0.625 * math.log(0.625 / 0.25)
    assert found.item() == pytest.approx(forward if mode.startswith("forward") else reverse, abs=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert gradient[0, 2] > 0, "a step downhill takes probability from the other token"


def test_limits_by_hand() -> None:
    """One token, to which the policy gives 1/2 and the teacher next to nothing."""
    mine = torch.tensor([[0.5]], dtype=torch.float64).log()
    theirs = torch.tensor([[1e-6]], dtype=torch.float64).log()

    def found(**keys: float) -> float:
        config = DistillationLossConfig(loss_mode="reverse_kl_topk", **keys)
        return Distillation(config).divergences(mine, theirs).item()

    rest = 0.5 * (math.log(0.5) - math.log1p(-1e-6))
    assert found() == pytest.approx(0.5 * (math.log(0.5) - math.log(1e-6)) + rest)
    assert found(log_prob_min_clamp=-4.0) == pytest.approx(0.5 * (math.log(0.5) + 4) + rest)
    assert found(loss_max_clamp=0.25, distillation_loss_coef=2.0) == 0.5
