"""Row operations on every kind of column: dense tensor, ragged tensor, object array.

In: columns. Out: columns, or the first row in which two of them differ. `batch` and `remote` are built on
this. Left out on purpose: names of columns and whole batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized

import numpy as np
import torch
from torch import Tensor

from hydraflow.protocol import ragged
from hydraflow.protocol.wire import ColumnData, as_objects


def object_column(values: object, name: str) -> np.ndarray:
    """`values` as an object array with one item per row. ValueError unless an array, list or tuple."""
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise ValueError(f"column {name!r} is a single value, not one per row")
        return values if values.dtype == object else values.astype(object)
    if isinstance(values, list | tuple):
        return as_objects(list(values))
    kind = type(values).__name__
    raise ValueError(f"column {name!r} is a {kind}; rows of objects are given as a list or a numpy array")


def tensor_column(value: object, name: str) -> Tensor:
    """`value` if it is a tensor with rows. ValueError otherwise."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise ValueError(f"column {name!r} is a {kind}, not a tensor; objects go into non_tensors")
    if ragged.is_ragged(value):
        if (dimension := ragged.ragged_dimension(value)) != 1:
            raise ValueError(
                f"column {name!r} is ragged in dimension {dimension}; rows may differ in their first"
                " dimension only: transpose them"
            )
        return value
    if value.is_nested:
        raise ValueError(f"column {name!r} is a nested tensor of the old layout; use layout=torch.jagged")
    if value.dim() == 0:
        raise ValueError(f"column {name!r} is a single value, not one per row")
    return value


def take(column: ColumnData, index: ragged.RowIndex) -> ColumnData:
    """The selected rows in the order of `index`; a slice with step 1 gives a view, anything else a copy."""
    if isinstance(column, Tensor):
        return ragged.take(column, index)
    return column[index] if isinstance(index, slice) else column[ragged.as_index(index, len(column))]


def n_rows(column: Sized) -> int:
    """Number of rows; avoids `len` of ragged tensors, which takes 14 us."""
    return ragged.n_rows(column) if isinstance(column, Tensor) and ragged.is_ragged(column) else len(column)


def concat(parts: Sequence[ColumnData], name: str) -> ColumnData:
    """Rows of several parts of one column. ValueError when the parts are of different kinds."""
    if all(isinstance(part, np.ndarray) for part in parts):
        if len(shapes := {part.shape[1:] for part in parts}) > 1:
            raise ValueError(f"column {name!r} has rows of different shapes: {sorted(shapes)}")
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) != len(parts):
        raise ValueError(f"column {name!r} holds tensors in one part and objects in another")
    try:
        return ragged.concat(tensors)
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from None


def cut_rows(column: ColumnData, pieces: int, name: str) -> ColumnData:
    """Each row cut along dimension 1 into `pieces` equal rows. ValueError for a row that does not divide."""
    if pieces < 1:
        raise ValueError(f"rows cannot be cut into {pieces} pieces")
    if isinstance(column, Tensor) and ragged.is_ragged(column):
        values, lengths = ragged.parts(column)
        if bool((lengths % pieces).any()):
            row = int((lengths % pieces).nonzero()[0])
            raise ValueError(
                f"column {name!r}, row {row}: {int(lengths[row])} tokens do not divide into {pieces} pieces"
            )
        return ragged.from_parts(values, (lengths // pieces).repeat_interleave(pieces))
    if column.ndim < 2 or column.shape[1] % pieces:
        shape = tuple(column.shape)
        raise ValueError(
            f"column {name!r} of shape {shape} does not divide into {pieces} pieces along dimension 1"
        )
    return column.reshape(len(column) * pieces, column.shape[1] // pieces, *column.shape[2:])


def first_difference(a: ColumnData, b: ColumnData) -> str | None:
    """The first difference of two columns in words, or None if all rows are equal. NaN equals NaN; identical
    objects are equal without a comparison."""
    if a is b:
        return None
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_difference(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return "one is a tensor, the other holds objects"
    if a.shape != b.shape:
        return f"shapes {a.shape} and {b.shape}"
    return next((f"row {row}" for row in range(len(a)) if not same(a[row], b[row])), None)


def _tensor_difference(a: Tensor, b: Tensor) -> str | None:
    if len(a) != len(b) or ragged.describe(a) != ragged.describe(b):
        return f"{len(a)} rows of {ragged.describe(a)} and {len(b)} rows of {ragged.describe(b)}"
    if not ragged.is_ragged(a):
        row = _first_unequal(a, b.to(a.device))
        return None if row is None else f"row {row}"
    (values, lengths), (other, other_lengths) = ragged.parts(a), ragged.parts(b)
    row = _first_unequal(lengths, other_lengths.to(lengths.device))
    # only the tokens of the rows before that one can be compared
    common = int(lengths[: len(a) if row is None else row].sum())
    token = _first_unequal(values[:common], other.to(values.device)[:common])
    if token is not None:
        row = int(torch.searchsorted(lengths.cumsum(0), token, right=True))
    return None if row is None else f"row {row}"


def _first_unequal(a: Tensor, b: Tensor) -> int | None:
    """Index along dimension 0 of the first unequal entry of two tensors of one shape."""
    if torch.equal(a, b):
        return None
    unequal = (a != b) & ~(torch.isnan(a) & torch.isnan(b))
    found = unequal.reshape(len(a), -1).any(1).nonzero()
    return int(found[0]) if len(found) else None


def same(a: object, b: object) -> bool:
    """Whether two row objects hold equal values, NaN equal to NaN, arrays compared by content."""
    if a is b:
        return True
    a, b = (value.tolist() if isinstance(value, np.ndarray) else value for value in (a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dim() == 0 or b.dim() == 0:
            return a.shape == b.shape and _first_unequal(a[None], b[None].to(a.device)) is None
        return first_difference(a, b) is None
    if any(isinstance(value, Mapping | list | tuple | Tensor) for value in (a, b)):
        return False
    return bool(a == b) or bool(a != a and b != b)
