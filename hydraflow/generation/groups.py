"""The rows of a wave whose prompts are padded to one width: their prompts' forward pass, their cache, and the
mask of their next token.

In: a model's forward pass with a cache, prompts. Out: logits after the prompts; then, for each decoded token,
a cache and a mask for the rows that are left. Rows of other widths are decoded in the same forward passes,
but their keys differ in number, so attention is computed for each width alone. Left out on purpose: sampling
(`decode.py`), which widths there are (`layout.py`).

Legend: Q prompts, B rows of the group in the batch now, P padded prompt, V vocabulary, L tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import Cache

from hydraflow.generation.cache import join_rows, new_cache
from hydraflow.generation.forward import CachedForward
from hydraflow.models.decoding_sizes import LEAST_ROWS, PREFILL_TOKENS


class PromptGroup:
    """Prompts of one padded width and the rows sampled from them."""

    def __init__(self, forward: CachedForward, prompts: Sequence[Tensor], width: int):
        """prompts: Q rows of at most `width` tokens."""
        self._forward, self._width = forward, width
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        columns = torch.arange(width)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        ids[columns[None, :] >= width - lengths[:, None]] = torch.cat(list(prompts)).cpu()
        self._ids = ids.to(forward.device)
        self._length = lengths.to(forward.device)
        self._padding = self._key_padding(width - self._length) if forward.pads else None
        """Additive mask over the cache's tokens, first (Q, P), then (B, L)."""
        self._moved: Tensor | None = None
        """(B,) cache rows that the next forward pass needs, if they are not the current ones."""
        self.cache: Cache
        self.rows = 0
        """B."""

    def prefill(self, note: Callable[[int, int], None] | None = None) -> Tensor:
        """Runs every prompt once; returns the logits after it, (Q, V). note: called after each forward pass
        with its number of prompts and their width."""
        pads = self._width - self._length  # (Q,)
        # a part with fewer repeats prompts, which only the last one may
        least, most = -(-LEAST_ROWS // self._width), PREFILL_TOKENS // self._width
        per_forward = max(least, most) if self._forward.pads else len(self._ids)
        logits, caches = [], []
        for ids, pad in zip(self._ids.split(per_forward), pads.split(per_forward)):
            part_logits, cache = self._prefill_part(ids, pad)
            logits.append(part_logits)
            caches.append(cache)
            if note is not None:
                note(len(ids), self._width)
        self.cache = join_rows(caches)
        return torch.cat(logits)

    def _prefill_part(self, ids: Tensor, pad: Tensor) -> tuple[Tensor, Cache]:
        prompts = len(ids)
        # repeats prompts, and computes more logits than needed, so that every product has LEAST_ROWS rows
        enough = at_least(torch.arange(prompts, device=ids.device), -(-LEAST_ROWS // self._width))
        ids, pad = ids[enough], pad[enough]
        forward = self._forward
        cache = new_cache(forward.model.config, pads=forward.pads, mixes=forward.mixes)
        mask = positions = None
        if forward.pads:
            padding = self._key_padding(pad)[:, None, None, :]
            mask = padding + padding.new_full((self._width, self._width), -torch.inf).triu_(1)
            # padding attends to itself: a mask row of only -inf gives NaN, which would spread via the cache
            mask.diagonal(dim1=-2, dim2=-1).zero_()
            positions = (torch.arange(self._width, device=ids.device)[None, :] - pad[:, None]).clamp_(min=0)
        last = -(-LEAST_ROWS // len(ids))
        return forward(ids, cache, mask, positions, last)[:prompts, -1], cache

    def _key_padding(self, pad: Tensor) -> Tensor:
        """Additive mask over a prompt's tokens, (Q, P): -inf at padding."""
        columns = torch.arange(self._width, device=pad.device)
        mask = torch.zeros(len(pad), self._width, dtype=self._forward.dtype, device=pad.device)
        return mask.masked_fill_(columns[None, :] < pad[:, None], -torch.inf)

    def select(self, rows: Tensor) -> None:
        """Sets the rows (B,) of the next forward pass: at first indices of prompts, later of current rows."""
        self._moved = rows if self._moved is None else self._moved[rows]
        self.rows = len(rows)

    def grow(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Makes room for one more token of each row, the sampled token number `step`. Returns the additive
        mask (B, 1, 1, L), if the forward pass `pads`, and the positions (B, 1), if it `mixes`."""
        if self._moved is not None:
            self.cache.reorder_cache(self._moved)  # type: ignore[arg-type]
            self._length = self._length[self._moved]
            if self._padding is not None:
                self._padding = self._padding[self._moved]
            self._moved = None
        positions = (self._length + step)[:, None]
        if self._padding is None:
            return None, positions if self._forward.mixes else None
        self._padding = torch.nn.functional.pad(self._padding, (0, 1))  # (B, L)
        return self._padding[:, None, None, :], positions


def at_least(rows: Tensor, least: int) -> Tensor:
    """Row numbers, repeated from the start until there are `least`.

    >>> at_least(torch.tensor([3, 5]), 5).tolist()
    [3, 5, 3, 5, 3]
    """
    if len(rows) >= least:
        return rows
    return rows.repeat(-(-least // len(rows)))[:least]
