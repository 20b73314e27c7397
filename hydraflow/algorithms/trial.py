"""Tries a user's own loss or estimator on a few made-up rows before a run depends on it.

In: the function with its keys bound. Out: what is wrong with its result. Left out on purpose: whether it
learns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hydraflow.algorithms.advantages import estimate_advantages
from hydraflow.algorithms.config import AlgorithmConfig
from hydraflow.algorithms.policy_loss import PolicyLoss
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms, keep


def try_loss(loss: PolicyLoss, columns: Sequence[str]) -> str | None:
    """What is wrong with the loss's result or gradient for 5 rows of 3 tokens, or None. Its exceptions
    propagate. columns: those that it takes by name."""
    draw = torch.Generator().manual_seed(0)
    # the last row has no trained token, as one that rollout correction rejects
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0]])
    logp, old, advantages = torch.rand(3, *mask.shape, generator=draw)
    logp, old = (-logp).requires_grad_(), -mask * old
    inputs = TokenInputs(keep(logp, mask), old, mask * (advantages - 0.5), mask)
    terms = loss(inputs, **dict.fromkeys(columns, old))
    if not isinstance(terms, TokenTerms):
        return f"returned a {type(terms).__name__}, not TokenTerms(loss, stats)"
    for what, tensor in {"loss": terms.loss, **terms.stats}.items():
        if not isinstance(tensor, torch.Tensor) or tensor.shape != mask.shape:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            return f"{what} must have the shape (B, R) of its inputs, {tuple(mask.shape)}, but has {shape}"
    if not terms.loss.requires_grad:
        return "its loss has no gradient: it does not depend on tokens.log_probs"
    if not bool(terms.loss[mask.bool()].isfinite().all()):
        return "its loss is not finite"
    (gradient,) = torch.autograd.grad(keep(terms.loss, mask).sum(), logp)
    if not bool(gradient.isfinite().all()):
        return "its gradient is not finite; where the mask is 0, log-probabilities and advantages are 0, too"
    return None


def try_estimator(config: AlgorithmConfig) -> str | None:
    """As `try_loss` for the configured estimator, on 2 groups of 2 rows."""
    lengths = torch.tensor([3, 2, 3, 1])
    tokens = int(lengths.sum())
    rewards, values = torch.linspace(-1.0, 1.0, 2 * tokens).view(2, tokens)
    found = estimate_advantages(
        config,
        torch.tensor([1.0, 0.0, 0.5, 0.25]),
        rewards,
        torch.ones(tokens, dtype=torch.bool),
        lengths,
        values=values,
        group_ids=torch.tensor([0, 0, 1, 1]),
        reward_baselines=torch.zeros(len(lengths)),
    )
    for what, tensor in zip(("advantages", "returns"), found):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != rewards.shape:
            return f"{what} must be one number for each token, (N,), or for each score, (B,)"
        if not bool(tensor.isfinite().all()):
            return f"{what} are not finite"
    return None
