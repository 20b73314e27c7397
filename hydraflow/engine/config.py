"""Configuration of the training engines. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydraflow.options import (
    ArgumentSource,
    Implementation,
    Library,
    Rule,
    free,
    no_effect_when,
    option,
    required,
    unless,
)

MEGATRON = Library(
    "megatron",
    "Megatron-Core",
    "pip install 'hydraflow-trainer[megatron]'",
    distributions=("megatron-core",),
    probe="import hydraflow.engine.megatron.engine",
)
TRAIN_ENGINES = {
    "fsdp2": Implementation("hydraflow.engine.fsdp.engine:FSDPEngine", reads=("fsdp_config",)),
    "megatron": Implementation(
        "hydraflow.engine.megatron.engine:MegatronEngine",
        reads=("megatron",),
        needs=MEGATRON,
    ),
}
"""Values of `actor.strategy` and `critic.strategy`; `reads` are their sections."""

SUPERVISED = "fsdp2"
"""The engine of supervised models and reward models, whose configurations have its section only."""
DTYPES = ("fp32", "bf16", "fp16", "fp64")
BF32 = "bf32"
"""Float32 with matrix products in bfloat16, as oneDNN calls it; here their results are bfloat16, too."""
WINDOW_BYTES = 8 * 2**20
"""Memory in which a rank passes tensors to the others of its machine on CPUs: two halves, each with a place
for every other rank."""
GATHERED_BYTES = 64 * 2**20
"""Maximum bytes of full tensors that FSDP2 gathers together for a generation engine; a larger tensor is
gathered alone."""
DECAYS = Rule(
    "must be two numbers from 0 to below 1",
    lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
)

BALANCING_TYPES = ("none", "seq_aux_loss")
BALANCING = Rule(
    f"must be {' or '.join(BALANCING_TYPES)}: the gradient of the others depends on how rows are split into"
    " micro-batches",
    lambda kind: kind in BALANCING_TYPES,
    choices=BALANCING_TYPES,
)

ON_THE_HOST = no_effect_when(
    lambda s: s.offload_policy,
    "{s}.offload_policy=true keeps weights and optimizer state in host memory all the time",
    "{s}.offload_policy=false",
)


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = option(1e-6, ge=0)
    """Peak learning rate."""
    betas: list[float] = option(factory=lambda: [0.9, 0.999], rule=DECAYS)
    """AdamW's betas: decay rates of the first and second moment."""
    eps: float = option(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = option(0.01, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = option(1.0, rule=Rule("must be above 0", lambda norm: norm > 0), verl=("grad_clip",))
    """Maximum global gradient norm (gradient clipping)."""
    lr_scheduler_type: str = option(
        "constant", choices=("constant", "linear", "cosine"), verl=("warmup_style", "lr_decay_style")
    )
    """Learning-rate schedule after the warm-up."""
    lr_warmup_steps: int = option(-1, ge=-1)
    """Warm-up in training steps, from a learning rate of 0; -1: use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float = option(
        0.0,
        ge=0,
        le=1,
        no_effect=no_effect_when(
            lambda s: s.lr_warmup_steps >= 0, "{s}.lr_warmup_steps is given", "{s}.lr_warmup_steps=-1"
        ),
    )
    """Warm-up as a fraction of all training steps."""
    min_lr_ratio: float = option(
        0.0,
        ge=0,
        le=1,
        no_effect=no_effect_when(
            lambda s: s.lr_scheduler_type == "constant",
            "{s}.lr_scheduler_type=constant never lowers the rate",
            "{s}.lr_scheduler_type=cosine",
        ),
    )
    """Final learning rate as a fraction of lr (linear and cosine)."""


@dataclass
class WrapPolicyConfig:
    """Which layers become FSDP units of their own."""

    min_num_params: int | None = option(None, ge=0)
    """Minimum number of parameters for a layer to be its own FSDP unit; smaller layers are gathered with the
    root: fewer collectives, higher peak memory. null: 3.5 million, so that a model of a few dozen million
    parameters is one unit; 50 million on a GPU with a full copy of the model, because each unit costs CPU
    time. verl's default is 0."""

    def least(self, shards: int, device_type: str, *, offloaded: bool) -> int:
        """Minimum number of parameters of a unit. shards: ranks that share a copy of the model; offloaded:
        whether fully_shard's offload policy copies each unit from host memory.

        >>> policy = WrapPolicyConfig()
        >>> policy.least(2, "gpu", offloaded=False), policy.least(1, "gpu", offloaded=True)
        (3500000, 3500000)
        >>> policy.least(1, "gpu", offloaded=False), policy.least(1, "cpu", offloaded=False)
        (50000000, 3500000)
        """
        if self.min_num_params is not None:
            return self.min_num_params
        return 50_000_000 if shards == 1 and device_type != "cpu" and not offloaded else 3_500_000


@dataclass
class FSDPConfig:
    """FSDP2 (fully_shard) settings."""

    model_dtype: str = option("fp32", choices=DTYPES)
    """Dtype of the stored weights and optimizer state (fp64 is for exact comparisons)."""
    dtype: str = option("auto", choices=("auto", *DTYPES, BF32), verl=("mixed_precision.param_dtype",))
    """Dtype of the forward and backward pass; auto: bf16 if the device supports it, else fp32; fp64 for fp64
    weights. bf32: fp32, with the products of the layers' matrices in bf16; nearer to fp32 than bf16 is, and
    slower. fp16 is for frozen models, because losses are not scaled."""
    reduce_dtype: str = option("fp32", choices=DTYPES, verl=("mixed_precision.reduce_dtype",))
    """Dtype of the gradient reduction across ranks."""
    reshard_after_forward: bool = free(True)
    """Reshard after forward: free gathered weights until the backward pass; less memory, one more
    all-gather."""
    param_offload: bool = free(False, no_effect=ON_THE_HOST)
    """Keep sharded weights in host memory while the role is idle; each of its calls moves them to the
    device."""
    optimizer_offload: bool = free(False, no_effect=ON_THE_HOST)
    """Keep the optimizer state in host memory between updates."""
    offload_policy: bool = free(False)
    """Keep sharded weights, gradients and optimizer state in host memory even during training (fully_shard's
    CPU offload policy): each layer is copied to the device at every use, and AdamW runs on the CPU."""
    head_chunk_tokens: int = free(8192, ge=1)
    """Chunk size, in tokens, in which logits are computed for log-probabilities. A chunk's float32 logits are
    limited to 512 MiB, so with a vocabulary above 16 384 a chunk is smaller than 8192 tokens. If all tokens
    fit into one chunk, logits are computed once; otherwise (and for models that post-process their logits)
    they are recomputed in the backward pass."""
    wrap_policy: WrapPolicyConfig = free(factory=WrapPolicyConfig)
    fsdp_size: int = free(-1)
    """FSDP shard group size: neighbouring ranks that hold one copy of weights, gradients and optimizer
    state. Smaller than the number of ranks gives HSDP, with ranks / fsdp_size replicas: less traffic between
    machines, more memory. -1: all ranks."""
    ulysses_sequence_parallel_size: int = free(1, size=True)
    """Ulysses sequence-parallel size: neighbouring devices that share the tokens of each row, for rows whose
    activations do not fit on one device. It must divide the number of attention heads, and needs packed rows
    (use_remove_padding)."""

    use_torch_compile: bool = free(False)
    """Compute RMSNorm, rotary embeddings and SwiGLU with torch.compile's kernels instead of our own: faster
    steps, a slower first start (later starts use the cache on disk). On a CPU it needs a C++ compiler.
    Results differ in the last bits, even between two starts of the same run."""

    @property
    def compute_dtype(self) -> str:
        """`dtype`, where auto with weights in fp64 is fp64, and bf32 fp32.

        >>> FSDPConfig().compute_dtype, FSDPConfig(model_dtype="fp64").compute_dtype
        ('auto', 'fp64')
        >>> FSDPConfig(dtype="bf32").compute_dtype, FSDPConfig(dtype="bf32").product_dtype
        ('fp32', 'bf16')
        """
        if self.dtype == BF32:
            return "fp32"
        return "fp64" if self.dtype == "auto" and self.model_dtype == "fp64" else self.dtype

    @property
    def product_dtype(self) -> str:
        """Dtype of the products of the layers' matrices: `compute_dtype`, but for bf32."""
        return "bf16" if self.dtype == BF32 else self.compute_dtype


LAYERS_OF_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Overrides of TransformerConfig that assign layers to stages."""


@dataclass
class MegatronConfig:
    """Megatron-Core parallelism settings."""

    tensor_model_parallel_size: int = free(1, size=True)
    """Tensor-parallel size (TP)."""
    pipeline_model_parallel_size: int = free(1, size=True)
    """Pipeline-parallel size (PP): number of stages."""
    virtual_pipeline_model_parallel_size: int | None = free(None, size=True)
    """Virtual pipeline size: model chunks per stage in the interleaved schedule; null: 1."""
    context_parallel_size: int = free(1, size=True)
    """Context-parallel size (CP): devices that share the tokens of packed rows. It must divide the attention
    heads of each tensor-parallel rank, which are exchanged for tokens (Ulysses, Megatron's a2a)."""
    expert_model_parallel_size: int = free(1, size=True)
    """Expert-parallel size (EP): devices that share the experts of a layer. They are taken from the
    tensor-parallel and data ranks of a stage."""
    expert_tensor_parallel_size: int | None = free(None, size=True)
    """Tensor-parallel size of the experts; null: tensor_model_parallel_size."""
    moe_router_dtype: str = option(
        "fp32", choices=("fp32", "fp64"), verl=("override_transformer_config.moe_router_dtype",)
    )
    """Dtype of the routers' computation."""
    moe_permute_fusion: bool = free(False, verl=("override_transformer_config.moe_permute_fusion",))
    """Permute tokens with Transformer Engine's fused kernels, if they are installed."""
    moe_router_load_balancing_type: str = option(
        "seq_aux_loss", rule=BALANCING, verl=("override_transformer_config.moe_router_load_balancing_type",)
    )
    """Load-balancing loss of the routers: seq_aux_loss, computed per row (DeepSeek-V3) and scaled by
    moe_aux_loss_coeff; or none."""
    moe_aux_loss_coeff: float = option(
        0.0,
        ge=0,
        verl=("override_transformer_config.moe_aux_loss_coeff",),
        no_effect=no_effect_when(
            lambda s: s.moe_router_load_balancing_type == "none",
            "{s}.moe_router_load_balancing_type=none has no loss",
            "{s}.moe_router_load_balancing_type=seq_aux_loss",
        ),
    )
    """Coefficient of the load-balancing loss, a mean over trained rows and a sum over layers. 0: routers
    learn from the policy loss only."""
    moe_router_bias_update_rate: float = option(
        0.0, ge=0, verl=("override_transformer_config.moe_router_bias_update_rate",)
    )
    """Update rate of the router biases (aux-loss-free load balancing) per optimizer step, for models that
    have them. 0: biases are frozen; moving them changes the policy without a loss."""
    sequence_parallel: bool = free(True)
    """Sequence parallelism: also shard activations outside the tensor-parallel layers."""
    use_dist_checkpointing: bool = False
    """Load weights from dist_checkpointing_path instead of the model's directory, which then only needs the
    configuration and tokenizer."""
    dist_checkpointing_path: str | None = option(
        None,
        beside=required(
            "{s}.use_dist_checkpointing=true loads weights from it",
            "{s}.dist_checkpointing_path=<checkpoint of Megatron-Core>",
        ),
        no_effect=unless("use_dist_checkpointing"),
    )
    """A checkpoint that Megatron-Core wrote (torch_dist), with any parallel sizes: the folder with its files,
    an iteration's folder, or a run's folder, whose latest iteration is used."""
    use_distributed_optimizer: bool = free(True)
    """Shard the optimizer state across data ranks."""
    param_offload: bool = free(False)
    """Keep weights in host memory while the role is idle; each of its calls moves them to the device."""
    grad_offload: bool = free(False)
    """Free the gradient buffers between updates, while they are empty. (The name is verl's; no gradient moves
    to host memory.)"""
    optimizer_offload: bool = free(False)
    """Keep the optimizer state, and the fp32 weights of a bf16 model, in host memory between optimizer steps;
    each step moves them to the device."""
    dtype: str = option("auto", choices=("auto", "fp32", "bf16"))
    """Dtype of the weights and of the forward and backward pass; auto: bf16 if the device supports it, else
    fp32. For bf16 weights the optimizer also keeps fp32 copies."""
    head_chunk_tokens: int = free(8192, ge=1)
    """Chunk size, in tokens, in which logits are computed for log-probabilities; smaller with a large
    vocabulary, as in fsdp_config."""
    override_transformer_config: dict[str, Any] = option(
        factory=dict,
        passes_to=ArgumentSource(
            MEGATRON,
            ("core/model_parallel_config.py", "core/transformer/transformer_config.py"),
            ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig"),
        ),
    )
    """Overrides of Megatron-Core's TransformerConfig."""
    override_ddp_config: dict[str, Any] = free(
        factory=dict,
        passes_to=ArgumentSource(
            MEGATRON,
            ("core/distributed/distributed_data_parallel_config.py",),
            ("DistributedDataParallelConfig",),
        ),
    )
    """Overrides of Megatron-Core's DistributedDataParallelConfig: pad_buckets_for_high_nccl_busbw and
    reduce_scatter_with_fp32_accumulation. Arguments that the engine depends on are refused."""

    @property
    def expert_tensor_size(self) -> int:
        """Tensor-parallel size of the experts.

        >>> MegatronConfig(tensor_model_parallel_size=4).expert_tensor_size
        4
        """
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def gives_layers(self) -> bool:
        """Whether the layers of each pipeline stage are set explicitly; otherwise they are equal shares."""
        return any(name in self.override_transformer_config for name in LAYERS_OF_STAGES)

    @property
    def recomputed_parts(self) -> tuple[str, ...]:
        """Parts of a layer that the overrides select for recomputation.

        >>> MegatronConfig(override_transformer_config={"recompute_modules": ["moe"]}).recomputed_parts
        ('moe',)
        """
        given = self.override_transformer_config.get("recompute_modules")
        names = given if isinstance(given, list) else [given]
        return tuple(name for name in names if isinstance(name, str))

    def recomputes_layers(self, *, checkpointing: bool) -> bool:
        """Whether whole layers are recomputed. checkpointing: `model.enable_gradient_checkpointing`, which an
        override of recompute_granularity replaces.

        >>> selective = MegatronConfig(override_transformer_config={"recompute_granularity": "selective"})
        >>> [one.recomputes_layers(checkpointing=True) for one in (MegatronConfig(), selective)]
        [True, False]
        """
        usual = "full" if checkpointing else None
        return self.override_transformer_config.get("recompute_granularity", usual) == "full"

    def recomputes_each_layer(self, *, checkpointing: bool) -> bool:
        """Whether every layer is recomputed by itself; if several are together, or some are not, memory is
        estimated as without recomputation."""
        overrides = self.override_transformer_config
        by_layer = overrides.get("recompute_num_layers", 1) == 1
        is_uniform = overrides.get("recompute_method", "uniform") == "uniform"
        return by_layer and is_uniform and self.recomputes_layers(checkpointing=checkpointing)

    @property
    def chunks(self) -> int:
        """Model chunks per stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def compute_dtype(self) -> str:
        """`dtype`, under the name shared by all engines."""
        return self.dtype

    @property
    def product_dtype(self) -> str:
        """`dtype`, under the name shared by all engines."""
        return self.dtype

    @property
    def model_dtype(self) -> str:
        """Dtype in which weights are updated and kept in checkpoints; whole models are saved in `dtype`."""
        return "fp32"


EngineConfig = FSDPConfig | MegatronConfig


def engine_config(strategy: str, section: Any) -> EngineConfig:
    """The section of a role that its training engine reads.

    section: the role's configuration, with a field for each engine. An unknown strategy, which
    `compose/rules.py` refuses, counts as fsdp2.
    """
    engine = TRAIN_ENGINES.get(strategy, TRAIN_ENGINES["fsdp2"])
    return getattr(section, engine.reads[0])
