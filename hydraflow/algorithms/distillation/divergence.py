"""Divergences of a policy from a teacher over the vocabulary, or over the teacher's top-k tokens plus one
bucket for all others (Agarwal et al. 2024, https://arxiv.org/abs/2306.13649).

    forward   KL(teacher || policy) = sum_j q_j (log q_j - log p_j)     mode-covering
    reverse   KL(policy || teacher) = sum_j p_j (log p_j - log q_j)     mode-seeking
    jsd       b KL(teacher || m) + (1 - b) KL(policy || m), m = b q + (1 - b) p     in between; at most
              -b log b - (1 - b) log(1 - b)

p and q are the probabilities of the K tokens, and of the bucket: 1 - their sum. With the bucket, all are
divergences between distributions: never negative, at most that over the whole vocabulary, and without a
gradient where the two agree. A sum over the K tokens alone, as in verl, may be negative and pushes the policy
to give them all probability. Renormalized probabilities would ignore what the policy gives to other tokens.

In: log-probabilities of both for the same K tokens. Out: a divergence per response token. Left out on
purpose: which tokens (`workers/teacher.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST = -1e4
"""Smallest log-probability: exp of it is 0, but 0 times it is 0, not NaN, for models that exclude tokens."""


def forward(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || policy) over the last dimension."""
    policy, teacher = policy.clamp(min=LEAST), teacher.clamp(min=LEAST)
    return (teacher.exp() * (teacher - policy)).sum(-1)


def reverse(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL(policy || teacher) over the last dimension."""
    return forward(teacher, policy)


def jensen_shannon(policy: Tensor, teacher: Tensor, *, jsd_beta: float) -> Tensor:
    """The generalized Jensen-Shannon divergence over the last dimension.

    >>> policy, teacher = torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()
    >>> jensen_shannon(policy, teacher, jsd_beta=0.5)  # m = 3/4, 1/4
    tensor(0.2158)
    """
    policy, teacher = policy.clamp(min=LEAST), teacher.clamp(min=LEAST)
    mixture = torch.logaddexp(teacher + math.log(jsd_beta), policy + math.log1p(-jsd_beta))
    return jsd_beta * forward(mixture, teacher) + (1 - jsd_beta) * reverse(policy, mixture)


def with_rest(log_probs: Tensor) -> Tensor:
    """(..., K + 1): appends the log-probability of all other tokens together; their probability is at least
    the dtype's epsilon, and has no gradient where this bound holds.

    >>> with_rest(torch.tensor([0.5, 0.25]).log()).exp().tolist()
    [0.5, 0.25, 0.25]
    """
    rest = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, rest.clamp(min=torch.finfo(rest.dtype).eps).log()], -1)
