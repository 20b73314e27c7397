"""Columns as plain numpy arrays, so that bytes travel out of band (pickle protocol 5) and no torch object is
pickled.

In: a tensor (dense or ragged, any dtype, any device) or an object column. Out: `EncodedColumn`, and back, bit
for bit. Object columns become JSON: numpy scalars and arrays are written as numbers and lists, tuples as
lists, anything else is rejected. Left out on purpose: compression, and any format that runs code when it is
read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hydraflow.protocol import ragged

ColumnData = Tensor | np.ndarray
"""A dense or ragged tensor, or an object array whose first dimension is the rows."""

_ALLOWED = "None, bool, int, float, str, lists, tuples, dicts with str keys, numpy numbers and their arrays"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class EncodedColumn:
    """One column on the wire. `arrays` hold all bytes; the rest is a small header."""

    kind: str
    """dense, ragged or objects."""
    dtype: str
    """Torch's name of the dtype (bfloat16, int64, ...); empty for objects."""
    shape: tuple[int, ...]
    """Shape of an object column; empty otherwise."""
    arrays: tuple[np.ndarray, ...]
    """dense: (values,); ragged: (values, lengths); objects: (UTF-8 bytes of a JSON list,), or where rows
    share objects (those bytes, the list item of each row)."""

    @property
    def nbytes(self) -> int:
        """Bytes of data, without the header."""
        return sum(array.nbytes for array in self.arrays)


def encode(column: ColumnData, name: str = "column") -> EncodedColumn:
    """The column as numpy arrays; tensors on the CPU share memory with the result. ValueError for an object
    that JSON cannot hold."""
    if isinstance(column, np.ndarray):
        firsts, which = _distinct(column.reshape(-1))
        text = json.dumps(_plain_items(column, firsts, name), ensure_ascii=False, separators=(",", ":"))
        written = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
        arrays = (written, which) if len(firsts) < len(which) else (written,)
        return EncodedColumn("objects", "", column.shape, arrays)
    dtype = str(column.dtype).removeprefix("torch.")
    if not ragged.is_ragged(column):
        return EncodedColumn("dense", dtype, (), (_to_numpy(column),))
    values, lengths = ragged.parts(column)
    return EncodedColumn("ragged", dtype, (), (_to_numpy(values), _to_numpy(lengths)))


def decode(encoded: EncodedColumn, *, copy: bool = True) -> ColumnData:
    """Restores the column, bit for bit. With `copy=False` a tensor uses the encoded memory itself, which may
    be shared with other processes, so treat it as read-only."""
    if encoded.kind == "objects":
        items = json.loads(encoded.arrays[0].tobytes().decode("utf-8", "surrogatepass"))
        column = as_objects(items)
        return (column[encoded.arrays[1]] if len(encoded.arrays) > 1 else column).reshape(encoded.shape)
    values = _from_numpy(encoded.arrays[0], encoded.dtype, copy)
    if encoded.kind == "dense":
        return values
    return ragged.from_parts(values, _from_numpy(encoded.arrays[1], "int64", copy))


def as_objects(items: list[object]) -> np.ndarray:
    """A one-dimensional object array with one item per row, even when the items are lists of equal length."""
    column = np.empty(len(items), dtype=object)
    if all(type(item) in _ATOMS for item in items):
        column[:] = items
    else:  # numpy would read a list of lists as a table; assigning one by one keeps each item whole
        for row, item in enumerate(items):
            column[row] = item
    return column


_ATOMS = (str, int, float, bool, type(None))


def _distinct(items: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The first position of each distinct object, and for every position the number of its object (int32).
    By identity, because the samples of a prompt share its objects."""
    identities = np.fromiter(map(id, items), dtype=np.int64, count=len(items))
    _, first, which = np.unique(identities, return_index=True, return_inverse=True)
    by_place = np.argsort(first)
    return first[by_place].tolist(), np.argsort(by_place).astype(np.int32)[which]


def _plain_items(column: np.ndarray, places: list[int], name: str) -> list[object]:
    """The objects at `places` of the flattened column, as JSON values. ValueError naming the row."""
    plain: list[object] = []
    width = int(np.prod(column.shape[1:], dtype=np.int64))
    items = column.reshape(-1)
    for place in places:
        try:
            plain.append(_plain(items[place]))
        except TypeError as error:
            row = place // max(width, 1)
            raise ValueError(
                f"column {name!r}, row {row}: {error} cannot travel between processes; allowed are {_ALLOWED}"
            ) from None
    return plain


def _plain(item: object) -> object:
    """`item` as a JSON value; TypeError naming an unsupported type."""
    if type(item) in _ATOMS or isinstance(item, str | int | float) and not isinstance(item, np.generic):
        return item
    if isinstance(item, np.ndarray | np.generic):
        value = item.tolist()
        if isinstance(value, np.generic):
            raise TypeError(f"a numpy {item.dtype}")
        return _plain(value)
    if isinstance(item, list | tuple):
        return [_plain(part) for part in item]
    if isinstance(item, Mapping):
        for key in item:
            if not isinstance(key, str):
                raise TypeError(f"a dict with the key {key!r} of type {type(key).__name__}")
        return {str(key): _plain(part) for key, part in item.items()}
    raise TypeError(f"a value of type {type(item).__module__}.{type(item).__qualname__}")


def _to_numpy(t: Tensor) -> np.ndarray:
    t = t.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if t.dtype in _NUMPY_DTYPES:
        return t.numpy()
    return t.view(_BITS[t.element_size()]).numpy()


def _from_numpy(array: np.ndarray, dtype: str, copy: bool) -> Tensor:
    # from_numpy warns about read-only memory, in every user's log; from_dlpack does not
    t = torch.from_numpy(array.copy()) if copy else torch.from_dlpack(array)
    return t.view(getattr(torch, dtype))


_NUMPY_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
