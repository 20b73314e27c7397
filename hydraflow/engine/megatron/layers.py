"""Replacements for the layers that Megatron-Core takes from Transformer Engine, and its model without logits.

In: tensor-parallel matrices (`matrices.py`). Out: a `Trunk`, whose rows are packed into one line as
everywhere else (`models/packing.py`): attention gets a `RowPlan` and rotary embeddings get positions, so
neighbouring rows can share a prompt here, too. Left out on purpose: what follows the last layer (`head.py`),
Transformer Engine's attention and norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import nn

from hydraflow.engine.megatron.architecture import Architecture
from hydraflow.engine.megatron.experts import ExpertLayer, RoutedLayer
from hydraflow.engine.megatron.latent import LatentAttention
from hydraflow.engine.megatron.matrices import Matrices, RMSNorm, matrices
from hydraflow.engine.megatron.names import LAYERS
from hydraflow.engine.megatron.packed_line import PackedLine
from hydraflow.models.attention import attend_line

OneTensor = TypeVar("OneTensor", bound=torch.Tensor)


class RowAttention(MegatronModule):
    """Causal attention within packed rows, over this rank's heads. N: tokens of this rank's share of the
    line."""

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **others: Any):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedLine,
        **others: Any,
    ) -> torch.Tensor:
        """(N, 1, h, d) each (fewer heads of keys) to (N, 1, h * d)."""
        assert packed_seq_params.plan is not None
        line = attend_line(query[:, 0], key[:, 0], value[:, 0], packed_seq_params.plan, self.scale, None)
        return line.flatten(1)[:, None]


class Rotary(nn.Module):
    """Rotary angles of positions, from the frequencies that transformers computes for the model."""

    def __init__(self, frequencies: torch.Tensor):
        super().__init__()
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)

    def get_rotary_seq_len(self, *args: Any) -> torch.Tensor:
        """Returns positions in place of a length: Megatron-Core only passes the result on to `forward`."""
        return args[-1].positions

    def forward(self, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        """(N, 1, 1, d) angles."""
        angles = torch.outer(positions.float(), self.frequencies)
        return torch.cat((angles, angles), -1)[:, None, None]


class Trunk(GPTModel):
    """Megatron-Core's GPT, except that the last stage returns hidden states instead of logits.

    head: policy has an output matrix (`output_layer`), value a `score`. padding: id of the padding token,
    whose embedding gets no gradient, as in transformers; None: no such token.
    """

    def __init__(self, *, head: str, frequencies: torch.Tensor, padding: int | None, **arguments: Any):
        super().__init__(**arguments)
        self.rotary_pos_emb = Rotary(frequencies)
        if padding is not None and self.pre_process:
            self.embedding.word_embeddings.register_forward_hook(partial(_without_gradient, padding))
        if head == "value" and self.post_process:
            del self.output_layer
            self.score = nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)

    def _postprocess(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        return hidden_states

    def counted(self, named: Iterable[tuple[str, OneTensor]]) -> Iterator[tuple[str, OneTensor]]:
        """Its parameters or buffers by name, with layers numbered over the whole model."""
        first = get_transformer_layer_offset(self.config, self.vp_stage, self.pg_collection.pp.rank())
        for name, tensor in named:
            if name.startswith(LAYERS):
                number, rest = name.removeprefix(LAYERS).split(".", 1)
                name = f"{LAYERS}{first + int(number)}.{rest}"
            yield name, tensor

    def output_weight(self) -> torch.Tensor:
        """(V / TP, hidden) this rank's part of the output matrix, on the last stage."""
        weight = self.output_layer.weight
        return self.shared_embedding_or_output_weight() if weight is None else weight


def _without_gradient(
    token: int, table: VocabParallelEmbedding, given: tuple[torch.Tensor], found: torch.Tensor
) -> torch.Tensor:
    """Detaches the embeddings of one token. given: (1, N) tokens; found: (1, N, h), or with sequence
    parallelism this rank's (N / TP, 1, h)."""
    is_token = (given[0] == token)[..., None]
    if table.reduce_scatter_embeddings:
        is_token = is_token.transpose(0, 1).chunk(table.tp_group.size())[table.tp_group.rank()]
    return torch.where(is_token, found.detach(), found)


def layer_spec(
    config: TransformerConfig, shape: Architecture, *, rotary_scale: float, first: int, chunk: int | None
) -> TransformerBlockSubmodules:
    """The layers of this stage, or of a chunk of it, from layer `first` on: matrices of Megatron-Core or
    Transformer Engine, and norms, attention and experts from this folder. rotary_scale: factor of the columns
    that latent attention rotates."""
    kinds = matrices(config)
    attention = _attention(config, shape, rotary_scale, kinds)
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=kinds.after_norm, linear_fc2=kinds.row))

    def layer(has_experts: bool) -> ModuleSpec:
        parts = TransformerLayerSubmodules(
            input_layernorm=RMSNorm if shape.latent else kinds.norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm if has_experts else kinds.norm,
            mlp=ExpertLayer if has_experts else mlp,
            mlp_bda=get_bias_dropout_add,
        )
        return ModuleSpec(RoutedLayer if has_experts else TransformerLayer, submodules=parts)

    numbers = range(first, first + get_num_layers_to_build(config, chunk))
    mixture = shape.mixture
    return TransformerBlockSubmodules(
        [layer(mixture is not None and mixture.layers[number]) for number in numbers], RMSNorm
    )


def _attention(
    config: TransformerConfig, shape: Architecture, rotary_scale: float, kinds: Matrices
) -> ModuleSpec:
    if shape.latent is not None:
        return ModuleSpec(LatentAttention, {"latent": shape.latent, "rotary_scale": rotary_scale})
    norm_of_heads = RMSNorm if config.qk_layernorm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=kinds.after_norm,
        core_attention=RowAttention,
        linear_proj=kinds.row,
        q_layernorm=norm_of_heads,
        k_layernorm=norm_of_heads,
    )
    return ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)
