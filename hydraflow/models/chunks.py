"""How many tokens' logits exist at one time, and in how many copies."""

from __future__ import annotations

LOGITS_BYTES = 512 * 2**20
"""Most bytes of one copy of a chunk's logits, as they are computed with: float32, or float64."""

POST_PROCESSING = {
    "logits_scaling": 1,
    "logit_scale": 1,
    "lm_head_multiplier": 1,
    "final_logit_softcapping": 2,
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
