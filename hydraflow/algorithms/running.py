"""Running mean and standard deviation of all scores of a run: two sets are merged by their counts, means and
sums of squared deviations (Chan, Golub and LeVeque 1979, equation 2.1).

In: the scores of each step. Out: statistics over all scores so far, as if they were one list.
"""

from __future__ import annotations

import math

from torch import Tensor


class RunningMoments:
    """Moments of the numbers seen so far.

    >>> import torch
    >>> seen = RunningMoments()
    >>> seen.take(torch.tensor([1.0, 3.0])), seen.take(torch.tensor([5.0, 7.0]))
    (None, None)
    >>> seen.mean, round(seen.std**2, 4)  # 20 / 3
    (4.0, 6.6667)
    """

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Unbiased; 0 for a single number."""
        return math.sqrt(self._squares / max(self.count - 1, 1))

    def take(self, numbers: Tensor) -> None:
        """Adds numbers (S,), at least one."""
        added = numbers.double()
        count, mean = len(added), float(added[0] + (added - added[0]).mean())  # exact where all are equal
        whole, apart = self.count + count, mean - self.mean
        self._squares += float(((added - mean) ** 2).sum()) + apart**2 * self.count * count / whole
        self.mean += apart * (count / whole)
        self.count = whole

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self._squares = int(state["count"]), state["mean"], state["squares"]
