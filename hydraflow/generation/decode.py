"""Samples one wave: prompts padded to one width are prefilled once, their KV caches are repeated for the
samples, then rows are decoded token by token.

In: a model, a wave's prompts, the source of random numbers. Out: tokens, log-probabilities and lengths of
its rows. Left out on purpose: grouping (`layout.py`), the model's states (`native.py`).

A row's numbers must not depend on its neighbours. Kernels for few rows sum in a different order: on CPUs with
AVX-512, a row of a matrix product has the same bits in any batch of at least 16 rows, and other bits in
smaller ones. So no product here has fewer rows (`LEAST_ROWS`); rows are repeated to fill up. With several
threads, or on a GPU, the last bits may still differ.

Legend: Q prompts, B rows in the batch now, W rows of the wave, P padded prompt, V vocabulary, L tokens so
far.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from hydraflow.generation import attention
from hydraflow.generation.base import SamplingParams
from hydraflow.generation.cache import join_rows, new_cache
from hydraflow.generation.lean import LeanForward, is_known
from hydraflow.generation.routes import WaveRoutes
from hydraflow.generation.sampling import UniformDraws, choose
from hydraflow.generation.stopping import StopStrings
from hydraflow.models.linear import LEAST_ROWS
from hydraflow.models.routers import HFRouters

_PREFILL_TOKENS = 8192
"""Prompt tokens per forward pass; more would need memory without being faster."""
_LEAVE_SHARE = 4
"""Finished rows are removed from the batch once they make up at least one in this many."""


@dataclass(frozen=True)
class WaveResult:
    """Rows of a wave in its own order. Past its length a row holds arbitrary values."""

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


class NoCache(ValueError):
    """A model without a KV cache."""


class CachedForward:
    """Calls any Hugging Face causal model with a cache, and a padding mask if it accepts one."""

    def __init__(self, model: PreTrainedModel):
        """NoCache when the model takes no key-value cache in its forward."""
        accepted = inspect.signature(model.forward).parameters
        if "past_key_values" not in accepted:
            raise NoCache(f"{type(model).__name__} takes no past_key_values")
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = model.dtype
        self._keeps_last = "logits_to_keep" in accepted
        self.pads = "position_ids" in accepted and _attends_to_all(model)
        """Whether prompts are padded to a common width. If not, only prompts of equal length run together,
        without a mask."""
        if self.pads:
            attention.register_attention()
        self._lean: LeanForward | None = None
        """The fused decoding step, created at the first decoded token of a supported model."""

    def step(self, token: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Logits (B, V) after one more token of each row, (B,). mask: additive (B, 1, 1, L)."""
        if mask is None or positions is None or not is_known(self.model):
            return self(token[:, None], cache, mask, positions, 1)[:, 0]
        self._lean = self._lean or LeanForward(self.model)
        return self._lean(token, cache, mask, positions)

    def drop_weights(self) -> None:
        """Drops all references to weights, which are about to be replaced."""
        self._lean = None

    def __call__(
        self, ids: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor | None, last: int
    ) -> Tensor:
        """Logits of the last positions, (B, last, V). ids: (B, L new); mask: additive (B, 1, L new, L);
        positions as ids."""
        extra: dict[str, object] = {"attention_mask": mask, "position_ids": positions} if self.pads else {}
        if self._keeps_last:
            # an index, not a count: a slice of the hidden states is not contiguous, and torch would then run
            # the head row by row
            extra["logits_to_keep"] = torch.arange(ids.shape[1] - last, ids.shape[1], device=ids.device)
        with attention.in_use(self.model) if self.pads else nullcontext():
            return self.model(input_ids=ids, past_key_values=cache, use_cache=True, **extra).logits[:, -last:]


