"""Draws one token per row from logits, with random numbers that depend only on a key.

In: logits of the last position, one uniform number per row. Out: the token and its log-probability. Left out
on purpose: torch's own generators, whose draws depend on the rows of the batch and on the device. A
counter-based generator gives every (prompt, sample, token) its own number, in any order.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from hydraflow.generation.base import Key, SamplingParams
from hydraflow.models.decoding_sizes import FILTERED_LOGITS

_BLOCK = 32
"""Tokens for which uniform numbers are drawn at a time."""
_TOP = 128
"""Number of most probable tokens that top-p looks at first."""
_BLOCK_TOKENS = 64
"""Tokens of the vocabulary whose weights are summed before one of them is drawn."""
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)


def philox(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Philox4x32-10: four random 32-bit words per counter (Salmon et al. 2011, "Parallel random numbers: as
    easy as 1, 2, 3").

    counters: uint64 (4, ...), keys: uint64 (2, ...), each holding 32-bit words. Returns uint64 (4, ...) of
    32-bit words.
    """
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _LOW, (first >> 32) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3])


def key_words(key: Key) -> np.ndarray:
    """Four 32-bit words, uint64 (4,), that identify a key of strings and integers; (1,) and ("1",) differ."""
    parts = [int(part) if isinstance(part, Integral) else str(part) for part in key]
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u4").astype(np.uint64)


class UniformDraws:
    """Uniform numbers of B rows, token after token: `at(t)` depends only on (key, sample number, t) of each
    row."""

    def __init__(
        self,
        keys: Sequence[Key],
        samples: np.ndarray,
        owner: np.ndarray,
        device: torch.device,
        *,
        sampled: int = 0,
    ):
        """keys: one per prompt; samples, owner: int (B,), the sample number of each row and its prompt's
        place in `keys`. sampled: tokens that the responses have already."""
        self._sampled = sampled
        words = np.stack([key_words(key) for key in keys], axis=1)[:, owner]
        self._key = words[:2, :, None]
        self._upper = words[2:, :, None]
        self._samples = np.asarray(samples).astype(np.uint64)[:, None]
        self._device = device
        self._block = -1
        self._uniforms = torch.empty(0)

    def at(self, token: int) -> Tensor:
        """float64 (B,) in [0, 1) for that token, counted from 0 after those that were sampled before."""
        block, offset = divmod(self._sampled + token, _BLOCK)
        if block != self._block:
            self._block = block
            self._uniforms = torch.from_numpy(self._draw(block)).to(self._device)
        return self._uniforms[offset]

    def _draw(self, block: int) -> np.ndarray:
        """Uniforms float64 (_BLOCK, B). A counter yields two of them: (sample, pair of tokens, two words of
        the key's hash)."""
        half = _BLOCK // 2
        rows = len(self._samples)
        pairs = np.arange(block * half, (block + 1) * half, dtype=np.uint64)[None, :]
        counters = np.stack(
            [np.broadcast_to(word, (rows, half)) for word in (self._samples, pairs, *self._upper)]
        )
        words = philox(counters, self._key)
        high, low = words[0::2] >> np.uint64(5), words[1::2] >> np.uint64(6)
        # (2, B, half): even tokens, odd tokens
        uniforms = (high * np.uint64(2**26) + low).astype(np.float64) / 2**53
        return np.ascontiguousarray(uniforms.transpose(2, 0, 1).reshape(_BLOCK, rows))


