"""Configuration of the training engines. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydraflow.options import NOT_NEGATIVE, SIZE, Named, Planned, Rule, idle_when, option

TRAIN_ENGINES = {
    "fsdp2": Named("hydraflow.engine.fsdp.engine:FSDPEngine", reads=("fsdp_config",)),
    "megatron": Named(reads=("megatron",), planned="train with Megatron-Core"),
}
"""By the name that `actor.strategy` and `critic.strategy` give; `reads` are their sections."""

DTYPES = ("fp32", "bf16", "fp16", "fp64")
DECAYS = Rule(
    "must be two numbers from 0 to below 1",
    lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
)


@dataclass
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = option(1e-6, rule=NOT_NEGATIVE)
    """Peak learning rate."""
    betas: list[float] = option(factory=lambda: [0.9, 0.999], rule=DECAYS)
    """Decay of the first and the second moment."""
    eps: float = option(1e-8, rule=SIZE)
    """Added to the root of the second moment."""
    weight_decay: float = option(0.01, rule=NOT_NEGATIVE)
    """Decoupled weight decay."""
    clip_grad: float = option(1.0, gt=0)
    """Largest global gradient norm."""
    lr_scheduler_type: str = option("constant", choices=("constant", "linear", "cosine"))
    """constant, linear or cosine, after the warm-up."""
    lr_warmup_steps: int = option(-1, ge=-1)
    """Training steps over which the rate rises from 0; -1: lr_warmup_steps_ratio decides."""
    lr_warmup_steps_ratio: float = option(
        0.0,
        ge=0,
        le=1,
        idle=idle_when(
            lambda s: s.lr_warmup_steps >= 0, "{s}.lr_warmup_steps is given", "{s}.lr_warmup_steps=-1"
        ),
    )
    """Warm-up as a share of all training steps."""
    min_lr_ratio: float = option(
        0.0,
        ge=0,
        le=1,
        idle=idle_when(
            lambda s: s.lr_scheduler_type == "constant",
            "{s}.lr_scheduler_type=constant never lowers the rate",
            "{s}.lr_scheduler_type=cosine",
        ),
    )
    """Rate at the last step, as a share of lr (linear and cosine)."""


@dataclass
class WrapPolicyConfig:
    """Which layers are sharded by themselves."""

    min_num_params: int = option(0, ge=0)
    """A layer with fewer weights is gathered together with the rest of the model: less waiting, more memory
    at a time."""


@dataclass
class FSDPConfig:
    """How fully_shard lays a model out."""

    model_dtype: str = option("fp32", choices=DTYPES)
    """Type in which weights and optimizer state are kept: fp32, bf16, fp16 (fp64 for proofs)."""
    dtype: str = option("auto", choices=("auto", *DTYPES))
    """Type of the forward and backward pass: auto (bf16 where the device computes in it, else fp32), fp32,
    bf16, fp16, fp64."""
    reduce_dtype: str = option("fp32", choices=DTYPES)
    """Type in which gradients are summed over ranks."""
    reshard_after_forward: bool = option(True, shapes_training=False)
    """Free gathered weights between forward and backward: less memory, one more gather."""
    param_offload: bool = option(False, shapes_training=False)
    """Keep the shards of weights, gradients and optimizer in host memory during training (fully_shard's
    offload policy)."""
    optimizer_offload: bool = option(False, shapes_training=False)
    """Keep the optimizer state in host memory between updates."""
    head_chunk_tokens: int = option(2048, ge=1, shapes_training=False)
    """Tokens whose logits exist at one time while log-probabilities are computed."""
    wrap_policy: WrapPolicyConfig = option(factory=WrapPolicyConfig, shapes_training=False)
    fsdp_size: int = option(-1, shapes_training=False)
    """Devices among which one copy of the model is sharded (HSDP keeps data ranks / fsdp_size copies); -1:
    all data ranks."""
    ulysses_sequence_parallel_size: int = option(
        1,
        shapes_training=False,
        planned=Planned(lambda value: value > 1, "share the tokens of a row among {value} devices"),
    )
    """Devices that share the tokens of one row (Ulysses)."""


@dataclass
class MegatronConfig:
    """How Megatron-Core lays a model out."""

    tensor_model_parallel_size: int = option(1, shapes_training=False)
    """Devices that share each matrix."""
    pipeline_model_parallel_size: int = option(1, shapes_training=False)
    """Devices in a row, each with a part of the layers."""
    virtual_pipeline_model_parallel_size: int | None = option(None, shapes_training=False)
    """Parts of the layers per pipeline device (interleaved schedule); null: one."""
    context_parallel_size: int = option(1, shapes_training=False)
    """Devices that share the tokens of one row."""
    expert_model_parallel_size: int = option(1, shapes_training=False)
    """Devices among which the experts are divided."""
    expert_tensor_parallel_size: int | None = option(None, shapes_training=False)
    """Devices that share each expert's matrices; null: tensor_model_parallel_size."""
    sequence_parallel: bool = option(True, shapes_training=False)
    """Divide activations outside the matrices over the tensor-parallel devices."""
    use_distributed_optimizer: bool = option(True, shapes_training=False)
    """Shard the optimizer state over data ranks."""
    param_offload: bool = option(False, shapes_training=False)
    """Keep weights in host memory while the role rests."""
    grad_offload: bool = option(False, shapes_training=False)
    """Keep gradients in host memory while the role rests."""
    optimizer_offload: bool = option(False, shapes_training=False)
    """Keep the optimizer state in host memory while the role rests."""
    dtype: str = option("auto", choices=("auto", "fp32", "bf16", "fp16"))
    """Type of the forward and backward pass: auto (bf16 where the device computes in it, else fp32), fp32,
    bf16, fp16."""
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron-Core's TransformerConfig."""
