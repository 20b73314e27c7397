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
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from hydraflow.generation import attention
from hydraflow.generation.lean import LeanForward, is_known
from hydraflow.generation.reordered import KeepsCopy, reordering_linears
from hydraflow.generation.widths import joint_cache, takes_joint_cache
from hydraflow.models.config_keys import read
from hydraflow.models.loading import PLAIN_ATTENTION


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
        self._balances = "output_router_logits" in accepted
        """Whether the model may compute a balancing loss, which needs another mask than ours."""
        kinds = _layer_types(model) if "position_ids" in accepted else set()
        self.pads = kinds == {"full_attention"} and _implementation(model) == "sdpa"
        """Whether prompts are padded to a common width: one additive mask fits all layers. If not, only
        prompts of equal length have the same width, and there is no mask."""
        self._is_lean = self.pads and is_known(model)
        is_plain = bool(kinds) and kinds <= PLAIN_ATTENTION
        self.mixes = self._is_lean or (is_plain and takes_joint_cache(model))
        """Whether rows of several widths are decoded together."""
        self._own_attention = self.pads or self.mixes
        """Whether attention is ours (`attention.py`)."""
        if self._own_attention:
            attention.register_attention()
        self._lean: LeanForward | None = None
        """The fused decoding step, created at the first decoded token of a supported model."""
        self._keepers: Sequence[KeepsCopy] | None = None
        """Parts that keep a copy of their weight; None before a wave's first step."""

    def step(
        self,
        token: Tensor,
        caches: Sequence[Cache],
        masks: Sequence[Tensor | None],
        positions: Sequence[Tensor | None],
    ) -> Tensor:
        """Logits (B, V) after one more token of each row, (B,), first those of the first cache. masks:
        additive (b, 1, 1, L) if it `pads`. positions: (b, 1) if it `mixes`; else there is one cache."""
        if self._is_lean:
            self._lean = self._lean or LeanForward(self.model)
        if self._keepers is None:
            self._keepers = reordering_linears(self.model) if self._lean is None else self._lean.keepers
            for part in self._keepers:
                part.keep_copy()
        if self._lean is not None:
            return self._lean(token, caches, masks, torch.cat(positions))  # type: ignore[arg-type]
        if len(caches) == 1:
            return self(token[:, None], caches[0], masks[0], positions[0], 1)[:, 0]
        cache = joint_cache(caches, masks, [len(some) for some in positions])  # type: ignore[arg-type]
        # transformers passes a mask of four dimensions on as it is, and each group has its own
        unused = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        return self(token[:, None], cache, unused, torch.cat(positions), 1)[:, 0]  # type: ignore[arg-type]

    def drop_copies(self) -> None:
        """Drops the copies of weights that steps make. Call it before weights change."""
        for part in self._keepers or ():
            part.drop_copy()
        self._keepers = None

    def drop_weights(self) -> None:
        """Drops all references to weights, which are about to be replaced."""
        self._lean = None

    def __call__(
        self, ids: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor | None, last: int
    ) -> Tensor:
        """Logits of the last positions, (B, last, V). ids: (B, L new); mask: additive (B, 1, L new, L);
        positions as ids. Both None: the model computes its own, for rows without padding."""
        named = {"attention_mask": mask, "position_ids": positions}
        extra: dict[str, object] = {name: given for name, given in named.items() if given is not None}
        if self._balances:
            extra["output_router_logits"] = False
        if self._keeps_last:
            # an index, not a count: a slice of the hidden states is not contiguous, and torch would then run
            # the head row by row
            extra["logits_to_keep"] = torch.arange(ids.shape[1] - last, ids.shape[1], device=ids.device)
        with attention.in_use(self.model) if self._own_attention else nullcontext():
            return self.model(input_ids=ids, past_key_values=cache, use_cache=True, **extra).logits[:, -last:]


def _implementation(model: PreTrainedModel) -> str | None:
    """Name of the model's attention implementation."""
    return model.config.get_text_config()._attn_implementation


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether positions are rotary, or learned as in GPT-2. Other models (ALiBi, OPT) derive them from the
    mask."""
    is_rotary = getattr(model.config.get_text_config(), "rope_parameters", None) is not None
    return is_rotary or isinstance(getattr(model.base_model, "wpe", None), nn.Embedding)


def _layer_types(model: PreTrainedModel) -> set[str]:
    """The types of a model's layers, if it uses the positions that it is given, has no recurrent state, and
    has transformers' `sdpa` or its own eager attention; else none."""
    config = model.config.get_text_config()
    if (
        not _takes_positions(model)
        or not model._supports_attention_backend
        or getattr(model, "_is_stateful", False)
        or _implementation(model) not in attention.OURS
        or getattr(config, "reorder_and_upcast_attn", False)  # only under the name `eager`
    ):
        return set()
    if found := read(config, "layer_types"):
        return set(found)
    return {"full_attention" if read(config, "sliding_window") is None else "sliding_attention"}
