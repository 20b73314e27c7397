"""Samples one wave: each prompt is prefilled once, its cache is repeated for its samples, then the rows of
all prompts are decoded token by token.

In: a model, a wave's prompts, the source of random numbers. Out: tokens, log-probabilities and lengths of
its rows. Left out on purpose: which prompts share a wave (`layout.py`), the rows of one padded width
(`groups.py`), the model's states (`native.py`).

A row's numbers must not depend on its neighbours. Kernels for few rows sum in a different order: on CPUs with
AVX-512, a row of a matrix product has the same bits in any batch of at least 16 rows, and other bits in
smaller ones. So no product here has fewer rows (`LEAST_ROWS`): rows are repeated to fill up, and experts get
rows of zeros (`models/experts.py`). Elementwise kernels compute the tail of a tensor otherwise, which matters
where rows times width is no multiple of the vector's size. There, with several threads, or on a GPU, the last
bits may still differ.

Legend: Q prompts, B rows in the batch now, W rows of the wave, V vocabulary, L tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from hydraflow.generation.base import SamplingParams
from hydraflow.generation.forward import CachedForward
from hydraflow.generation.groups import PromptGroup, at_least
from hydraflow.generation.layout import Wave
from hydraflow.generation.routes import WaveRoutes
from hydraflow.generation.sampling import UniformDraws, choose
from hydraflow.generation.stopping import StopStrings
from hydraflow.models.decoding_sizes import LEAST_ROWS
from hydraflow.models.routers import HFRouters

_LEAVE_SHARE = 4
"""Finished rows are removed from the batch once they make up at least one in this many."""


@dataclass(frozen=True)
class WaveResult:
    """Rows of a wave, in the wave's order. Past its length a row holds arbitrary values."""

    tokens: Tensor
    """int64 (W, L)."""
    log_probs: Tensor
    """float32 (W, L)."""
    lengths: Tensor
    """int64 (W,), the end token included."""
    stopped: Tensor
    """bool (W,): ended by an end token or a stop string."""
    routes: list[Tensor] | None
    """(tokens of prompt and response but the last, L, K) experts of each row, if they were asked for."""


