"""The decoding step of Llama-like models: transformers' operations in the same order, but fewer of them.

In: the sampled tokens, the caches of rows of one or more lengths, additive masks. Out: the next logits, on a
CPU bit-identical to those of the model's own forward with our attention: a matrix product of a few dozen
columns or more has the same bits as part of a larger one. Only attention is computed for each cache alone.
Queries, keys and values are one product, and so are gate and up. The model's own weights become views of the
joined ones, so weight updates write into these directly. What is the same in every step of a wave, such as
the rotations of positions, is computed once and kept until the wave ends. Left out on purpose: prompts, and
models of any other class, which run their own forward (`forward.py`).

Legend: B rows, H hidden size, h heads of queries, k heads of keys and values, d head dimension, L tokens so
far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from hydraflow.generation.attention import attend
from hydraflow.generation.reordered import KeepsCopy, joined, reordering_linears
from hydraflow.models.decoding_sizes import with_room
from hydraflow.models.gated import SILU

_CLASSES = {
    f"{name}ForCausalLM" for name in ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"]
}
"""transformers' classes whose layers are norm, attention, norm, gated MLP or mixture of experts, and nothing
else. By name, as importing them all takes time."""
_VECTORS = 64
"""Numbers that elementwise kernels compute together, or a multiple of them."""


def is_known(model: PreTrainedModel) -> bool:
    """Whether `LeanForward` is equivalent to this model's forward; a subclass of a known class may not be."""
    kind = type(model)
    return kind.__module__.startswith("transformers.models.") and kind.__name__ in _CLASSES


class LeanForward:
    """The decoding step of a model. Joins its weights; they stay the model's parameters."""

    def __init__(self, model: PreTrainedModel):
        backbone: Any = model.base_model
        self._backbone = backbone
        self._head = model.get_output_embeddings()
        self._norm, self._rotations = _Norm(backbone.norm), _Rotations(backbone.rotary_emb)
        self._layers = [_Layer(layer) for layer in backbone.layers]
        self.keepers: list[KeepsCopy] = [
            part
            for part in (
                self._head,
                self._rotations,
                *(part for layer in self._layers for part in layer.parts),
            )
            if isinstance(part, KeepsCopy)
        ]
        """What can keep copies of weights from one step to the next."""

    def __call__(
        self, token: Tensor, caches: Sequence[Cache], masks: Sequence[Tensor], positions: Tensor
    ) -> Tensor:
        """Logits (B, V). token: (B,), first those of the first cache; masks: additive (b, 1, 1, L) with the
        new token, one for each cache; positions: (B, 1)."""
        x = self._backbone.embed_tokens(token)  # (B, H)
        cos, sin = self._rotations(x, positions, max(mask.shape[-1] for mask in masks))
        for layer, *cached in zip(self._layers, *(cache.layers for cache in caches), strict=True):
            x = layer(x, cached, masks, cos, sin)
        return self._head(self._norm(x))  # type: ignore[misc]


class _Layer:
    def __init__(self, layer: Any):
        attention = layer.self_attn
        self._head_dim, self._scale = attention.head_dim, attention.scaling
        self._keys = attention.k_proj.out_features // self._head_dim
        self._before, self._between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = attention.o_proj
        self._mlp = _GatedMLP(layer.mlp) if hasattr(layer.mlp, "gate_proj") else _Mixture(layer.mlp)
        heads = attention.q_proj.out_features // self._head_dim
        has_norms = hasattr(attention, "q_norm")
        self._of_heads = (
            _HeadNorms(attention.q_norm, heads, attention.k_norm, self._keys) if has_norms else None
        )
        self.parts = [self._qkv, self._of_heads, self._out, *self._mlp.parts]

    def __call__(
        self, x: Tensor, cached: Sequence[Any], masks: Sequence[Tensor], cos: Tensor, sin: Tensor
    ) -> Tensor:
        x = x + self._attend(self._before(x), cached, masks, cos, sin)
        return x + self._mlp(self._between(x))

    def _attend(
        self, x: Tensor, cached: Sequence[Any], masks: Sequence[Tensor], cos: Tensor, sin: Tensor
    ) -> Tensor:
        rows, keys, dim = len(x), self._keys, self._head_dim
        heads = self._qkv(x).view(rows, -1, dim)  # (B, h + 2k, d)
        turned, v = heads[:, :-keys], heads[:, -keys:, None]
        if self._of_heads is not None:
            turned = self._of_heads(turned)
        turned = _rotate(turned, cos, sin)
        # queries of one key head are treated as rows of that head, as in attention.py
        q, k = turned[:, :-keys].view(rows, keys, -1, dim), turned[:, -keys:, None]
        if len(cached) == 1:
            return self._out(self._attend_to(q, k, v, cached[0], masks[0]))
        sizes = [len(mask) for mask in masks]
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), cached, masks, strict=True)
        return self._out(torch.cat([self._attend_to(*part) for part in parts]))

    def _attend_to(self, q: Tensor, k: Tensor, v: Tensor, cached: Any, mask: Tensor) -> Tensor:
        """(b, hd) of the rows of one cache."""
        keys, values = cached.update(k, v)  # (b, k, L, d)
        return attend(q, keys, values, mask, self._scale).reshape(len(q), -1)


