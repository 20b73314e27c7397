"""What a forward pass is asked for besides its rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ask:
    """What a policy computes for each response token. A value model ignores it."""

    temperature: float = 1.0
    """Divides the logits; above 0."""
    entropy: bool = False
    """Also the entropy in nats of the token's distribution."""
    greedy_match: bool = False
    """Instead of the entropy: 1 where the token is the most probable one, else 0."""

    def __post_init__(self) -> None:
        assert not (self.entropy and self.greedy_match), "one more column, not two"


LOG_PROBS = Ask()
"""Log-probabilities at temperature 1, nothing else."""
