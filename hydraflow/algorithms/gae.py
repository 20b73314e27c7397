"""Generalised advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16).

    delta_t = r_t + gamma * V_next(t) - V_t
    A_t     = delta_t + gamma * lam * A_next(t)
    return  = A_t + V_t

`next(t)` is the next token that is trained (mask 1). Tokens with mask 0 between two turns (observations) are
skipped: they neither discount nor contribute their values, and a reward on one of them is
ignored. After the last trained token the value is 0.

Returns may have their own gamma and lambda (decoupled GAE: Yuan et al. 2025,
https://arxiv.org/abs/2503.01491). The advantages of a response of l trained tokens may use a lambda of
1 - 1 / (alpha l), at least 0 (length-adaptive GAE: VAPO, Yue et al. 2025, https://arxiv.org/abs/2504.05118).
A custom estimator may call `gae` with a gamma or lambda per token.
"""

from __future__ import annotations

from torch import Tensor

from hydraflow.algorithms.trained_tokens import TrainedTokens


def gae(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    values: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
    critic_gamma: float | None = None,
    critic_lam: float | None = None,
    lam_length_alpha: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages, before they are whitened, and returns, (N,) each, 0 where the mask is 0.

    `rewards`, `mask`, `values`: (N,), the tokens of all rows; `lengths`: (B,). `gamma`, `lam`: one number, or
    (N,), per token. `critic_gamma`, `critic_lam`: those of the returns; None: `gamma`, `lam`.
    `lam_length_alpha`: alpha; None: `lam` for responses of any length.
    """
    tokens = TrainedTokens(mask, lengths)
    rewards, values = tokens.of(rewards), tokens.of(values)  # (n,)
    gamma, lam = (tokens.of(one) if isinstance(one, Tensor) else one for one in (gamma, lam))
    ahead = tokens.following(values)

    def estimate(gamma: float | Tensor, lam: float | Tensor) -> Tensor:
        return tokens.discounted(rewards + gamma * ahead - values, gamma * lam)

    of_policy = lam
    if lam_length_alpha is not None:
        trained = tokens.lengths.clamp(min=1).double()
        of_rows = (1.0 - 1.0 / (lam_length_alpha * trained)).clamp(min=0.0)  # (B,)
        of_policy = of_rows.repeat_interleave(tokens.lengths)
    advantages = estimate(gamma, of_policy)
    of_critic = gamma if critic_gamma is None else critic_gamma, lam if critic_lam is None else critic_lam
    as_one = lam_length_alpha is None and all(map(_same, of_critic, (gamma, lam)))
    returns = (advantages if as_one else estimate(*of_critic)) + values
    return tokens.put_back(advantages), tokens.put_back(returns)


def _same(one: float | Tensor, other: float | Tensor) -> bool:
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)