class _GatedMLP:
    def __init__(self, mlp: Any):
        self._gate_up = joined([mlp.gate_proj, mlp.up_proj])
        self._down, self._act = mlp.down_proj, mlp.act_fn
        self.parts = [self._gate_up, self._down]
        # others round differently on a part of a matrix, and this one at the end of a row that is no vector
        self._takes_part = isinstance(self._act, SILU) and mlp.gate_proj.out_features % _VECTORS == 0

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(self._act(gate if self._takes_part else gate.contiguous()).mul_(up))


class _Mixture:
    """The model's own module, with its router and experts."""

    def __init__(self, mixture: nn.Module):
        self._mixture = mixture
        self.parts = reordering_linears(mixture)

    def __call__(self, x: Tensor) -> Tensor:
        return self._mixture(x[:, None])[:, 0]


class _Norm:
    """RMSNorm over the last dimension, in float32 whatever the dtype, as in all of these models."""

    def __init__(self, module: Any):
        self._weight, self._epsilon = module.weight, float(module.variance_epsilon)
        self._added = torch.tensor(self._epsilon, dtype=torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        return self._by(x, self._weight)

    def _by(self, x: Tensor, weight: Tensor) -> Tensor:
        is_wide, width = x.dtype == torch.float32, x.shape[-1]
        wide = x if is_wide else x.to(torch.float32)
        squares = (wide * wide).sum(-1, keepdim=True)
        if width & (width - 1):
            mean = squares.div_(width).add_(self._epsilon)
        else:  # a division by a power of two is exact as a factor, too
            mean = torch.add(self._added, squares, alpha=1 / width)
        normed = wide * mean.rsqrt_()
        return (normed if is_wide else normed.to(x.dtype)).mul_(weight)


class _HeadNorms(_Norm):
    """The norms of all heads of queries and keys as one."""

    def __init__(self, of_q: Any, heads: int, of_k: Any, keys: int):
        super().__init__(of_q)
        self._weights = [of_q.weight.expand(heads, -1), of_k.weight.expand(keys, -1)]
        self._copy: Tensor | None = None

    def keep_copy(self) -> None:
        """Joins the weights of the heads for the next steps."""
        self._copy = torch.cat(self._weights)

    def drop_copy(self) -> None:
        """To be called before the weights change."""
        self._copy = None

    def __call__(self, x: Tensor) -> Tensor:
        """(B, h + k, d), heads of queries first."""
        return self._by(x, torch.cat(self._weights) if self._copy is None else self._copy)


class _Rotations:
    """The rotary cosines and sines of positions, computed for many steps at once."""

    def __init__(self, rotary: Any):
        self._rotary = rotary
        self._is_fixed = rotary.rope_type not in ("dynamic", "longrope")  # those depend on the longest row
        self._copy: tuple[Tensor, Tensor] | None = None
        """Those of the positions 0, 1, ... (positions, d)."""

    def keep_copy(self) -> None:
        """The first step makes the copy: its length depends on the rows."""

    def drop_copy(self) -> None:
        """To be called before the frequencies change."""
        self._copy = None

    def __call__(self, x: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, 1, d) of positions (B, 1) below `longest`, in the dtype of x. The first half
        of the sines has the other sign."""
        if not self._is_fixed:
            return self._compute(x, positions)
        if self._copy is None or len(self._copy[0]) < longest:
            every = torch.arange(with_room(longest), device=x.device)[:, None]
            cos, sin = self._compute(x, every)
            self._copy = cos[:, 0], sin[:, 0]
        cos, sin = (one.index_select(0, positions[:, 0])[:, None] for one in self._copy)
        return cos, sin

    def _compute(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(x, positions)
        half = sin.shape[-1] // 2
        return cos, torch.cat([sin[..., :half].neg(), sin[..., half:]], -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, n, d); the first half of `sin` has the other sign."""
    first, second = x.chunk(2, -1)
    return (x * cos).add_(torch.cat([second, first], -1).mul_(sin))
