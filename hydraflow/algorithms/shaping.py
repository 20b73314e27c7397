"""Reward shaping: transforms the reward function's scores before advantages are computed.

    score + overlong penalty + weight * length reward  ->  (score - mean) / std  ->  clip

In: the scores of all rows of a step, and their lengths. Out: scores. The defaults change nothing. Left out on
purpose: the KL penalty (`kl.py`), and whitening and clipping of advantages (`advantages.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydraflow.algorithms.config import AlgorithmConfig
from hydraflow.algorithms.groups import Groups
from hydraflow.algorithms.running import RunningMoments
from hydraflow.algorithms.samples import Samples


@dataclass(frozen=True)
class OverlongBuffer:
    """DAPO's soft overlong punishment (Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 13): 0 up
    to `limit - size` tokens, then linear down to `-factor` at `limit`. As in verl, it keeps falling beyond
    the limit.

    >>> OverlongBuffer(limit=100, size=20, factor=2.0).penalty(torch.tensor([80, 90, 100, 110])).tolist()
    [0.0, -1.0, -2.0, -3.0]
    """

    limit: int
    """Maximum response length, in tokens."""
    size: int
    """Tokens before the limit over which the penalty grows."""
    factor: float
    log: bool = False
    """Whether the penalties are reported."""

    def penalty(self, lengths: Tensor) -> Tensor:
        """Penalties (B,), at most 0, to add to the scores of responses of these lengths (B,)."""
        over = (lengths - (self.limit - self.size)).clamp(min=0).float()
        return 0.0 - over / self.size * self.factor  # negation would turn 0 into -0.0


def shape_scores(
    config: AlgorithmConfig,
    scores: Tensor,
    *,
    lengths: Tensor,
    right: Tensor,
    group_ids: Tensor,
    samples: Tensor,
    seen: RunningMoments,
    overlong: OverlongBuffer | None = None,
) -> Tensor:
    """Shaped scores (B,) of responses of `lengths` (B,) tokens. The order: overlong penalty, length reward,
    normalization, clip.

    right: (B,) bool, whether the response is correct. group_ids, samples: (B,) as in `estimate_advantages`;
    statistics are over samples, which several rows may share. seen: moments of earlier steps' scores; these
    are added if the configuration asks for running statistics.
    """
    joined = Samples.of(group_ids, samples)
    ids = joined.first(group_ids)
    if overlong is not None:
        scores = scores + overlong.penalty(lengths).to(scores.dtype)
    if config.length_penalty:
        is_right = joined.mean(right.to(scores.dtype)) > 0  # any row of the sample
        short = length_reward(joined.sum(lengths).to(scores.dtype), is_right, ids)
        scores = scores + config.length_penalty * joined.to_rows(short)
    if config.norm_mean_type or config.norm_std_type:
        scores = _normalized(config, scores, joined, ids, seen)
    if config.reward_clip is not None:
        scores = scores.clamp(-config.reward_clip, config.reward_clip)
    return scores


def length_reward(lengths: Tensor, right: Tensor, ids: Tensor) -> Tensor:
    """The length reward of Kimi k1.5 (Kimi Team 2025, https://arxiv.org/abs/2501.12599, section 2.3.3), (S,):

        r = 1/2 - (length - shortest) / (longest - shortest)    of the group; min(0, r) for a wrong response

    lengths (S,) floating point, right (S,) bool, ids (S,): equal for the responses to one prompt. 0 for a
    group whose lengths are all equal.

    >>> lengths, right = torch.tensor([10.0, 20.0, 30.0]), torch.tensor([False, True, True])
    >>> length_reward(lengths, right, torch.tensor([4, 4, 4])).tolist()
    [0.0, 0.0, -0.5]
    """
    groups = Groups(ids)
    least, most = -groups.best(-lengths), groups.best(lengths)
    reward = 0.5 - (lengths - least) / (most - least).clamp(min=1.0)
    reward = torch.where(right, reward, reward.clamp(max=0.0))
    return torch.where(most > least, reward, 0.0)


def _normalized(
    config: AlgorithmConfig, scores: Tensor, joined: Samples, ids: Tensor, seen: RunningMoments
) -> Tensor:
    """Scores (B,) minus a mean, divided by a standard deviation + 1e-6. A sample alone in its group keeps its
    score; where all samples score alike, the differences between rows of one sample stay as they are."""
    of_samples = joined.mean(scores)
    if "running" in (config.norm_mean_type, config.norm_std_type):
        seen.take(of_samples)

    def moments(kind: str) -> tuple[Tensor, Tensor, Tensor]:
        """Scores less their mean, their standard deviation, and their number."""
        if kind == "running":
            like = torch.full_like(of_samples, seen.std)
            return of_samples - seen.mean, like, torch.full_like(ids, seen.count)
        groups = Groups(ids if kind == "group" else torch.zeros_like(ids))
        return groups.centred(of_samples), groups.std(of_samples), groups.size

    centred, std = of_samples, torch.ones_like(of_samples)
    if config.norm_mean_type:
        found, _, size = moments(config.norm_mean_type)
        centred = torch.where(size == 1, of_samples, found)
    if config.norm_std_type:
        _, found, size = moments(config.norm_std_type)
        std = torch.where((size == 1) | (found == 0), 1.0, found + 1e-6)
    apart = scores - joined.to_rows(of_samples)  # differences between rows of one sample are kept
    return (joined.to_rows(centred) + apart) / joined.to_rows(std)
