"""Hooks into the routers of transformers' mixtures to record or replay their choice of experts
(`routing.py`).

In: a model. Out: its routers, in the order of its layers. A supported router is a module that takes the top-k
of its scores once, and returns logits, weights and expert indices; its own code computes everything but the
top-k. Left out on purpose: other routers (DeepSeek-V3's layers select outside the router).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hydraflow.models.routing import LineRoutes, RouterReplay

TOP_K = (torch.topk, torch.Tensor.topk)


class HFRouters:
    """All routers of a model, with their top-k intercepted. L: how many there are."""

    def __init__(self, model: PreTrainedModel):
        found = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        sizes = {_sizes(type(router), model.config.get_text_config()) for router in found}
        alike = len(sizes) == 1 and None not in sizes
        self.experts, self.chosen = (sizes.pop() if alike else None) or (0, 0)
        """E and K; 0 if the model has no experts, or an unsupported router."""
        routers = found if alike else []
        self.replays = list(map(RouterReplay, range(len(routers))))
        for replay, router in zip(self.replays, routers, strict=True):
            router.forward = partial(_routed, router.forward, replay)  # type: ignore[method-assign]

    def begin(self, line: LineRoutes | None) -> None:
        """Sets the line for all forward passes until the next call; it may be computed repeatedly."""
        for replay in self.replays:
            replay.line = line


class _Choice(TorchFunctionMode):
    """Routes every top-k through `choose`."""

    def __init__(self, choose: Callable[..., tuple[torch.Tensor, torch.Tensor]]):
        super().__init__()
        self.choose = choose

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return torch.return_types.topk(self.choose(args[0], *found)) if func in TOP_K else found


def _routed(forward: Callable[..., Any], replay: RouterReplay, *args: Any, **kwargs: Any) -> Any:
    """The router's forward with the prescribed experts."""
    if replay.line is None:
        return forward(*args, **kwargs)
    with _Choice(replay.choose):
        return forward(*args, **kwargs)


def _sizes(router: type[nn.Module], config: Any) -> tuple[int, int] | None:
    """E and K of a router of this class, or None if it is not supported; found on the meta device."""
    seen: list[tuple[int, int]] = []

    def note(scores: torch.Tensor, values: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append((scores.shape[-1], own.shape[-1]))
        return values, own

    try:
        with torch.device("meta"), _Choice(note):  # type: ignore[arg-type]
            output = router(config)(torch.empty(1, config.hidden_size))
    except (AttributeError, TypeError):  # not a supported router
        return None
    if len(seen) != 1 or not isinstance(output, tuple):
        return None
    numbers = output[-1]
    return seen[0] if numbers.shape == (1, seen[0][1]) and numbers.dtype == torch.int64 else None
