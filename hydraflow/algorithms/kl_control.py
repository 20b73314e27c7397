"""Controls the coefficient of the KL penalty in the reward.

In: the KL of each step and its number of trajectories (without padding). Out: `value`, the coefficient.
"""

from __future__ import annotations

from hydraflow.algorithms.config import MOST_KL_ERROR, KLControlConfig


class KLController:
    """A constant coefficient, which a resumed run reads from the configuration; or an adaptive one, which
    steers to a target KL (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2).

        value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * trajectories / horizon)

    >>> controller = KLController(KLControlConfig("adaptive", kl_coef=0.5, target_kl=0.1, horizon=100))
    >>> controller.update(kl=0.9, trajectories=50)
    >>> round(controller.value, 6)
    0.55
    """

    def __init__(self, config: KLControlConfig):
        self.value, self.config = config.kl_coef, config
        self._adapts = config.type == "adaptive"

    def update(self, kl: float, trajectories: int) -> None:
        """Adjusts the coefficient, if it is adaptive, for one step's KL and number of trajectories."""
        if self._adapts:
            error = min(max(kl / self.config.target_kl - 1.0, -MOST_KL_ERROR), MOST_KL_ERROR)
            self.value *= 1.0 + error * trajectories / self.config.horizon

    def state_dict(self) -> dict[str, float]:
        """The state that a resumed run needs."""
        return {"value": self.value} if self._adapts else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores `state`."""
        if self._adapts:
            self.value = state["value"]
