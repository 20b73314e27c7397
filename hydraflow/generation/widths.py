"""One decoding step of rows whose caches differ in length, through transformers' own layers.

In: the caches of several groups of rows, each with its mask. Out: one cache for transformers, whose keys and
values are lists: `attention.py` computes each group alone, everything else of a layer has all rows. Left out
on purpose: layers that compute with what the cache returns (latent attention), which need one tensor.

Legend: B rows of all groups, b rows of one, k key-value heads, L tokens of a group so far, d head dimension.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from transformers import Cache, PreTrainedModel

_UPDATE = re.compile(r"\b\w*(?:past|cache)\w*\.update\(")
"""What appends to a cache."""
_DIRECT = re.compile(
    r"(?P<key>key(?:_states)?), (?P<value>value(?:_states)?) = \w+"
    r"\.update\((?P=key), (?P=value), self\.layer_idx\)\s+"
    # bookkeeping of cross-attention, which does not run without encoder states
    r"(?:# [^\n]+\s+if (?:self\.)?is_cross_attention:\s+\w+\.is_updated\[self\.layer_idx\] = True\s+)?"
    # later layers attend to these keys and values unchanged, after `.to(device)`
    r"(?:if self\.store_full_length_kv:\s+shared_kv_states\[[^\]]+\] = (?P=key), (?P=value)\s+)?"
    r"(?:using_eager = [^\n]+\s+)?"
    r"attention_interface: Callable = ALL_ATTENTION_FUNCTIONS\.get_interface\("
    r"\s+self\.config\._attn_implementation, eager_attention_forward\s+\)\s+"
    r"(?:if using_eager and [^:]+:\s+[^()]+\([^)]*\)\s+else:\s+)?(?:# [^\n]+\s+)?"
    r"\w+, \w+ = attention_interface\("
    r"\s+self,\s+query(?:_states)?,\s+(?P=key),\s+(?P=value),\s+(?:attention_mask=)?attention_mask,"
)
"""transformers' usual attention: what the cache returns goes to the attention function as it is, here and in
the layers that share it."""


class KeysOfGroups(NamedTuple):
    """Keys of all groups, and which of them their rows attend to."""

    parts: Sequence[Tensor]
    """(b, k, L, d) each."""
    masks: Sequence[Tensor | None]
    """Additive, (b, 1, 1, L) each; None: every row attends to all of its keys."""

    def to(self, device: object) -> KeysOfGroups:
        """Itself, for layers that attend to another layer's keys: an engine has one device."""
        return self


class ValuesOfGroups(list[Tensor]):
    """Values of all groups, (b, k, L, d) each."""

    def to(self, device: object) -> ValuesOfGroups:
        """Itself, for layers that attend to another layer's keys: an engine has one device."""
        return self


class _LayerOfGroups:
    """One layer of a `joint_cache`."""

    def __init__(
        self, cached: Sequence[Cache], layer: int, masks: Sequence[Tensor | None], sizes: Sequence[int]
    ):
        self._layers = [cache.layers[layer] for cache in cached]
        self._masks, self._sizes = masks, list(sizes)

    def update(self, keys: Tensor, values: Tensor) -> tuple[KeysOfGroups, ValuesOfGroups]:
        """Appends (B, k, 1, d); returns all tokens so far, by group."""
        parts = zip(self._layers, keys.split(self._sizes), values.split(self._sizes), strict=True)
        found = [layer.update(k, v) for layer, k, v in parts]  # type: ignore[union-attr]
        return KeysOfGroups([k for k, _ in found], self._masks), ValuesOfGroups(v for _, v in found)


def joint_cache(caches: Sequence[Cache], masks: Sequence[Tensor | None], sizes: Sequence[int]) -> Cache:
    """A cache for the rows of all groups together, for one step; only for a model that `takes_joint_cache`.
    sizes: rows of each group."""
    layers = [_LayerOfGroups(caches, layer, masks, sizes) for layer in range(len(caches[0].layers))]
    return Cache(layers=layers)  # type: ignore[arg-type]


def takes_joint_cache(model: PreTrainedModel) -> bool:
    """Whether all layers pass what the cache returns to the attention function. Not for keys and values of
    different widths: the last bits of a row would depend on the number of rows (`attention.py`)."""
    if getattr(model.config.get_text_config(), "v_head_dim", None) is not None:
        return False
    readers = {type(module).forward for module in model.modules() if hasattr(module, "layer_idx")}
    try:
        codes = [inspect.getsource(reader) for reader in readers]
    except (OSError, TypeError):  # code without a file
        return False
    attentions = [code for code in codes if _UPDATE.search(code)]
    return bool(attentions) and all(map(_DIRECT.search, attentions))
