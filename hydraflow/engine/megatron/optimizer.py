"""Megatron-Core's optimizer: AdamW, sharded over data ranks or not, with float32 master weights if the
model's are 16-bit.

In: a model whose gradients Megatron-Core sums. Out: steps, and access to weights and moments by the model's
parameter, for checkpoints. Left out on purpose: the schedule (`engine/optim.py`), float16's scaled losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from hydraflow.engine import process_group
from hydraflow.engine.base import AS_CONFIGURED, StepOptions
from hydraflow.engine.config import MegatronConfig, OptimConfig

SLOTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments."""
STEP, WEIGHT = "step", "weight"


class CoreOptimizer:
    """The optimizer of one rank's part of a model."""

    def __init__(self, models: list[DistributedDataParallel], optim: OptimConfig, settings: MegatronConfig):
        first, second = optim.betas
        dtype = models[0].config.params_dtype
        chained = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta1=first,
                adam_beta2=second,
                adam_eps=optim.eps,
                clip_grad=optim.clip_grad,
                use_distributed_optimizer=settings.use_distributed_optimizer,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
            ),
            models,
            use_gloo_process_groups=False,
        )
        self._chain: Any = chained
        self._dtype = dtype
        self._has_experts = models[0].config.num_moe_experts is not None
        self._clip = optim.clip_grad
        for group in self._chain.param_groups:
            # Megatron-Core exempts norms and biases; in our engines all parameters decay
            group["weight_decay"], group["wd_mult"] = optim.weight_decay, 1.0

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of the next step."""
        for group in self._chain.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self, options: StepOptions = AS_CONFIGURED) -> float:
        """Clips and updates; returns the gradient norm before clipping. Does nothing if it is not finite."""
        self._chain.prepare_grads()
        norm = self._norm()
        if math.isfinite(norm):
            most = self._clip if options.clip_grad is None else options.clip_grad
            for one in self._chain.chained_optimizers:
                clip_grad_by_total_norm_fp32(one.get_parameters(), most, norm)
            with options.applied(self._chain.param_groups):
                self._chain.step_with_ready_grads()
        return norm

    def _norm(self) -> float:
        """Norm of the whole model's gradient. ChainedOptimizer's own deadlocks: a stage without experts takes
        no part in the sum over experts."""
        norms = [float(self._dense.get_grad_norm())]
        if self._has_experts:
            group = (
                self._dense.get_grad_stats_parallel_group()  # of all ranks
                if self._is_shared
                else parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            )
            gradients = [one.get_main_grads_for_grad_norm() for one in self._chain.chained_optimizers[1:]]
            norms.append(float(get_grad_norm_fp32(sum(gradients, []), grad_stats_parallel_group=group)))
        return math.hypot(*norms)

    def zero_grad(self) -> None:
        self._chain.zero_grad()

    def own_tensors(self) -> Iterator[torch.Tensor]:
        """The moments, and the float32 copies of 16-bit weights."""
        for adamw in (one.optimizer for one in self._chain.chained_optimizers):
            for main in (main for group in adamw.param_groups for main in group["params"]):
                if main.dtype != self._dtype:
                    yield main
                yield from (adamw.state[main][slot] for slot in SLOTS if main in adamw.state)

    # --- state by the model's parameter

    def has_moments(self) -> bool:
        """Whether there has been a step."""
        return any(self._dense.optimizer.state.values())

    def make_moments(self, *, empty: bool) -> None:
        """Drops the moments; creates new ones of 0 for a checkpoint to be loaded into, or none."""
        for adamw in (one.optimizer for one in self._chain.chained_optimizers):
            adamw.state.clear()
            for main in () if empty else (main for group in adamw.param_groups for main in group["params"]):
                adamw.state[main] = {slot: torch.zeros_like(main) for slot in SLOTS}
                if counts_by_parameter(adamw):
                    adamw.state[main][STEP] = torch.zeros(())
            for group in () if counts_by_parameter(adamw) else adamw.param_groups:
                group[STEP] = 0

    def steps(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """() updates of a parameter; collective, as `whole`."""
        main, _ = self._main(parameter)
        mine = torch.zeros(()) if main is None else count_of(self._one(parameter).optimizer, main)
        return process_group.all_reduce(mine, "max", sharers(parameter)).float()

    def set_steps(self, parameter: torch.nn.Parameter, steps: torch.Tensor) -> None:
        """The inverse of `steps`."""
        main, _ = self._main(parameter)
        if main is not None:
            set_count(self._one(parameter).optimizer, main, steps)

    def whole(self, parameter: torch.nn.Parameter, slot: str) -> torch.Tensor:
        """The parameter's weights (WEIGHT) or one of its moments, in its shape; collective over the data
        ranks that share them."""
        main, start = self._main(parameter)
        mine = None if main is None else main if slot == WEIGHT else self._state(parameter, main)[slot]
        group = sharers(parameter)
        if mine is not None and (not self._is_shared or group.size() == 1):
            return mine.detach().view(parameter.shape)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        full = torch.zeros(parameter.numel(), dtype=wide, device=parameter.device)
        if mine is not None:
            full[start : start + mine.numel()] = mine.detach().view(-1)
        dist.all_reduce(full, group=group)
        return full.view(parameter.shape)

    @torch.no_grad()
    def set_whole(self, parameter: torch.nn.Parameter, slot: str, value: torch.Tensor) -> None:
        """The inverse of `whole`; also sets the model's weights."""
        main, start = self._main(parameter)
        if main is not None:
            mine = main if slot == WEIGHT else self._state(parameter, main)[slot]
            mine.view(-1).copy_(value.reshape(-1)[start : start + mine.numel()])
        if slot == WEIGHT:
            parameter.copy_(value)

    @property
    def _dense(self) -> Any:
        """Megatron-Core's optimizer of all non-expert parameters; a second one has the experts, if this stage
        has any."""
        return self._chain.chained_optimizers[0]

    @property
    def _is_shared(self) -> bool:
        return isinstance(self._dense, DistributedOptimizer)

    def _one(self, parameter: torch.nn.Parameter) -> Any:
        return self._chain.chained_optimizers[int(is_expert(parameter))]

    def _state(self, parameter: torch.nn.Parameter, main: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._one(parameter).optimizer.state[main]

    def _main(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor | None, int]:
        """The shard of a parameter that AdamW updates here, and its offset in the flattened parameter."""
        if not self._is_shared:
            return getattr(parameter, "main_param", parameter), 0
        one = self._one(parameter)
        if parameter not in one.model_param_group_index_map:
            return None, 0
        group, at = one.model_param_group_index_map[parameter]
        found = one._get_model_param_range_map(parameter)["param"]
        return one.optimizer.param_groups[group]["params"][at], found.start


def counts_by_parameter(adamw: Any) -> bool:
    """Whether an AdamW counts updates per parameter, as torch's does; those of Transformer Engine and Apex
    count per parameter group."""
    return type(adamw).__module__.startswith("torch.optim.")


def count_of(adamw: Any, main: torch.Tensor) -> torch.Tensor:
    """() updates of a parameter."""
    if counts_by_parameter(adamw):
        return adamw.state[main][STEP].detach().cpu()
    return torch.tensor(float(_group_of(adamw, main).get(STEP, 0)))


def set_count(adamw: Any, main: torch.Tensor, steps: torch.Tensor) -> None:
    """The inverse of `count_of`; sets the whole group where it has one count."""
    if counts_by_parameter(adamw):
        adamw.state[main][STEP].copy_(steps)
    else:
        _group_of(adamw, main)[STEP] = int(steps)


def _group_of(adamw: Any, main: torch.Tensor) -> dict[str, Any]:
    return next(group for group in adamw.param_groups if any(one is main for one in group["params"]))


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether it is an expert's parameter, whose gradient is summed only over the ranks with the same
    experts."""
    return not getattr(parameter, "allreduce", True)


def sharers(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """The data ranks that hold the same parameter."""
    return (
        parallel_state.get_expert_data_parallel_group()
        if is_expert(parameter)
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