class WaveDecoder:
    """The state of one wave while it is sampled."""

    def __init__(
        self,
        forward: CachedForward,
        wave: Wave,
        prompts: Sequence[Tensor],
        draws: UniformDraws | None,
        routers: HFRouters | None,
    ):
        """prompts: Q rows, those of the wave; draws: None when greedy; routers: the model's, if experts are
        asked for."""
        self._forward, self._draws = forward, draws
        self._lengths = [len(prompt) for prompt in prompts]
        alike = [(width, list(some)) for width, some in groupby(range(len(prompts)), wave.widths.__getitem__)]
        self._groups = [PromptGroup(forward, [prompts[i] for i in some], width) for width, some in alike]
        """In the order of the batch's rows."""
        self._owner = torch.tensor(wave.owner, device=forward.device)
        self._slot = _enough(torch.arange(len(wave.owner), device=forward.device))
        """(B,) index in the wave of each row in the batch."""
        self._rows: Tensor | slice = slice(None) if len(self._slot) == len(wave.owner) else self._slot
        """The same for indexing; a slice while these are all rows of the wave in order."""
        self._routes = None if routers is None else WaveRoutes(routers)

    def run(
        self, params: SamplingParams, stop_tokens: Tensor, stop_strings: Sequence[StopStrings] = ()
    ) -> WaveResult:
        """Samples until every row has ended or `max_tokens` are reached.

        stop_tokens: int64 (S,). stop_strings: of each row, or none. FloatingPointError when the model's
        logits are not numbers.
        """
        rows, device = len(self._owner), self._forward.device
        ends = _Ends(params.max_tokens, rows, stop_tokens, stop_strings)
        tokens = torch.empty(rows, params.max_tokens, dtype=torch.int64, device=device)
        log_probs = torch.empty(rows, params.max_tokens, dtype=torch.float32, device=device)
        logits = self._prefill()
        for step in range(params.max_tokens):
            uniforms = None if self._draws is None else self._draws.at(step)[self._rows]
            token, logp = choose(logits, params, uniforms)
            tokens[self._rows, step], log_probs[self._rows, step] = token, logp
            token = tokens[self._rows, step]  # copies of a row share a slot
            alive = ~ends.note(step, self._rows, token)
            left = self._leave(alive)
            if left is not None:
                alive, token = alive[left], token[left]
            if step + 1 == params.max_tokens or not len(alive):
                break
            logits = self._step(token, step)
        tokens, log_probs, lengths = tokens[:, : step + 1], log_probs[:, : step + 1], ends.lengths
        in_use = torch.arange(step + 1, device=device)[None, :] < lengths[:, None]
        if not bool(torch.isfinite(log_probs[in_use]).all()):
            why = "its weights are damaged or have diverged"
            raise FloatingPointError(f"the model's logits are not finite numbers; {why}")
        routes = None
        if self._routes is not None:
            routes = self._routes.rows(self._lengths, self._owner.tolist(), lengths.tolist())
        return WaveResult(tokens, log_probs, lengths, ends.stopped, routes)

    def _prefill(self) -> Tensor:
        """Runs every prompt once: logits (B, V) after the prompt of each row."""
        note = None if self._routes is None else self._routes.note_prompts
        of_prompts = [group.prefill(note) for group in self._groups]
        prompt = self._owner[self._slot]  # (B,)
        self._select(prompt, [len(logits) for logits in of_prompts])
        return torch.cat(of_prompts)[prompt]

    def _select(self, rows: Tensor, sizes: Sequence[int]) -> None:
        """Keeps these rows (B,), ascending, of the groups' rows, numbered across groups of these `sizes`.
        Groups left without rows are dropped."""
        before = 0
        for group, size in zip(self._groups, sizes, strict=True):
            group.select(rows[(rows >= before) & (rows < before + size)] - before)
            before += size
        self._groups = [group for group in self._groups if group.rows]

    def _step(self, token: Tensor, step: int) -> Tensor:
        """Logits (B, V) after `token` (B,), the sampled token number `step`."""
        masks, positions = zip(*(group.grow(step) for group in self._groups))
        logits = self._forward.step(token, [group.cache for group in self._groups], masks, positions)
        if self._routes is not None:
            self._routes.note_step(self._slot)
        return logits

    def _leave(self, alive: Tensor) -> Tensor | None:
        """Removes finished rows from the batch once there are enough; returns the indices of the remaining
        ones, or None if none was removed."""
        count = int(alive.sum())
        if count == len(alive) or count * _LEAVE_SHARE > len(alive) * (_LEAVE_SHARE - 1):
            return None
        stay = alive.nonzero()[:, 0]
        if count:
            stay = _enough(stay)
        if len(stay) == len(alive):  # repeats would take their place
            return None
        self._rows = self._slot = self._slot[stay]
        self._select(stay, [group.rows for group in self._groups])
        return stay


def _enough(rows: Tensor) -> Tensor:
    """Row numbers in order, some repeated if they are too few for a matrix product."""
    return at_least(rows, LEAST_ROWS).sort().values


class _Ends:
    """Tracks which rows of a wave have ended."""

    def __init__(self, most: int, rows: int, tokens: Tensor, strings: Sequence[StopStrings]):
        self._tokens, self._strings = tokens, strings
        self.lengths = torch.full((rows,), most, device=tokens.device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=tokens.device)

    def note(self, step: int, slot: Tensor | slice, token: Tensor) -> Tensor:
        """bool (B,) whether each row has ended, given its token of this step. slot: indices in the wave."""
        before = self.stopped[slot]
        ends = torch.isin(token, self._tokens)
        if self._strings:
            ends |= self._end_strings(slot, token)
        self.lengths[slot] = torch.where(ends & ~before, step + 1, self.lengths[slot])
        ended = before | ends
        self.stopped[slot] = ended
        return ended

    def _end_strings(self, slot: Tensor | slice, token: Tensor) -> Tensor:
        stopped = self.stopped.tolist()
        rows: list[int] = list(range(len(stopped))) if isinstance(slot, slice) else slot.tolist()
        next_tokens = dict(zip(rows, token.tolist()))  # a row may occur several times
        found = {
            row: not stopped[row] and self._strings[row].ends_with(one) for row, one in next_tokens.items()
        }
        return torch.tensor([found[row] for row in rows], dtype=torch.bool, device=token.device)
