"""Estimates of KL(policy || reference) from the log-probabilities of sampled tokens
(Schulman 2020, http://joschu.net/blog/kl-approx.html).

With `d = logp - ref`, per token:

    kl, k1         d                    unbiased, may be negative
    abs            |d|
    mse, k2        d^2 / 2              its gradient is that of the KL in expectation
    low_var_kl, k3 exp(-d) + d - 1      unbiased, never negative; -d clamped to +-20 and the result to 10

A trailing `+` keeps the value of an estimator and takes the gradient of k2. That is useful where the estimate
is a loss: as a loss, k1 has a gradient of zero in expectation, and k3 has that of the reversed KL.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hydraflow.algorithms.token_terms import keep
from hydraflow.algorithms.trained_tokens import row_sums

KLEstimator = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities of the policy, of the reference) -> estimate per token, of the same shape."""


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """`exp(ref - logp) - (ref - logp) - 1`, at most 10; no gradient where a clamp holds."""
    gap = (ref - logp).clamp(-20.0, 20.0)
    return (gap.expm1() - gap).clamp(max=10.0)


_PLAIN: dict[str, KLEstimator] = {
    "k1": lambda logp, ref: logp - ref,
    "abs": lambda logp, ref: (logp - ref).abs(),
    "k2": lambda logp, ref: 0.5 * (logp - ref) ** 2,
    "k3": k3,
}
_PLAIN |= {"kl": _PLAIN["k1"], "mse": _PLAIN["k2"], "low_var_kl": k3}


def with_k2_gradient(estimator: KLEstimator) -> KLEstimator:
    """The estimator's value with k2's gradient (a straight-through estimate)."""

    def estimate(logp: Tensor, ref: Tensor) -> Tensor:
        through = _PLAIN["k2"](logp, ref)
        return estimator(logp, ref).detach() + (through - through.detach())

    return estimate


KL_ESTIMATORS = _PLAIN | {f"{name}+": with_k2_gradient(plain) for name, plain in _PLAIN.items()}


@torch.no_grad()
def kl_penalty(
    logp: Tensor, ref: Tensor, mask: Tensor, lengths: Tensor, *, kind: str
) -> tuple[Tensor, float]:
    """KL per token (N,), 0 where the mask is 0, and the KL for the controller.

    The latter averages each trajectory over its trained tokens, then averages the trajectories; those without
    trained tokens do not count. `logp`, `ref`, `mask`: (N,), the tokens of all rows; `lengths`: (B,)."""
    penalty = KL_ESTIMATORS[kind](keep(logp, mask), keep(ref, mask))  # (N,)
    tokens = row_sums(mask.bool(), lengths)  # (B,)
    levels = (row_sums(penalty, lengths) / tokens)[tokens > 0]
    return penalty, (levels.sum() / max(len(levels), 1)).item()
