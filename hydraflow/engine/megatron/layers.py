"""The layers that Megatron-Core takes from Transformer Engine, and its model without logits.

In: Megatron-Core's own tensor-parallel matrices. Out: a `Trunk`, whose rows are packed into one line as
everywhere else (`models/packing.py`): attention sees a `RowPlan`, and rotary embeddings are looked up by
position, so neighbouring rows share a prompt here, too. Left out on purpose: what follows the last layer
(`head.py`), Transformer Engine's own modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
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

from hydraflow.engine.megatron.architecture import Mixture
from hydraflow.engine.megatron.experts import ExpertLayer
from hydraflow.models.attention import RowPlan, attend_line

LAYERS = "decoder.layers."
"""How the names of a layer's parameters begin."""


@dataclass
class PackedLine(PackedSeqParams):
    """How Megatron-Core's layers learn about packed rows."""

    plan: RowPlan | None = None
    positions: torch.Tensor | None = None
    """(N,) place of each token in its row."""


class RMSNorm(nn.Module):
    """With sequence parallelism each rank has some of the tokens, and its weight's gradient is summed over
    ranks: torch's own class does not say so."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **others: Any):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden), normalised over the last dimension in float32."""
        wide = x.float() if x.dtype != torch.float64 else x
        scaled = F.rms_norm(wide, (x.shape[-1],), None, self.eps)
        return self.weight * scaled.to(x.dtype)


class RowAttention(MegatronModule):
    """Causal attention within packed rows, over this rank's heads. N: the tokens of this rank's share of the
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
    """Angles by position, from the frequencies that transformers computes for the model."""

    def __init__(self, frequencies: torch.Tensor):
        super().__init__()
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)

    def get_rotary_seq_len(self, *args: Any) -> torch.Tensor:
        """Not a length but the positions, which `forward` is called with."""
        positions: torch.Tensor = args[-1].positions
        return positions

    def forward(self, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        """(N, 1, 1, d) angles."""
        angles = torch.outer(positions.float(), self.frequencies)
        return torch.cat((angles, angles), -1)[:, None, None]


class Trunk(GPTModel):
    """Megatron-Core's GPT, of which the last stage returns hidden states.

    head: policy has an output matrix (`output_layer`), value a `score`.
    """

    def __init__(self, *, head: str, frequencies: torch.Tensor, **arguments: Any):
        super().__init__(**arguments)
        self.rotary_pos_emb = Rotary(frequencies)
        if head == "value" and self.post_process:
            del self.output_layer
            self.score = nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)

    def _postprocess(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        return hidden_states

    def counted_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by name, their layers counted through the whole model."""
        first = get_transformer_layer_offset(self.config, self.vp_stage, self.pg_collection.pp.rank())
        for name, parameter in self.named_parameters():
            if name.startswith(LAYERS):
                number, rest = name.removeprefix(LAYERS).split(".", 1)
                name = f"{LAYERS}{first + int(number)}.{rest}"
            yield name, parameter

    def output_weight(self) -> torch.Tensor:
        """(V / TP, hidden) this rank's part of the output matrix, on the last stage."""
        weight = self.output_layer.weight
        return self.shared_embedding_or_output_weight() if weight is None else weight


def layer_spec(
    config: TransformerConfig, mixture: Mixture | None, *, first: int, chunk: int | None
) -> TransformerBlockSubmodules:
    """The layers of this stage, or of a chunk of it, from layer `first` on: Megatron-Core's matrices, and
    norms, attention and experts from here."""
    norm_of_heads = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=RowAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm_of_heads,
        k_layernorm=norm_of_heads,
    )
    mlp = ModuleSpec(
        MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )

    def layer(has_experts: bool) -> ModuleSpec:
        parts = TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ExpertLayer if has_experts else mlp,
            mlp_bda=get_bias_dropout_add,
        )
        return ModuleSpec(TransformerLayer, submodules=parts)

    numbers = range(first, first + get_num_layers_to_build(config, chunk))
    return TransformerBlockSubmodules(
        [layer(mixture is not None and mixture.layers[number]) for number in numbers], RMSNorm
    )
