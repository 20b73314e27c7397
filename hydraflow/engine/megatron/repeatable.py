"""Checks, when a model with experts is loaded, that two passes over the same rows give the same numbers.

In: an engine's forward pass. Out: nothing, or a ConfigError. If a token's experts changed from one pass to
the next, its log-probability would differ in the update, as if the policy had moved. Collective; all ranks
reach the same decision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hydraflow.engine import process_group
from hydraflow.engine.config import MegatronConfig
from hydraflow.errors import ConfigError
from hydraflow.models.probe import probe_rows
from hydraflow.protocol.batch import DataProto

LIMITS = {torch.float32: 1e-5}
ROUNDED = 0.02
"""Tolerance of the mean difference of log-probabilities or values, for dtypes that are not in LIMITS. The
mean, because another summation order may move a single token."""


def require_repeatable(
    forward: Callable[[list[DataProto]], DataProto],
    vocabulary: int,
    dtype: torch.dtype,
    *,
    section: str,
    settings: MegatronConfig,
) -> None:
    """Raises ConfigError on every rank when two passes over a few rows differ. section: the role's."""
    prompts, responses = probe_rows(vocabulary)
    rows = DataProto.from_dict({"prompts": prompts, "responses": responses})
    first, second = (torch.cat([*forward([rows]).flat_columns().values()]).double() for _ in range(2))
    off = torch.nan_to_num((first - second).abs().mean(), nan=float("inf"))
    found = float(process_group.all_reduce(off, "max"))
    if found <= LIMITS.get(dtype, ROUNDED):
        return
    rule = f"two passes over the same rows differ by {found:.2g} on average"
    engine = f"{section}.megatron"
    if settings.moe_permute_fusion:
        raise ConfigError.one(
            f"{engine}.moe_permute_fusion", True, rule, f"{engine}.moe_permute_fusion=false"
        )
    if settings.moe_router_dtype == "fp32":
        raise ConfigError.one(f"{engine}.moe_router_dtype", "fp32", rule, f"{engine}.moe_router_dtype=fp64")
    raise ConfigError.one(f"{section}.strategy", "megatron", rule, f"{section}.strategy=fsdp2")
