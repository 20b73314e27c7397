"""Megatron-Core's optimizer: AdamW, sharded over data ranks or not, with float32 weights of its own where the
model computes in a shorter type.

In: a model whose gradients Megatron-Core sums. Out: steps, and access to weights and moments by the model's
parameter, for checkpoints. Left out on purpose: the schedule (`engine/optim.py`), float16's scaled losses.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from hydraflow.engine import process_group
from hydraflow.engine.config import MegatronConfig, OptimConfig

SLOTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments."""
STEP, WEIGHT = "step", "weight"


class CoreOptimizer:
    """The optimizer of one rank's part of a model."""

    def __init__(self, model: DistributedDataParallel, optim: OptimConfig, settings: MegatronConfig):
        first, second = optim.betas
        dtype = model.config.params_dtype
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
            [model],
            use_gloo_process_groups=False,
        )
        self._one: Any
        (self._one,) = chained.chained_optimizers
        self._clip = optim.clip_grad
        for group in self._one.param_groups:
            # as in every engine: all parameters decay, norms among them
            group["weight_decay"], group["wd_mult"] = optim.weight_decay, 1.0

    def set_lr(self, lr: float) -> None:
        """Of the next step."""
        for group in self._one.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self) -> float:
        """Clips and updates; the gradient's norm before clipping. Nothing happens if that is not finite."""
        self._one.prepare_grads()
        norm = float(self._one.get_grad_norm())
        if math.isfinite(norm):
            clip_grad_by_total_norm_fp32(self._one.get_parameters(), self._clip, norm)
            self._one.step_with_ready_grads()
        return norm

    def zero_grad(self) -> None:
        """Drops the gradient."""
        self._one.zero_grad()

    # --- state by the model's parameter

    def has_moments(self) -> bool:
        """Whether there has been a step."""
        return any(self._inner.state.values())

    def make_moments(self, *, empty: bool) -> None:
        """Drops the moments, and makes new ones of 0 for a checkpoint to be loaded into, or none."""
        self._inner.state.clear()
        if empty:
            return
        for group in self._inner.param_groups:
            for main in group["params"]:
                zeros = {slot: torch.zeros_like(main) for slot in SLOTS}
                self._inner.state[main] = {STEP: torch.zeros(()), **zeros}

    def steps(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """() updates of a parameter; collective, as `whole`."""
        main, _ = self._main(parameter)
        mine = torch.zeros(()) if main is None else self._inner.state[main][STEP].detach().cpu()
        return process_group.all_reduce(mine, "max", self._sharers()).float()

    def set_steps(self, parameter: torch.nn.Parameter, steps: torch.Tensor) -> None:
        """Sets what `steps` gives."""
        main, _ = self._main(parameter)
        if main is not None:
            self._inner.state[main][STEP].copy_(steps)

    def whole(self, parameter: torch.nn.Parameter, slot: str) -> torch.Tensor:
        """The parameter's weights (WEIGHT) or one of its moments, in its shape; collective over the data
        ranks that share them."""
        main, start = self._main(parameter)
        mine = None if main is None else main if slot == WEIGHT else self._inner.state[main][slot]
        if mine is not None and not self._is_shared:
            return mine.detach().view(parameter.shape)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        full = torch.zeros(parameter.numel(), dtype=wide, device=parameter.device)
        if mine is not None:
            full[start : start + mine.numel()] = mine.detach().view(-1)
        dist.all_reduce(full, group=self._sharers())
        return full.view(parameter.shape)

    @torch.no_grad()
    def set_whole(self, parameter: torch.nn.Parameter, slot: str, value: torch.Tensor) -> None:
        """Sets what `whole` gives; weights also in the model."""
        main, start = self._main(parameter)
        if main is not None:
            mine = main if slot == WEIGHT else self._inner.state[main][slot]
            mine.view(-1).copy_(value.reshape(-1)[start : start + mine.numel()])
        if slot == WEIGHT:
            parameter.copy_(value)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = self._one.optimizer
        return found

    @property
    def _is_shared(self) -> bool:
        return isinstance(self._one, DistributedOptimizer)

    def _sharers(self) -> dist.ProcessGroup:
        found: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return found

    def _main(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor | None, int]:
        """What AdamW updates here of a parameter, and where in the flattened parameter it begins."""
        if not self._is_shared:
            return getattr(parameter, "main_param", parameter), 0
        if parameter not in self._one.model_param_group_index_map:
            return None, 0
        group, at = self._one.model_param_group_index_map[parameter]
        found = self._one._get_model_param_range_map(parameter)["param"]
        return self._inner.param_groups[group]["params"][at], found.start
