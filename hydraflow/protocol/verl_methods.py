"""Methods of verl's `DataProto` that hydraflow itself does not call: they are for code written for verl.

In: a batch. Out: TensorDicts, new batches, mini-batches. Left out on purpose: methods that hydraflow
calls too (`batch`, `rows`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from hydraflow.protocol import columns
from hydraflow.protocol.rows import Rows
from hydraflow.protocol.wire import ColumnData


class VerlMethods(Rows):
    """The base of `DataProto` for these methods. Failures caused by the user's data raise ValueError or
    KeyError naming the column."""

    @classmethod
    @abstractmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> Self: ...

    @abstractmethod
    def _map(self, change: Callable[[str, ColumnData], ColumnData], rows: int) -> Self: ...

    @classmethod
    def from_tensordict(cls, data: TensorDict, meta_info: dict[str, Any] | None = None) -> Self:
        """A batch from a TensorDict: stacks of non-tensors become objects, single ones `meta_info`."""
        tensors: dict[str, Tensor] = {}
        objects: dict[str, Any] = {}
        facts = dict(meta_info or {})
        for name in list(data.keys()):
            key, leaf = str(name), data.get(name)
            if isinstance(leaf, NonTensorStack):
                objects[key] = leaf.tolist()
            elif isinstance(leaf, NonTensorData):
                facts[key] = leaf.data
            else:
                tensors[key] = leaf
        return cls.from_dict(tensors, objects, facts)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: objects as NonTensorStack, `meta_info` as NonTensorData. ValueError when a fact has
        a column's name."""
        clash = self.meta_info.keys() & set(self.keys())
        if clash:
            raise ValueError(f"meta_info and columns share the names {sorted(clash)}")
        out = TensorDict(self._columns(), batch_size=[len(self)])
        for key, column in self._objects().items():
            out[key] = NonTensorStack(*[NonTensorData(item) for item in column.tolist()])
        for key, fact in self.meta_info.items():
            out.set_non_tensor(key, fact)
        return out

    def sample_level_repeat(self, repeat_times: int | Sequence[int] | np.ndarray | Tensor) -> Self:
        """Row i `repeat_times[i]` times, side by side. ValueError unless there is one count per row, or a
        single one."""
        times = np.asarray(repeat_times)
        if times.ndim and len(times) != len(self):
            raise ValueError(f"{len(times)} repeat counts were given for {len(self)} rows")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(self, n_split: int, split_keys: Iterable[str] | None = None) -> Self:
        """Cuts each row into `n_split` rows along dimension 1; columns not in `split_keys` are repeated.
        None: cuts all tensors. ValueError when `n_split` does not divide a width or a row length."""
        keys = set(self._columns() if split_keys is None else split_keys)
        missing = keys - set(self.keys())
        if missing:
            raise KeyError(f"the batch has no columns {sorted(missing)}; it has {self.keys()}")
        rows = np.repeat(np.arange(len(self)), n_split)

        def cut(key: str, column: ColumnData) -> ColumnData:
            return columns.cut_rows(column, n_split, key) if key in keys else columns.take(column, rows)

        return self._map(cut, len(rows))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches, `epochs` times over all rows; `dataloader_kwargs={"shuffle": True}` draws a new order
        per epoch from `seed`. ValueError unless `mini_batch_size` divides the number of rows."""
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows do not divide into mini-batches of {mini_batch_size}")
        unknown = set(dataloader_kwargs or {}) - {"shuffle"}
        if unknown:
            raise ValueError(f"dataloader_kwargs may hold shuffle; got {sorted(unknown)}")
        shuffle = bool((dataloader_kwargs or {}).get("shuffle", False))
        return self._mini_batches(mini_batch_size, epochs, seed, shuffle)

    def _mini_batches(self, size: int, epochs: int, seed: int | None, shuffle: bool) -> Iterator[Self]:
        """A generator of its own, so that `make_iterator` raises when called, not at the first batch."""
        generator = torch.Generator()
        if seed is not None:
            generator.manual_seed(seed)
        elif shuffle:
            generator.seed()
        for _ in range(epochs):
            data = self.select_idxs(torch.randperm(len(self), generator=generator)) if shuffle else self
            yield from data.split(size)
