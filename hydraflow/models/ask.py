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
    """Instead of the entropy: 1 where the token, or the first of several, is the most probable one, else
    0."""
    routes: bool = False
    """Also the experts that each token is sent to (`routing.py`)."""

    sum_pi_squared: bool = False
    """Instead of the entropy: the sum of the squared probabilities of the whole vocabulary."""
    likeliest: int = 0
    """How many of the likeliest tokens to find: log-probabilities are of these, in place of the asked ones,
    and instead of the entropy there are their ids, the likeliest first. Without gradients."""
    among: int = 0
    """Token ids from here on are not among the likeliest; read with `likeliest`."""

    def __post_init__(self) -> None:
        more = self.entropy + self.greedy_match + self.sum_pi_squared + (self.likeliest > 0)
        assert more <= 1, "one more column, not two"

    @property
    def more(self) -> str | None:
        """The column besides `log_probs`; None: there is none."""
        if self.entropy:
            return "entropys"
        if self.likeliest:
            return "top_tokens"
        return "greedy_match" if self.greedy_match else "sum_pi_squared" if self.sum_pi_squared else None


LOG_PROBS = Ask()
"""Log-probabilities at temperature 1, nothing else."""
