"""Online policy mirror descent, OPMD, as Trinity defines it after Kimi k1.5 (Kimi Team 2025,
https://arxiv.org/abs/2501.12599, section 2.3.2; analysed by Yao et al. 2025,
https://arxiv.org/abs/2509.24203).

    A    = score - tau log Z,    Z = mean over the group of exp(score / tau)
    loss = -A logp / (1 + tau)

tau is the weight of a KL penalty against the old policy, and tau log Z the highest expected score that any
policy reaches under it: near the group's best score for a small tau, near its mean for a large one.
(Trinity's default is the mean itself, which is `grpo` without the standard deviation.) The loss has neither
ratio nor clip, so samples of an older policy count in full; in the loss, tau only scales the step down. A
group of one has nothing to compare with: its advantage is its score, as in GRPO.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraflow.algorithms.groups import Groups
from hydraflow.algorithms.reinforce import reinforce
from hydraflow.algorithms.token_terms import TokenInputs, TokenTerms


def opmd_advantages(scores: Tensor, *, group_ids: Tensor, opmd_tau: float) -> Tensor:
    """Advantages (B,) of trajectories with these scores (B,).

    `group_ids`: (B,) integer, equal for the trajectories of one prompt.

    >>> scores, ids = torch.tensor([0.0, 3.0]).log1p(), torch.tensor([7, 7])
    >>> opmd_advantages(scores, group_ids=ids, opmd_tau=1.0)  # the baseline is log((1 + 4) / 2)
    tensor([-0.9163,  0.4700])
    """
    groups = Groups(group_ids)
    gap = scores - groups.best(scores)
    mean = groups.sums((gap / opmd_tau).exp()) / groups.size.to(scores.dtype)
    return torch.where(groups.size == 1, scores, gap - opmd_tau * mean.log())


def opmd(tokens: TokenInputs, *, opmd_tau: float) -> TokenTerms:
    """No statistics.

    >>> half = torch.tensor([[0.5]]).log()
    >>> opmd(TokenInputs(half, half, torch.tensor([[2.0]]), torch.ones(1, 1)), opmd_tau=1.0).loss  # log 2
    tensor([[0.6931]])
    """
    return TokenTerms(reinforce(tokens).loss / (1 + opmd_tau))
