"""Which outputs a forward pass must compute."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Ask:
    """The outputs per response token of a policy. A value model ignores it. Raises ValueError for a
    temperature that is not above 0, or a `likeliest` above `among`."""

    temperature: float = 1.0
    """Divides the logits; above 0."""
    entropy: bool = False
    """Also return the entropy in nats of the token's distribution."""
    entropy_is_trained: bool = True
    """With `entropy`: whether the entropy must be differentiable; if not, the backward pass can do less."""
    greedy_match: bool = False
    """In place of the entropy: 1 if the token (or the first of several) is the most probable one, else 0."""
    routes: bool = False
    """Also the experts of each token (`routing.py`)."""

    sum_pi_squared: bool = False
    """In place of the entropy: the sum of squared probabilities over the whole vocabulary."""
    likeliest: int = 0
    """Top-k: return log-probabilities of the k most probable tokens instead of the targets', and their ids
    instead of the entropy, in descending order. No gradients."""
    among: int = 0
    """With `likeliest`: consider only token ids below this number; at least `likeliest`."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}: log-probabilities need a finite temperature above 0"
            )
        if not 0 <= self.likeliest <= self.among:
            raise ValueError(
                f"likeliest={self.likeliest} must be from 0 to among={self.among}, the number of token ids to"
                " consider"
            )
        more = self.entropy + self.greedy_match + self.sum_pi_squared + (self.likeliest > 0)
        assert more <= 1, "at most one further column"

    def require_vocabulary(self, size: int) -> None:
        """Raises ValueError if a vocabulary of that size has fewer than `likeliest` tokens."""
        if self.likeliest > size:
            raise ValueError(f"likeliest={self.likeliest} is more than the {size} tokens of the vocabulary")

    @property
    def trains_entropy(self) -> bool:
        """Whether entropies are returned and need gradients."""
        return self.entropy and self.entropy_is_trained

    @property
    def more(self) -> str | None:
        """Name of the column besides `log_probs`; None: there is none."""
        if self.entropy:
            return "entropys"
        if self.likeliest:
            return "top_tokens"
        return "greedy_match" if self.greedy_match else "sum_pi_squared" if self.sum_pi_squared else None


LOG_PROBS = Ask()
"""Log-probabilities at temperature 1, nothing else."""
