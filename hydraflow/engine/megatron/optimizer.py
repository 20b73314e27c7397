"""Megatron-Core's optimizer: AdamW, sharded over data ranks or not, with float32 master weights if the
model's are 16-bit.

In: a model whose gradients Megatron-Core sums. Out: steps, and access to weights and moments by model
parameter, for checkpoints. Left out on purpose: the schedule (`engine/optim.py`), loss scaling for float16.
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
        self._chain: Any = get_megatron_optimizer(
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
        """Clips the gradient and updates the weights, unless the gradient norm is not finite. Returns the
        norm before clipping."""
        self._chain.prepare_grads()
        norm = self._norm()
        if math.isfinite(norm):
            max_norm = self._clip if options.clip_grad is None else options.clip_grad
            for one in self._chain.chained_optimizers:
                clip_grad_by_total_norm_fp32(one.get_parameters(), max_norm, norm)
            with options.applied(self._chain.param_groups):
                self._chain.step_with_ready_grads()
        return norm

    def _norm(self) -> float:
        """Norm of the whole model's gradient. ChainedOptimizer's own method deadlocks: a stage without
        experts takes no part in the sum over experts."""
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

    # --- state by model parameter

    def has_moments(self) -> bool:
        """Whether there has been a step."""
        return any(self._dense.optimizer.state.values())

    def make_moments(self, *, empty: bool) -> None:
        """Replaces the moments by zeros, to load a checkpoint into; `empty`: only drops them."""
        for adamw in (one.optimizer for one in self._chain.chained_optimizers):
            adamw.state.clear()
            by_parameter = counts_by_parameter(adamw)
            for group in adamw.param_groups:
                if not by_parameter:
                    group[STEP] = 0
                for main in () if empty else group["params"]:
                    adamw.state[main] = {slot: torch.zeros_like(main) for slot in SLOTS}
                    if by_parameter:
                        adamw.state[main][STEP] = torch.zeros(())

    def steps(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """() number of updates of a parameter. Collective, as `whole`."""
        main, _ = self._main(parameter)
        mine = torch.zeros(()) if main is None else count_of(self._optimizer_of(parameter).optimizer, main)
        return process_group.all_reduce(mine, "max", sharers(parameter)).float()

    def set_steps(self, parameter: torch.nn.Parameter, steps: torch.Tensor) -> None:
        """The inverse of `steps`."""
        main, _ = self._main(parameter)
        if main is not None:
            set_count(self._optimizer_of(parameter).optimizer, main, steps)

    def whole(self, parameter: torch.nn.Parameter, slot: str) -> torch.Tensor:
        """The parameter's weights (WEIGHT) or one of its moments, in its shape. Collective over the data
        ranks that hold the parameter."""
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
        """Megatron-Core's optimizer of the parameters other than experts'; a second one has those, if this
        stage has experts."""
        return self._chain.chained_optimizers[0]

    @property
    def _is_shared(self) -> bool:
        """Whether data ranks shard the optimizer state."""
        return isinstance(self._dense, DistributedOptimizer)

    def _optimizer_of(self, parameter: torch.nn.Parameter) -> Any:
        return self._chain.chained_optimizers[int(is_expert(parameter))]

    def _state(self, parameter: torch.nn.Parameter, main: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._optimizer_of(parameter).optimizer.state[main]

    def _main(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor | None, int]:
        """The shard of a parameter that AdamW updates on this rank (None: no shard), and its offset in the
        flattened parameter."""
        if not self._is_shared:
            return getattr(parameter, "main_param", parameter), 0
        one = self._optimizer_of(parameter)
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
    """() number of updates of a parameter."""
    if counts_by_parameter(adamw):
        return adamw.state[main][STEP].detach().cpu()
    return torch.tensor(float(_group_of(adamw, main).get(STEP, 0)))


def set_count(adamw: Any, main: torch.Tensor, steps: torch.Tensor) -> None:
    """The inverse of `count_of`; where a group has one count, sets it for the whole group."""
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