def _attends_to_all(model: PreTrainedModel) -> bool:
    """Whether one additive mask fits all layers: no sliding window, no recurrent state, and positions are an
    input."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if not getattr(config, "layer_types", None) else None
    rotary = getattr(config, "rope_parameters", None) is not None
    return (
        rotary
        and window is None
        and layer_types == {"full_attention"}
        and model._supports_attention_backend
        and not getattr(model, "_is_stateful", False)
        and config._attn_implementation == "sdpa"
    )


class WaveDecoder:
    """The state of one wave while it is sampled."""

    def __init__(
        self,
        forward: CachedForward,
        prompts: Sequence[Tensor],
        owner: Sequence[int],
        width: int,
        draws: UniformDraws | None,
        routers: HFRouters | None = None,
    ):
        """prompts: Q rows of at most `width` tokens; owner: for each of W rows its prompt; draws: None when
        greedy; routers: the model's, if experts are asked for."""
        self._forward, self._draws, self._width = forward, draws, width
        device = forward.device
        lengths = torch.tensor([len(p) for p in prompts])
        columns = torch.arange(width)
        self._ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        self._ids[columns[None, :] >= width - lengths[:, None]] = torch.cat(list(prompts)).cpu()
        self._ids = self._ids.to(device)
        self._length = lengths.to(device)
        self._padding = self._key_padding(self._width - self._length) if forward.pads else None
        """Additive mask over the cache's tokens, first (Q, P), then (B, L)."""
        self._owner = torch.tensor(owner, device=device)
        self._slot = _at_least(torch.arange(len(owner), device=device), LEAST_ROWS)
        """(B,) index in the wave of each row in the batch."""
        self._routes = None if routers is None else WaveRoutes(routers)
        self._moved: Tensor | None = None
        """(B,) cache rows that the next forward pass needs, if they are not the current ones."""

    def run(
        self, params: SamplingParams, stop_tokens: Tensor, stop_strings: Sequence[StopStrings] = ()
    ) -> WaveResult:
        """Samples until every row has ended or `max_tokens` are reached.

        stop_tokens: int64 (S,). stop_strings: of each row, or none. FloatingPointError when the model's
        logits are not numbers.
        """
        rows, device = len(self._owner), self._forward.device
        prompt_lengths = self._length  # permuted together with the rows of the batch
        ends = _Ends(params.max_tokens, rows, stop_tokens, stop_strings)
        tokens = torch.empty(rows, params.max_tokens, dtype=torch.int64, device=device)
        log_probs = torch.empty(rows, params.max_tokens, dtype=torch.float32, device=device)
        prompt_logits, self._cache = self._prefill()
        logits = prompt_logits[self._owner[self._slot]]  # (B, V)
        self._moved = self._owner[self._slot]
        for step in range(params.max_tokens):
            uniforms = None if self._draws is None else self._draws.at(step)[self._slot]
            token, logp = choose(logits, params, uniforms)
            tokens[self._slot, step], log_probs[self._slot, step] = token, logp
            alive = ~ends.note(step, self._slot, tokens[self._slot, step])
            left = self._leave(alive)
            if left is not None:
                alive, token = alive[left], token[left]
            if step + 1 == params.max_tokens or not len(alive):
                break
            logits = self._step(token, step)
        found = _result(tokens[:, : step + 1], log_probs[:, : step + 1], ends)
        if self._routes is None:
            return found
        of_rows = self._routes.rows(prompt_lengths.tolist(), self._owner.tolist(), found.lengths.tolist())
        return replace(found, routes=of_rows)

    def _prefill(self) -> tuple[Tensor, Cache]:
        """Runs every prompt once: logits after it, (Q, V), and the prompts' cache."""
        pads = self._width - self._length  # (Q,)
        per_forward = max(1, _PREFILL_TOKENS // self._width) if self._forward.pads else len(self._ids)
        logits, caches = [], []
        for ids, pad in zip(self._ids.split(per_forward), pads.split(per_forward)):
            part_logits, cache = self._prefill_part(ids, pad)
            logits.append(part_logits)
            caches.append(cache)
        return torch.cat(logits), join_rows(caches)

    def _prefill_part(self, ids: Tensor, pad: Tensor) -> tuple[Tensor, Cache]:
        prompts = len(ids)
        enough = _at_least(torch.arange(prompts, device=ids.device), -(-LEAST_ROWS // self._width))
        ids, pad = ids[enough], pad[enough]
        cache = new_cache(self._forward.model.config, growing=self._forward.pads)
        mask = positions = None
        if self._forward.pads:
            padding = self._key_padding(pad)[:, None, None, :]
            mask = padding + padding.new_full((self._width, self._width), -torch.inf).triu_(1)
            # padding attends to itself: a mask row of only -inf gives NaN, which would spread via the cache
            mask.diagonal(dim1=-2, dim2=-1).zero_()
            positions = (torch.arange(self._width, device=ids.device)[None, :] - pad[:, None]).clamp_(min=0)
        last = -(-LEAST_ROWS // len(ids))
        logits = self._forward(ids, cache, mask, positions, last)[:prompts, -1]
        if self._routes is not None:
            self._routes.note_prompts(prompts, self._width)
        return logits, cache

    def _key_padding(self, pad: Tensor) -> Tensor:
        """Additive mask over a prompt's tokens, (Q, P): -inf at padding."""
        columns = torch.arange(self._width, device=pad.device)
        mask = torch.zeros(len(pad), self._width, dtype=self._forward.dtype, device=pad.device)
        return mask.masked_fill_(columns[None, :] < pad[:, None], -torch.inf)

    def _step(self, token: Tensor, step: int) -> Tensor:
        """Logits (B, V) after `token` (B,), the sampled token number `step`."""
        if self._moved is not None:
            self._cache.reorder_cache(self._moved)  # type: ignore[arg-type]
            if self._padding is not None:
                self._padding = self._padding[self._moved]
                self._length = self._length[self._moved]
            self._moved = None
        mask = positions = None
        if self._padding is not None:
            self._padding = torch.nn.functional.pad(self._padding, (0, 1))  # (B, L)
            mask, positions = self._padding[:, None, None, :], (self._length + step)[:, None]
        logits = self._forward.step(token, self._cache, mask, positions)
        if self._routes is not None:
            self._routes.note_step(self._slot)
        return logits

    def _leave(self, alive: Tensor) -> Tensor | None:
        """Removes finished rows from the batch once there are enough; returns the indices of the remaining
        ones, or None if none was removed."""
        count = int(alive.sum())
        if count == len(alive) or (count and count * _LEAVE_SHARE > len(alive) * (_LEAVE_SHARE - 1)):
            return None
        stay = alive.nonzero()[:, 0]
        if count:
            stay = _at_least(stay, LEAST_ROWS)
        if count and len(stay) == len(alive):
            return None
        self._slot = self._slot[stay]
        self._moved = stay if self._moved is None else self._moved[stay]
        return stay


def _at_least(rows: Tensor, least: int) -> Tensor:
    """Row numbers, repeated from the start until there are `least`."""
    if len(rows) >= least:
        return rows
    return rows.repeat(-(-least // len(rows)))[:least]


class _Ends:
    """Tracks which rows of a wave have ended."""

    def __init__(self, most: int, rows: int, tokens: Tensor, strings: Sequence[StopStrings]):
        self._tokens, self._strings = tokens, strings
        self.lengths = torch.full((rows,), most, device=tokens.device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=tokens.device)

    def note(self, step: int, slot: Tensor, token: Tensor) -> Tensor:
        """bool (B,) whether each row has ended, given its token of this step. slot: indices in the wave."""
        before = self.stopped[slot]
        ends = torch.isin(token, self._tokens)
        if self._strings:
            ends |= self._end_strings(slot, token)
        self.lengths[slot] = torch.where(ends & ~before, step + 1, self.lengths[slot])
        self.stopped[slot] = before | ends
        return before | ends

    def _end_strings(self, slot: Tensor, token: Tensor) -> Tensor:
        stopped = self.stopped.tolist()
        next_tokens = dict(zip(slot.tolist(), token.tolist()))  # a row may occur several times
        found = {
            row: not stopped[row] and self._strings[row].ends_with(one) for row, one in next_tokens.items()
        }
        return torch.tensor([found[row] for row in slot.tolist()], dtype=torch.bool, device=token.device)


def _result(tokens: Tensor, log_probs: Tensor, ends: _Ends) -> WaveResult:
    in_use = torch.arange(tokens.shape[1], device=tokens.device)[None, :] < ends.lengths[:, None]
    if not bool(torch.isfinite(log_probs[in_use]).all()):
        raise FloatingPointError(
            "the model's logits are not finite numbers; its weights are damaged or have diverged"
        )
    return WaveResult(tokens, log_probs, ends.lengths, ends.stopped, None)
