"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over packed rows.

In: hidden states of this rank's tokens. Out: the same, attended to. Keys and values of all heads are
projected from a short vector, the latent, and queries may be too; a few rotary columns of each head bypass
it. Matrices behind a latent are divided by heads, those before it are replicated.

Megatron-Core's own `MLASelfAttention` cannot be built without Transformer Engine. It would also miss the
other ranks' heads in the gradient of the shared key columns, and give the norms of latents the model's
epsilon, where transformers has a fixed one. Left out on purpose: absorbing matrices into each other, which
only sampling needs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from hydraflow.engine.megatron.architecture import Latent
from hydraflow.engine.megatron.matrices import RMSNorm
from hydraflow.engine.megatron.packed_line import PackedLine
from hydraflow.models.attention import attend_line
from hydraflow.models.linear import linear

NORM_EPS = 1e-6
"""Epsilon of the latents' norms: transformers' default, whatever the model's is."""


class WholeMatrix(nn.Module):
    """A replicated matrix. With sequence parallelism each rank multiplies a share of the tokens, and the
    gradient is summed over ranks."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        return linear(x, self.weight)


class LatentAttention(MegatronModule):
    """Parameters have transformers' names. N: tokens of this rank's share of the line; n: those outside
    attention, fewer with sequence parallelism; h: this rank's heads."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        latent: Latent,
        rotary_scale: float,
        pg_collection: ProcessGroupCollection,
        **others: Any,
    ):
        super().__init__(config=config)
        self.latent, self.rotary_scale, self.tp_group = latent, rotary_scale, pg_collection.tp
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.heads = heads // self.tp_group.size()
        settings = dict(config=config, init_method=config.init_method, bias=False, tp_group=self.tp_group)
        by_heads = partial(ColumnParallelLinear, gather_output=False, **settings)
        if latent.q_lora_rank is None:
            self.q_proj = by_heads(hidden, heads * latent.qk_head_dim)
        else:
            self.q_a_proj = WholeMatrix(config, hidden, latent.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config, latent.q_lora_rank, NORM_EPS)
            self.q_b_proj = by_heads(latent.q_lora_rank, heads * latent.qk_head_dim)
        self.kv_a_proj_with_mqa = WholeMatrix(config, hidden, latent.kv_lora_rank + latent.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(config, latent.kv_lora_rank, NORM_EPS)
        self.kv_b_proj = by_heads(latent.kv_lora_rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim))
        self.o_proj = RowParallelLinear(
            heads * latent.v_head_dim, hidden, input_is_parallel=True, skip_bias_add=True, **settings
        )

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedLine,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """(n, 1, hidden) to the same, and no bias. rotary_pos_emb: (N, 1, 1, d) angles."""
        latent, angles = self.latent, rotary_pos_emb[:, 0]
        plain, rotated = self._queries(hidden).split([latent.qk_nope_head_dim, latent.qk_rope_head_dim], -1)
        queries = torch.cat((plain, self._rotate(rotated, angles)), -1)
        widths = [latent.kv_lora_rank, latent.qk_rope_head_dim]
        compressed, shared = self.kv_a_proj_with_mqa(hidden).split(widths, -1)
        expanded, _ = self.kv_b_proj(self.kv_a_layernorm(compressed))
        plain, values = self._by_heads(expanded).split([latent.qk_nope_head_dim, latent.v_head_dim], -1)
        # its gradient is summed over the ranks, because each has a share of the heads
        shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)
        shared = self._rotate(shared, angles).expand(-1, self.heads, -1)
        keys = torch.cat((plain, shared), -1)
        assert packed_seq_params.plan is not None
        found = attend_line(queries, keys, values, packed_seq_params.plan, latent.scale, None)
        output, _ = self.o_proj(found.flatten(1)[:, None])
        return output, None

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.latent.q_lora_rank is None:
            found, _ = self.q_proj(hidden)
        else:
            found, _ = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        return self._by_heads(found)

    def _by_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 1, h * d) to (N, h, d)."""
        return x[:, 0].unflatten(-1, (self.heads, -1))

    def _rotate(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotates x (N, heads, d) by angles (N, 1, d), whose halves are equal. Interleaved pairs end up in
        different halves, in queries and keys alike, so scores are the same."""
        angles = angles[..., : angles.shape[-1] // 2]
        cos, sin = ((wave * self.rotary_scale).to(x.dtype) for wave in (angles.cos(), angles.sin()))
        first, second = (x[..., 0::2], x[..., 1::2]) if self.latent.rope_interleave else x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
