"""Chunks of tokens whose logits exist at one time: their size, their copies, and the chunks themselves."""

from __future__ import annotations

from collections.abc import Iterator

LOGITS_BYTES = 512 * 2**20
"""Maximum bytes of one copy of a chunk's logits in the dtype of the computation, float32 or float64."""

BLOCK_BYTES = 2**20
"""Bytes of a block's log-probabilities on a CPU: a few such tensors fit into the cache of one core."""
LEAST_BLOCK = 16
"""Minimum number of tokens of a full block. With very few, several threads share the sum over a large
vocabulary, and its last bits depend on their number."""

POST_PROCESSING = {
    "logits_scaling": 1,
    "logit_scale": 1,
    "lm_head_multiplier": 1,
    "final_logit_softcapping": 2,
    "logits_soft_cap": 2,
}
"""Keys of config.json by which `heads.shape_logits` processes logits, in this order -> copies of them that it
makes; the backward pass makes as many more."""


def head_chunk(chunk_tokens: int, vocabulary: int, number: int) -> int:
    """Tokens of a chunk: fsdp_config.head_chunk_tokens, or fewer where the vocabulary is large. `number`:
    bytes of a number in the computation.

    >>> head_chunk(2048, 32_768, 2), head_chunk(2048, 151_936, 2), head_chunk(2048, 151_936, 8)
    (2048, 883, 441)
    """
    return max(1, min(chunk_tokens, LOGITS_BYTES // (vocabulary * max(4, number))))


def block_tokens(vocabulary: int, number: int, device_type: str) -> int:
    """Tokens whose log-probabilities one thread computes at one time: on a CPU as many as stay in the cache,
    on a GPU all tokens of a chunk. `number`: bytes of a number.

    >>> block_tokens(512, 4, "cpu"), block_tokens(151_936, 4, "cpu")
    (512, 16)
    """
    if device_type != "cpu":
        return 2**31
    return max(LEAST_BLOCK, BLOCK_BYTES // (vocabulary * number))


def chunk_slices(count: int, size: int) -> Iterator[slice]:
    """The chunks of `count` tokens; a single empty one if there are none, because ranks must run the same
    collectives.

    >>> list(chunk_slices(5, 3)), list(chunk_slices(0, 3))
    ([slice(0, 3, None), slice(3, 6, None)], [slice(0, 3, None)])
    """
    for start in range(0, max(1, count), size):
        yield slice(start, start + size)


def equal_slices(count: int, most: int) -> Iterator[slice]:
    """As few slices of at most `most` as cover `count`, whose sizes differ by at most one; a single empty one
    if there are none.

    >>> list(equal_slices(9, 4)), list(equal_slices(0, 4))
    ([slice(0, 3, None), slice(3, 6, None), slice(6, 9, None)], [slice(0, 0, None)])
    """
    number = max(1, -(-count // most))
    for index in range(number):
        yield slice(index * count // number, (index + 1) * count // number)