def choose(logits: Tensor, params: SamplingParams, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability at the temperature, before top-k and top-p.

    logits: (B, V); uniforms: float64 (B,), or None when greedy. Returns int64 (B,) and float32 (B,).
    """
    rows = max(1, FILTERED_LOGITS // logits.shape[1])
    if len(logits) <= rows:
        return _choose(logits, params, uniforms)
    numbers = [None] * -(-len(logits) // rows) if uniforms is None else uniforms.split(rows)
    parts = [_choose(part, params, number) for part, number in zip(logits.split(rows), numbers, strict=True)]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logp for _, logp in parts])


def _choose(logits: Tensor, params: SamplingParams, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if uniforms is None:
        logp = torch.log_softmax(logits, dim=-1)  # (B, V)
        tokens = logp.argmax(dim=-1, keepdim=True)
        return tokens[:, 0], logp.gather(1, tokens)[:, 0].float()
    logits = logits if params.temperature == 1 else logits / params.temperature
    most = logits.amax(dim=-1, keepdim=True)
    weights = (logits - most).exp_()  # (B, V)
    sums, kept = _block_sums(weights), keep(weights, params.top_k, params.top_p)
    tokens = draw(kept, uniforms, sums if kept is weights else None)[:, None]
    logp = (logits.gather(1, tokens) - most).double() - _total(sums).log()
    return tokens[:, 0], logp[:, 0].float()


def draw(weights: Tensor, uniforms: Tensor, sums: Tensor | None = None) -> Tensor:
    """Inverse-CDF sampling: the token (B,) of each row at which the running sum of its weights (B, V) reaches
    the fraction `uniforms`, float64 (B,), of their total; weights are proportional to probabilities. Picks a
    block by the blocks' sums, then a token in it: a running sum over all tokens would take longer than `exp`.
    `sums`: of the blocks, if they are known.

    >>> draw(torch.tensor([[1.0, 0.0, 3.0]]).repeat(3, 1), torch.tensor([0.2, 0.25, 0.999])).tolist()
    [0, 2, 2]
    """
    tokens = weights.shape[1]
    if tokens <= 2 * _BLOCK_TOKENS:
        return _Search(weights, uniforms[:, None]).found[:, 0]
    of_blocks = _Search(_block_sums(weights) if sums is None else sums, uniforms[:, None])
    first = of_blocks.found * _BLOCK_TOKENS
    places = first + torch.arange(_BLOCK_TOKENS, device=first.device)
    inside = weights.gather(1, places.clamp(max=tokens - 1)).masked_fill_(places >= tokens, 0)
    chosen = first + _Search(inside, of_blocks.inside()).found
    return chosen[:, 0].clamp(max=tokens - 1)  # beyond it only where weights are NaN


def _total(sums: Tensor) -> Tensor:
    """The sum float64 (B, 1) of each row, from those of its blocks: threads would split the sum of a single
    long row, and its last bits would depend on that."""
    return sums.sum(-1, keepdim=True, dtype=torch.float64)


def _block_sums(weights: Tensor) -> Tensor:
    """Sums (B, blocks) of each _BLOCK_TOKENS weights of a row (B, V); the last block may be shorter."""
    whole = weights.shape[1] // _BLOCK_TOKENS * _BLOCK_TOKENS
    sums = weights[:, :whole].unflatten(1, (-1, _BLOCK_TOKENS)).sum(-1)
    if whole == weights.shape[1]:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1)


class _Search:
    """The index at which the running sum of a row's weights (B, n) reaches the fraction `uniforms` (B, 1) of
    their total."""

    def __init__(self, weights: Tensor, uniforms: Tensor):
        self._weights, self._cumulative = weights, weights.cumsum(-1, dtype=torch.float64)
        total = self._cumulative[:, -1:].contiguous()
        self._target = uniforms * total
        found = torch.searchsorted(self._cumulative, self._target, right=True)
        # rounding may lift the target to the total; NaN sorts beyond it, and log-probabilities are then NaN
        found = torch.minimum(found, torch.searchsorted(self._cumulative, total))
        self.found = found.clamp_(max=weights.shape[1] - 1)
        """(B, 1), never one of weight 0."""

    def inside(self) -> Tensor:
        """How far into the weight that was found the target is, (B, 1) from 0 to 1."""
        weight = self._weights.gather(1, self.found).double()
        return 1 - ((self._cumulative.gather(1, self.found) - self._target) / weight).clamp(0, 1)


def keep(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Weights (B, V), proportional to probabilities, with 0 for tokens that top-k or top-p filter out.

    top-p counts within what top-k kept, as vLLM does; ties go to the smaller token id.

    >>> keep(torch.tensor([[0.5, 0.3, 0.2]]), -1, 0.6).tolist()
    [[0.5, 0.30000001192092896, 0.0]]
    """
    if 0 < top_k < weights.shape[1]:
        least = weights.topk(top_k, dim=-1).values[:, -1:]
        # compared by value, so that ties with the k-th token all stay
        weights = torch.where(weights >= least, weights, 0.0)
    if top_p < 1:
        least, equal = _least_kept(weights, top_p * _total(_block_sums(weights)), _TOP)
        ties = weights == least
        if bool((ties.sum(-1, keepdim=True) > equal).any()):
            ties &= ties.cumsum(-1) <= equal
        weights = torch.where((weights > least) | ties, weights, 0.0)
    return weights


def _least_kept(weights: Tensor, share: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The smallest weight (B, 1) that top-p keeps: that of the fewest largest weights of a row whose sum
    reaches `share` (B, 1); and how many weights of that size it keeps. Sorts only the `count` largest, or
    more if those do not suffice, because sorting a whole vocabulary takes twenty times as long."""
    count = min(count, weights.shape[1])
    ranked = weights.topk(count, dim=-1).values
    before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
    kept = (before < share).sum(-1, keepdim=True).clamp_(min=1)
    least = ranked.gather(1, kept - 1)
    equal = kept - (ranked > least).sum(-1, keepdim=True)
    short = (kept == count)[:, 0].nonzero()[:, 0]
    if count < weights.shape[1] and len(short):
        least[short], equal[short] = _least_kept(weights[short], share[short], 8 * count)
    return least, equal
