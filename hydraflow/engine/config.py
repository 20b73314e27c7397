"""Configuration of the training engines. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of the first and the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Largest global gradient norm."""
    lr_scheduler_type: str = "constant"
    """constant, linear or cosine, after the warm-up."""
    lr_warmup_steps: int = -1
    """Training steps over which the rate rises from 0; -1: lr_warmup_steps_ratio decides."""
    lr_warmup_steps_ratio: float = 0.0
    """Warm-up as a share of all training steps."""
    min_lr_ratio: float = 0.0
    """Rate at the last step, as a share of lr (linear and cosine)."""


@dataclass
class WrapPolicyConfig:
    """Which layers are sharded by themselves."""

    min_num_params: int = 0
    """A layer with fewer weights is gathered together with the rest of the model: less waiting, more memory
    at a time."""


@dataclass
class FSDPConfig:
    """How fully_shard lays a model out."""

    model_dtype: str = "fp32"
    """Type in which weights and optimizer state are kept: fp32, bf16, fp16 (fp64 for proofs)."""
    dtype: str = "auto"
    """Type of the forward and backward pass: auto (bf16 where the device computes in it, else fp32), fp32,
    bf16, fp16, fp64."""
    reduce_dtype: str = "fp32"
    """Type in which gradients are summed over ranks."""
    reshard_after_forward: bool = True
    """Free gathered weights between forward and backward: less memory, one more gather."""
    param_offload: bool = False
    """Keep the shards of weights, gradients and optimizer in host memory during training (fully_shard's
    offload policy)."""
    optimizer_offload: bool = False
    """Keep the optimizer state in host memory between updates."""
    head_chunk_tokens: int = 2048
    """Tokens whose logits exist at one time while log-probabilities are computed."""
    wrap_policy: WrapPolicyConfig = field(default_factory=WrapPolicyConfig)
    fsdp_size: int = -1
    """Devices among which one copy of the model is sharded (HSDP keeps data ranks / fsdp_size copies); -1:
    all data ranks."""
    ulysses_sequence_parallel_size: int = 1
    """Devices that share the tokens of one row (Ulysses)."""


@dataclass
class MegatronConfig:
    """How Megatron-Core lays a model out."""

    tensor_model_parallel_size: int = 1
    """Devices that share each matrix."""
    pipeline_model_parallel_size: int = 1
    """Devices in a row, each with a part of the layers."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Parts of the layers per pipeline device (interleaved schedule); null: one."""
    context_parallel_size: int = 1
    """Devices that share the tokens of one row."""
    expert_model_parallel_size: int = 1
    """Devices among which the experts are divided."""
    expert_tensor_parallel_size: int | None = None
    """Devices that share each expert's matrices; null: tensor_model_parallel_size."""
    sequence_parallel: bool = True
    """Divide activations outside the matrices over the tensor-parallel devices."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over data ranks."""
    param_offload: bool = False
    """Keep weights in host memory while the role rests."""
    grad_offload: bool = False
    """Keep gradients in host memory while the role rests."""
    optimizer_offload: bool = False
    """Keep the optimizer state in host memory while the role rests."""
    dtype: str = "auto"
    """Type of the forward and backward pass: auto (bf16 where the device computes in it, else fp32), fp32,
    bf16, fp16."""
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron-Core's TransformerConfig."""
