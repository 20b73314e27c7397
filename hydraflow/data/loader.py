"""The order in which rows are drawn, and its state.

In: anything with a length and `batch(rows)`, such as `PromptDataset` or `ConversationDataset`. Out: one batch
after another. The order is a function of (seed, epoch) only, so the state is two numbers and a resumed run
continues exactly. Left out on purpose: torchdata's StatefulDataLoader. The rows are in memory, so there is
nothing to prefetch; and it draws from torch's global random state, so every other use of that state would
change the data order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from hydraflow.errors import ConfigError, Problem
from hydraflow.protocol.batch import DataProto

KEYS = {
    "rows": "rows of data.train_files",
    "batch_size": "data.train_batch_size",
    "seed": "trainer.seed",
    "shuffle": "data.shuffle",
    "drop_last": "drop_last of the data loader",
}
"""What the order of the rows depends on, and what sets it."""


class RowSource(Protocol):
    """What the loader requires of a dataset."""

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray) -> DataProto:
        """The rows with these numbers, in this order."""


class PromptLoader:
    """Batches of `batch_size` rows; with `drop_last`, rows left over at the end of an epoch are dropped.

    Iterating yields the rest of the current epoch; iterating again yields the next epoch. `next_batch` never
    ends. Raises `ConfigError` when the dataset cannot fill one batch.
    """

    def __init__(
        self,
        dataset: RowSource,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool = True,
    ):
        if batch_size < 1 or (drop_last and len(dataset) < batch_size):
            key, rule = "data.train_batch_size", f"must be between 1 and the number of rows, {len(dataset)}"
            raise ConfigError.one(key, batch_size, rule, f"{key}={max(1, len(dataset))}")
        self.dataset, self.batch_size = dataset, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        """Number of finished epochs."""
        self.position = 0
        """Batches of the current epoch returned so far."""
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Number of batches in one epoch."""
        rows = len(self.dataset)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[DataProto]:
        self._roll_over()
        while self.position < len(self):
            yield self.next_batch()

    def next_batch(self) -> DataProto:
        """The next batch, from the next epoch when this one is finished."""
        self._roll_over()
        start = self.position * self.batch_size
        self.position += 1
        return self.dataset.batch(self.order()[start : start + self.batch_size])

    def give_back(self) -> None:
        """Makes `next_batch` return its last batch again."""
        assert self.position > 0, "no batch to give back"
        self.position -= 1

    @property
    def place(self) -> str:
        """Progress through the data, as a phrase for messages."""
        return f"{self.position} of {len(self)} batches of epoch {self.epoch + 1} are done"

    def order(self) -> np.ndarray:
        """Row numbers of the current epoch in the order in which they are drawn, (rows,) int64."""
        if self._order is None or self._order[0] != self.epoch:
            drawn = np.arange(len(self.dataset))
            if self.shuffle:
                drawn = np.random.default_rng([self.seed, self.epoch]).permutation(drawn)
            self._order = (self.epoch, drawn)
        return self._order[1]

    def state(self) -> dict[str, Any]:
        """Plain numbers, enough for `load_state` to continue with the next batch."""
        return {"epoch": self.epoch, "position": self.position, **self.identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. `ConfigError` when rows, batch size, seed or order differ."""
        self.require_same(state)
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def require_same(self, data: Mapping[str, Any]) -> None:
        """`ConfigError` when rows, batch size, seed or order are not those of a `state` or an `identity`."""
        now = self.identity()
        if differing := [name for name in now if now[name] != data.get(name)]:
            rule, remedy = "the checkpoint was written with", "the same data, or trainer.resume_mode=disable"
            raise ConfigError(
                [Problem(KEYS[name], now[name], f"{rule} {data.get(name)}", remedy) for name in differing]
            )

    def identity(self) -> dict[str, Any]:
        """What the order of the rows depends on."""
        return {name: len(self.dataset) if name == "rows" else getattr(self, name) for name in KEYS}

    def _roll_over(self) -> None:
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
