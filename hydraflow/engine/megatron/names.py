"""Maps parameters of Megatron-Core to parts of Hugging Face tensors.

Megatron-Core keeps queries, keys and values in one matrix, key-value group by group, and gate and up
projection in another; each tensor-parallel rank has some of the groups, rows or columns. In: a parameter's
name. Out: a `Holding`, which splits the parameter into parts of Hugging Face tensors and assembles it from
them; optimizer state is split the same way. Left out on purpose: communication (`export.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hydraflow.engine.megatron.architecture import Architecture, Latent, Mixture

SCORE = "score.weight"
LAYERS = "decoder.layers."
"""Prefix of the names of a layer's parameters."""
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
IN_MATRIX = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms that Transformer Engine fuses into the next matrix: name as a separate layer -> name when fused."""
_NORMS = {fused: name for name, fused in IN_MATRIX.items()}


@dataclass(frozen=True)
class Slice:
    """How expert-tensor-parallel ranks divide their experts' matrices: dimension `dim` consists of blocks
    (gate and up projection), and each rank has the same range of every block."""

    dim: int
    blocks: int
    start: int
    size: int

    def of(self, experts: torch.Tensor) -> torch.Tensor:
        """The range, as a view with a dimension for the blocks."""
        return experts.unflatten(self.dim, (self.blocks, -1)).narrow(self.dim + 1, self.start, self.size)


@dataclass(frozen=True)
class Part:
    """A rank's part of one Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dim: int | None
    """The dimension that is divided among tensor-parallel ranks; None: it is replicated."""
    start: int
    size: int
    """Range of that dimension."""
    slice: Slice | None = None
    """For experts, where `dim` is divided among expert-parallel ranks instead; None: not an expert."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor, as a view."""
        found = whole if self.dim is None else whole.narrow(self.dim, self.start, self.size)
        return found if self.slice is None else self.slice.of(found)


@dataclass(frozen=True)
class Holding:
    """A parameter of one rank, as parts of Hugging Face tensors."""

    parts: tuple[Part, ...]
    cut: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    """Splits the parameter into its parts."""
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """Assembles the parameter from its parts."""


