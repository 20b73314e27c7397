"""The decoding step of Llama-like models: transformers' operations in the same order, but fewer of them.

In: the sampled tokens, the caches of rows of one or more lengths, additive masks. Out: the next logits, on a
CPU bit-identical to those of the model's own forward with our attention: a matrix product of a few dozen
columns or more has the same bits as part of a larger one. Only attention is computed for each cache alone.
Queries, keys and values are one product, and so are gate and up. The model's own weights become views of the
joined ones, so weight updates write into these directly. Left out on purpose: prompts, and models of any
other class, which run their own forward (`forward.py`).

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
from hydraflow.generation.reordered import ReorderingLinear, joined, reordering_linears

_CLASSES = {
    f"{name}ForCausalLM" for name in ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"]
}
"""transformers' classes whose layers are norm, attention, norm, gated MLP or mixture of experts, and nothing
else. By name, as importing them all takes time."""


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
        self._layers = [_Layer(layer) for layer in backbone.layers]
        self.linears: list[ReorderingLinear] = [
            part
            for part in (self._head, *(part for layer in self._layers for part in layer.linears))
            if isinstance(part, ReorderingLinear)
        ]
        """The linear layers of a step."""

    def __call__(
        self, token: Tensor, caches: Sequence[Cache], masks: Sequence[Tensor], positions: Tensor
    ) -> Tensor:
        """Logits (B, V). token: (B,), first those of the first cache; masks: additive (b, 1, 1, L) with the
        new token, one for each cache; positions: (B, 1)."""
        x = self._backbone.embed_tokens(token)  # (B, H)
        cos, sin = self._backbone.rotary_emb(x, positions)  # (B, 1, d)
        sin = torch.cat([sin[..., : sin.shape[-1] // 2].neg(), sin[..., sin.shape[-1] // 2 :]], -1)
        for layer, *cached in zip(self._layers, *(cache.layers for cache in caches), strict=True):
            x = layer(x, cached, masks, cos, sin)
        return self._head(_norm(x, *_norm_of(self._backbone.norm)))  # type: ignore[misc]


class _Layer:
    def __init__(self, layer: Any):
        attention = layer.self_attn
        self._head_dim, self._scale = attention.head_dim, attention.scaling
        self._keys = attention.k_proj.out_features // self._head_dim
        self._before = _norm_of(layer.input_layernorm)
        self._between = _norm_of(layer.post_attention_layernorm)
        self._qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = attention.o_proj
        self._mlp = _GatedMLP(layer.mlp) if hasattr(layer.mlp, "gate_proj") else _Mixture(layer.mlp)
        self.linears = [self._qkv, self._out, *self._mlp.linears]
        has_norms = hasattr(attention, "q_norm")
        self._of_heads = (_norm_of(attention.q_norm), _norm_of(attention.k_norm)) if has_norms else None

    def __call__(
        self, x: Tensor, cached: Sequence[Any], masks: Sequence[Tensor], cos: Tensor, sin: Tensor
    ) -> Tensor:
        x = x + self._attend(_norm(x, *self._before), cached, masks, cos, sin)
        return x + self._mlp(_norm(x, *self._between))

    def _attend(
        self, x: Tensor, cached: Sequence[Any], masks: Sequence[Tensor], cos: Tensor, sin: Tensor
    ) -> Tensor:
        rows, keys, dim, sizes = len(x), self._keys, self._head_dim, [len(mask) for mask in masks]
        heads = self._qkv(x).view(rows, -1, dim)  # (B, h + 2k, d)
        turned, v = heads[:, :-keys], heads[:, -keys:]
        if self._of_heads is not None:
            (of_q, epsilon), (of_k, _) = self._of_heads
            weights = [of_q.expand(turned.shape[1] - keys, -1), of_k.expand(keys, -1)]
            turned = _norm(turned, torch.cat(weights), epsilon)
        turned = _rotate(turned, cos, sin)
        # queries of one key head are treated as rows of that head, as in attention.py
        q, k = turned[:, :-keys].view(rows, keys, -1, dim), turned[:, -keys:, None]
        parts = zip(q.split(sizes), k.split(sizes), v[:, :, None].split(sizes), cached, masks, strict=True)
        found = [self._attend_to(*part) for part in parts]
        return self._out(torch.cat(found) if len(found) > 1 else found[0])

    def _attend_to(self, q: Tensor, k: Tensor, v: Tensor, cached: Any, mask: Tensor) -> Tensor:
        """(b, hd) of the rows of one cache."""
        keys, values = cached.update(k, v)  # (b, k, L, d)
        return attend(q, keys, values, mask, self._scale).reshape(len(q), -1)


class _GatedMLP:
    def __init__(self, mlp: Any):
        self._gate_up = joined([mlp.gate_proj, mlp.up_proj])
        self._down, self._act = mlp.down_proj, mlp.act_fn
        self.linears = [self._gate_up, self._down]

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        # activations round differently on a part of a matrix
        return self._down(self._act(gate.contiguous()).mul_(up))


class _Mixture:
    """The model's own module, with its router and experts."""

    def __init__(self, mixture: nn.Module):
        self._mixture = mixture
        self.linears = reordering_linears(mixture)

    def __call__(self, x: Tensor) -> Tensor:
        return self._mixture(x[:, None])[:, 0]


def _norm_of(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension, in float32 whatever the dtype, as in all of these models."""
    wide = x.to(torch.float32)
    mean = (wide * wide).sum(-1, keepdim=True).div_(x.shape[-1])
    return (wide * mean.add_(epsilon).rsqrt_()).to(x.dtype).mul_(weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, n, d); the first half of `sin` has the other sign."""
    first, second = x.chunk(2, -1)
    return (x * cos).add_(torch.cat([second, first], -1).mul_(sin))
