"""Configuration of Megatron-Core's gradient buffers and their reduction over data ranks.

In: the sizes of an engine, and overrides. Out: a DistributedDataParallelConfig. Overrides that the engine
does not allow, or that only another engine reads, are refused with the reason. That check also runs before a
run starts, so Megatron-Core is imported only to build the configuration. Left out on purpose: reductions that
overlap with the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hydraflow.engine.config import MegatronConfig
from hydraflow.errors import ConfigError, Problem, shown

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig


def ddp_config(settings: MegatronConfig, *, section: str) -> DistributedDataParallelConfig:
    """Raises ConfigError as `require_free` does; `section`: the role's."""
    from megatron.core.distributed import DistributedDataParallelConfig

    require_free(settings, section=section)
    own = dict(grad_reduce_in_fp32=True, use_distributed_optimizer=settings.use_distributed_optimizer)
    return DistributedDataParallelConfig(**own | settings.override_ddp_config)


def require_free(settings: MegatronConfig, *, section: str) -> None:
    """Raises ConfigError for overrides of fixed or unknown arguments."""
    engine = f"{section}.megatron"
    fixed = FIXED | {OWN: (getattr(settings, OWN), "has its own key")}
    problems = []
    for key, value in settings.override_ddp_config.items():
        field = f"{engine}.override_ddp_config.{key}"
        remedy = f"{engine}.{OWN}={shown(value)}" if key == OWN else f"leave out {field}"
        usual, rule = fixed.get(key, (None, "Megatron-Core has no such argument"))
        if key in FREE:
            usual, rule, remedy = bool(value), "must be true or false", f"{field}=true"
        if value != usual or type(value) is not type(usual):
            problems.append(Problem(field, shown(value), rule, remedy))
    if problems:
        raise ConfigError(problems)


OWN = "use_distributed_optimizer"
FREE = ("pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation")
_OVERLAP = "gradients are summed, and weights gathered, once all passes of an update have run"
_SKIPS = "would end the run; here an update with a non-finite gradient is skipped and counted in the metrics"
_NCCL = "the engine's buffers are not NCCL's: they are freed and filled again (param_offload, grad_offload)"
_EIGHT_BITS = "the engine has no 8-bit weights"
_FSDP = "only Megatron-Core's own FSDP reads it, which this engine does not use"
FIXED: dict[str, tuple[Any, str]] = {
    "grad_reduce_in_fp32": (
        True,
        "gradients summed in 16 bits would depend on how rows are split into micro-batches",
    ),
    "average_in_collective": (
        False,
        "losses include their denominators, so gradients are summed and never averaged",
    ),
    "gradient_reduce_div_fusion": (True, "gradients are summed and never averaged"),
    "overlap_grad_reduce": (False, _OVERLAP),
    "overlap_param_gather": (False, _OVERLAP),
    "align_param_gather": (False, _OVERLAP),
    "bucket_size": (None, f"{_OVERLAP}, so there is one bucket"),
    "delay_wgrad_compute": (False, "gradients of weights are computed with those of activations"),
    "num_distributed_optimizer_instances": (1, "the optimizer state is divided over all data ranks"),
    "check_for_nan_in_grad": (False, _SKIPS),
    "check_for_large_grads": (False, _SKIPS),
    "nccl_ub": (False, _NCCL),
    "disable_symmetric_registration": (False, _NCCL),
    "fp8_param_gather": (False, _EIGHT_BITS),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, _EIGHT_BITS),
    "keep_fp8_transpose_cache": (False, _EIGHT_BITS),
    "use_megatron_fsdp": (False, _FSDP),
    "use_custom_fsdp": (False, _FSDP),
    "data_parallel_sharding_strategy": ("no_shard", _FSDP),
    "outer_dp_sharding_strategy": ("no_shard", _FSDP),
    "suggested_communication_unit_size": (None, _FSDP),
    "preserve_fp32_weights": (True, _FSDP),
    "fsdp_double_buffer": (False, _FSDP),
    "fsdp_manual_registration": (False, _FSDP),
}
"""Arguments that cannot be overridden -> (their value, why)."""
