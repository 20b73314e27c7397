"""Sizes that the native generation engine works with. They are here, without torch, because the estimate of
its memory needs them too (`memory/generation.py`)."""

from __future__ import annotations

from collections.abc import Callable

LEAST_ROWS = 16
"""Minimum number of rows for oneDNN. From here on a row's bits do not depend on the other rows, with MKL
either (`generation/decode.py`)."""
LEAST_INNER = 128
"""Minimum inner dimension for oneDNN in float32. A part of a larger product has the same inner dimension,
hence the same bits (`generation/lean.py`)."""
MOST_WEIGHTS = 2**25
"""Maximum size of a matrix for oneDNN in float32, which makes a reordered copy of it."""
MKL_BLOCK = 384
"""Inner dimension of the blocks in which MKL sums with AVX-512. Beyond two blocks, how it splits a remainder
depends on the number of rows."""
PREFILL_TOKENS = 8192
"""Prompt tokens per forward pass; more would need memory without being faster."""
FILTERED_LOGITS = 2**23
"""Number of logits filtered at once: copies of a large vocabulary for all rows would need gigabytes."""
_LEAST_ROOM = 16
"""Minimum spare capacity in tokens when a layer's keys and values are reallocated."""


def is_onednns(outer: int, inner: int) -> bool:
    """Whether oneDNN multiplies with a float32 matrix of these dimensions, where it is faster at all."""
    return inner >= LEAST_INNER and outer * inner <= MOST_WEIGHTS


def keeps_bits_transposed(_outer: int, inner: int) -> bool:
    """Whether MKL with AVX-512 multiplies LEAST_ROWS rows or more with a transposed copy of a float32 matrix
    of these dimensions to the same bits as with the matrix itself. Measured."""
    return inner <= 2 * MKL_BLOCK or inner % MKL_BLOCK == 0


COPIED: dict[str, Callable[[int, int], bool]] = {
    "all": lambda _outer, _inner: True,
    "oneDNN's": is_onednns,
    "MKL's": keeps_bits_transposed,
}
"""Which weights of linear layers are copied while a wave is decoded, by their dimensions (outer, inner)."""


def padded_width(length: int) -> int:
    """Width to which a prompt of that length is padded: multiples of 4 up to 32, then of an eighth of the
    next power of two.

    At most 3 tokens, or a fifth of the width above 16, are padding.

    >>> [padded_width(n) for n in (1, 4, 5, 30, 33, 65, 1000)]
    [4, 4, 8, 32, 40, 80, 1024]
    """
    return in_steps(length, 8, least=4)


def in_steps(number: int, parts: int, *, least: int) -> int:
    """`number` rounded up to a multiple of `least` or, if that is more, of the next power of two / `parts`.

    >>> in_steps(600, 32, least=1)
    608
    """
    step = max(least, 2 ** (number - 1).bit_length() // parts)
    return -(-number // step) * step


def with_room(needed: int) -> int:
    """Tokens for which keys and values are allocated when `needed` must fit: a quarter more.

    >>> with_room(8), with_room(101)
    (24, 126)
    """
    return needed + max(_LEAST_ROOM, needed // 4)
