"""Adaptive coefficient of the entropy bonus (He et al. 2025, Skywork-OR1, https://arxiv.org/abs/2505.22312,
section 3.1): keeps the policy's entropy at or above a target.

    used in step k:  c_k if e_k <= target, else 0
    afterwards:      c_(k+1) = c_k + delta if e_k < target, c_k - delta if e_k > target; within its bounds

In: the entropy e_k per trained token of the policy that sampled step k. Out: the step's coefficient.
"""

from __future__ import annotations

from hydraflow.algorithms.config import AdaptiveEntropyConfig


class EntropyController:
    """Holds c, which starts at `actor.entropy_coeff`.

    >>> control = EntropyController(0.0, AdaptiveEntropyConfig(target_entropy=0.2, delta_ent_coef=0.25,
    ...                                                        max_ent_coef=0.5))
    >>> [control.take(entropy) for entropy in (0.1, 0.1, 0.1, 0.1, 0.3, 0.2)]
    [0.0, 0.25, 0.5, 0.5, 0.0, 0.25]
    """

    def __init__(self, coefficient: float, config: AdaptiveEntropyConfig):
        self.value, self.config = coefficient, config

    def take(self, entropy: float) -> float:
        """The coefficient for a step whose samples have this entropy per token, in nats; then updates c."""
        used = self.value if entropy <= self.config.target_entropy else 0.0
        if entropy != self.config.target_entropy:
            delta = self.config.delta_ent_coef
            moved = self.value + (delta if entropy < self.config.target_entropy else -delta)
            self.value = min(max(moved, self.config.min_ent_coef), self.config.max_ent_coef)
        return used

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]