@dataclass(frozen=True)
class Names:
    """The parameters of one tensor-parallel rank."""

    shape: Architecture
    rank: int
    ranks: int
    experts: int = 0
    """Index of this rank's share of the experts."""
    expert_shares: int = 1
    slice: int = 0
    """Index of its share of the rows and columns of each."""
    slices: int = 1

    def of_sharers(self, part: Part) -> list[Names]:
        """The ranks that together hold the tensor of this part, in the order of their group."""
        if part.slice is None:
            return [replace(self, rank=rank) for rank in range(self.ranks)]
        return [
            replace(names, experts=share) for share in range(self.expert_shares) for names in self.of_slices()
        ]

    def of_slices(self) -> list[Names]:
        """The ranks that together hold this rank's experts, in the order of their group."""
        return [replace(self, slice=slice) for slice in range(self.slices)]

    def holding(self, name: str) -> Holding:
        """What this rank holds of a parameter. name: Megatron-Core's, with layers numbered over the whole
        model."""
        shape = self.shape
        if name in (EMBEDDING, HEAD):
            is_embedding = name == EMBEDDING or shape.tied
            return self._vocabulary("model.embed_tokens.weight" if is_embedding else "lm_head.weight")
        if name == SCORE:
            return self._whole(SCORE, (1, shape.hidden))
        if name == "decoder.final_layernorm.weight":
            return self._whole("model.norm.weight", (shape.hidden,))
        _, _, number, place = name.split(".", 3)
        layer = f"model.layers.{number}."
        match _NORMS.get(place, place):
            case "self_attention.linear_qkv.weight":
                return self._queries_keys_values(layer, "weight", (shape.hidden,))
            case "self_attention.linear_qkv.bias":
                return self._queries_keys_values(layer, "bias", ())
            case "self_attention.linear_proj.weight":
                width = shape.heads * shape.head_dim
                return self._columns(f"{layer}self_attn.o_proj.weight", (shape.hidden, width))
            case "self_attention.q_layernorm.weight":
                return self._whole(f"{layer}self_attn.q_norm.weight", (shape.head_dim,))
            case "self_attention.k_layernorm.weight":
                return self._whole(f"{layer}self_attn.k_norm.weight", (shape.head_dim,))
            case "input_layernorm.weight":
                return self._whole(f"{layer}input_layernorm.weight", (shape.hidden,))
            case "pre_mlp_layernorm.weight":
                return self._whole(f"{layer}post_attention_layernorm.weight", (shape.hidden,))
            case "mlp.linear_fc1.weight":
                return self._gate_and_up(f"{layer}mlp.", shape.intermediate)
            case "mlp.linear_fc2.weight":
                return self._columns(f"{layer}mlp.down_proj.weight", (shape.hidden, shape.intermediate))
            case "mlp.router.weight" if shape.mixture:
                return self._whole(f"{layer}mlp.gate.weight", (shape.mixture.count, shape.hidden))
            case "mlp.router.expert_bias" if shape.mixture:
                return self._whole(f"{layer}mlp.gate.e_score_correction_bias", (shape.mixture.count,))
            case "mlp.experts.gate_up" if shape.mixture:
                whole3 = (shape.mixture.count, 2 * shape.mixture.width, shape.hidden)
                return self._experts(f"{layer}mlp.experts.gate_up_proj", whole3, dim=1, blocks=2)
            case "mlp.experts.down" if shape.mixture:
                whole3 = (shape.mixture.count, shape.hidden, shape.mixture.width)
                return self._experts(f"{layer}mlp.experts.down_proj", whole3, dim=2, blocks=1)
        if shape.mixture and place.startswith("mlp.shared_experts."):
            return self._shared_experts(shape.mixture, layer, place.removeprefix("mlp.shared_experts."))
        if shape.latent and place.startswith("self_attention."):
            return self._latent(shape.latent, layer, place.removeprefix("self_attention."))
        raise AssertionError(f"no Hugging Face tensor is known for {name}")

    def _rows(self, name: str, shape: tuple[int, ...]) -> Part:
        size = shape[0] // self.ranks
        return Part(name, shape, 0, self.rank * size, size)

    def _columns(self, name: str, shape: tuple[int, int]) -> Holding:
        size = shape[1] // self.ranks
        return self._alone(Part(name, shape, 1, self.rank * size, size))

    def _whole(self, name: str, shape: tuple[int, ...]) -> Holding:
        return self._alone(Part(name, shape, None, 0, shape[0]))

    def _gate_and_up(self, mlp: str, width: int) -> Holding:
        whole = (width, self.shape.hidden)
        both = tuple(self._rows(f"{mlp}{side}_proj.weight", whole) for side in ("gate", "up"))
        return Holding(both, lambda local: local.chunk(2), lambda parts: torch.cat(tuple(parts)))

    def _shared_experts(self, mixture: Mixture, layer: str, place: str) -> Holding:
        assert mixture.shared is not None
        mlp, hidden = f"{layer}mlp.shared_expert{'' if mixture.shared_gate else 's'}", self.shape.hidden
        match place:
            case "linear_fc1.weight":
                return self._gate_and_up(f"{mlp}.", mixture.shared)
            case "linear_fc2.weight":
                return self._columns(f"{mlp}.down_proj.weight", (hidden, mixture.shared))
        assert place == "gate_weight", place
        return self._whole(f"{mlp}_gate.weight", (1, hidden))

    def _latent(self, latent: Latent, layer: str, place: str) -> Holding:
        """Matrices of latent attention have transformers' names."""
        name, heads, hidden = f"{layer}self_attn.{place}", self.shape.heads, self.shape.hidden
        queries, compressed = heads * latent.qk_head_dim, latent.q_lora_rank or 0
        keys_values = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        divided = {
            "q_proj.weight": (queries, hidden),
            "q_b_proj.weight": (queries, compressed),
            "kv_b_proj.weight": (keys_values, latent.kv_lora_rank),
        }
        whole = {
            "q_a_proj.weight": (compressed, hidden),
            "q_a_layernorm.weight": (compressed,),
            "kv_a_proj_with_mqa.weight": (latent.kv_lora_rank + latent.qk_rope_head_dim, hidden),
            "kv_a_layernorm.weight": (latent.kv_lora_rank,),
        }
        if place in divided:
            return self._alone(self._rows(name, divided[place]))
        if place in whole:
            return self._whole(name, whole[place])
        assert place == "o_proj.weight", place
        return self._columns(name, (hidden, heads * latent.v_head_dim))

    def _alone(self, part: Part) -> Holding:
        return Holding((part,), lambda local: (local,), lambda parts: parts[0])

    def _experts(self, name: str, shape: tuple[int, ...], *, dim: int, blocks: int) -> Holding:
        count, width = shape[0] // self.expert_shares, shape[dim] // blocks // self.slices
        slice = Slice(dim, blocks, self.slice * width, width)
        part = Part(name, shape, 0, self.experts * count, count, slice)
        return Holding(
            (part,),
            lambda local: (local.unflatten(dim, (blocks, -1)),),
            lambda parts: parts[0].flatten(dim, dim + 1),
        )

    def _vocabulary(self, name: str) -> Holding:
        """Rows of the vocabulary, padded with zeros to equal shares."""
        width = vocabulary_share(self.shape.vocabulary, self.ranks)
        start = min(self.rank * width, self.shape.vocabulary)
        size = min(width, self.shape.vocabulary - start)
        part = Part(name, (self.shape.vocabulary, self.shape.hidden), 0, start, size)

        def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            (real,) = parts
            return torch.cat((real, real.new_zeros(width - size, real.shape[1])))

        return Holding((part,), lambda local: (local[:size],), join)

    def _queries_keys_values(self, layer: str, kind: str, more: tuple[int, ...]) -> Holding:
        shape, dim = self.shape, self.shape.head_dim
        group = shape.heads // shape.kv_heads * dim  # rows of queries for one head of keys
        parts = tuple(
            self._rows(f"{layer}self_attn.{side}_proj.{kind}", (heads * dim, *more))
            for side, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        )

        def cut(local: torch.Tensor) -> list[torch.Tensor]:
            groups = local.view(-1, group + 2 * dim, *more)
            return [piece.flatten(0, 1) for piece in groups.split([group, dim, dim], 1)]

        def join(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
            widths = (group, dim, dim)
            groups = [piece.reshape(-1, width, *more) for piece, width in zip(pieces, widths, strict=True)]
            return torch.cat(groups, 1).flatten(0, 1)

        return Holding(parts, cut, join)


def vocabulary_share(vocabulary: int, ranks: int) -> int:
    """Rows of the embedding on each tensor-parallel rank.

    >>> vocabulary_share(10, 4)
    3
    """
    return -(-vocabulary // ranks)
