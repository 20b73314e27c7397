"""Compares the trainer's and the generation engine's probabilities of the sampled tokens.

In: both log-probabilities of all rows of a step. Out: numbers under verl's names. Wrong or stale weights in
the generation engine show here first.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def rollout_probs_diff(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Statistics of |exp(old) - exp(rollout)| over the trained tokens, and the correlation of the two.

    All tensors (N,). Empty if no token is trained. The standard deviation is unbiased (0 for one token).
    Pearson's correlation is left out where it is undefined: where either probability is the same for all
    tokens.

    >>> old = torch.tensor([0.5, 0.2]).log()
    >>> diff = rollout_probs_diff(old, torch.tensor([0.25, 0.2]).log(), torch.tensor([1, 1]))
    >>> diff["training/rollout_probs_diff_max"], diff["training/rollout_probs_diff_mean"]
    (0.25, 0.125)
    """
    trained = mask.bool()
    ours, theirs = (logp[trained].double().exp() for logp in (old_log_probs, rollout_log_probs))  # (tokens,)
    if not len(ours):
        return {}
    gap = (ours - theirs).abs()
    spread = gap.std() if len(gap) > 1 else torch.zeros_like(gap[0])
    summary = torch.stack([gap.mean(), gap.max(), spread, *_correlation(ours, theirs)]).tolist()
    names = (*map(probs_diff_name, ("mean", "max", "std")), "training/rollout_actor_probs_pearson_corr")
    return dict(zip(names, summary))


def probs_diff_name(what: str, replica: int | None = None) -> str:
    """The metric's name: verl's over all tokens; over those of one replica, with its number added.

    >>> probs_diff_name("max"), probs_diff_name("max", 1)
    ('training/rollout_probs_diff_max', 'training/rollout_probs_diff_max/replica-1')
    """
    return f"training/rollout_probs_diff_{what}" + ("" if replica is None else f"/replica-{replica}")


def _correlation(x: Tensor, y: Tensor) -> list[Tensor]:
    if bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return []
    x, y = x - x.mean(), y - y.mean()
    return [(x * y).sum() / (x.norm() * y.norm())]
