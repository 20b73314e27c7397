"""Controllers of the coefficient of the KL penalty in the reward.

In: the KL of each step and its number of trajectories (without padding). Out: `value`, the coefficient.
"""

from __future__ import annotations

from hydraflow.algorithms.config import MOST_KL_ERROR, KLControlConfig


class KLController:
    """A constant coefficient. It has no state: a resumed run reads it from the configuration."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, kl: float, trajectories: int) -> None:
        """Called after each step with its KL and number of trajectories; changes nothing here."""

    def state_dict(self) -> dict[str, float]:
        """The state that a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores `state`."""


class AdaptiveKLController(KLController):
    """Steers to a target KL (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2).

        value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * trajectories / horizon)

    >>> controller = AdaptiveKLController(kl_coef=0.5, target_kl=0.1, horizon=100)
    >>> controller.update(kl=0.9, trajectories=50)
    >>> round(controller.value, 6)
    0.55
    """

    def __init__(self, kl_coef: float, *, target_kl: float, horizon: int):
        super().__init__(kl_coef)
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, kl: float, trajectories: int) -> None:
        """Adjusts the coefficient for one step's KL and number of trajectories."""
        error = min(max(kl / self.target_kl - 1.0, -MOST_KL_ERROR), MOST_KL_ERROR)
        self.value *= 1.0 + error * trajectories / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def make_kl_controller(config: KLControlConfig) -> KLController:
    """The controller that `algorithm.kl_ctrl.type` names."""
    if config.type == "fixed":
        return KLController(config.kl_coef)
    return AdaptiveKLController(config.kl_coef, target_kl=config.target_kl, horizon=config.horizon)
