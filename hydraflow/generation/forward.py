"""One forward pass of any Hugging Face causal language model with a cache.

In: a model, tokens, a cache, a padding mask. Out: logits of the last positions. Left out on purpose: the
fused decoding step of some models (`lean.py`), which is called from here.

Legend: B rows, V vocabulary, L tokens so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from hydraflow.generation import attention
from hydraflow.generation.lean import LeanForward, is_known


class NoCache(ValueError):
    """The model does not support a KV cache."""


class CachedForward:
    """Calls any Hugging Face causal model with a cache, and a padding mask if it accepts one."""

    def __init__(self, model: PreTrainedModel):
        """Raises NoCache when the model's forward takes no KV cache."""
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
        self.mixes = self.pads and is_known(model)
        """Whether rows of several widths are decoded together."""
        self._lean: LeanForward | None = None
        """The fused decoding step, created at the first decoded token of a supported model."""

    def step(
        self,
        token: Tensor,
        caches: Sequence[Cache],
        masks: Sequence[Tensor | None],
        positions: Sequence[Tensor | None],
    ) -> Tensor:
        """Logits (B, V) after one more token of each row, (B,), first those of the first cache. masks:
        additive (b, 1, 1, L), with their positions (b, 1). Only one cache unless `mixes`."""
        if not self.mixes:
            return self(token[:, None], caches[0], masks[0], positions[0], 1)[:, 0]
        self._lean = self._lean or LeanForward(self.model)
        return self._lean(token, caches, masks, torch.cat(positions))  # type: ignore[arg-type]

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
