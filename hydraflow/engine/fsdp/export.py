"""Full weights of a sharded model, as a stream for the generation engine.

In: a sharded model. Out: (Hugging Face name, full tensor) one at a time; adapters are merged on the fly;
the weights in training are unchanged. A tied output matrix is sent once. Left out on purpose: the receiver
of the stream (`generation/`), files (`engine/hf_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from hydraflow.engine.fsdp import lora
from hydraflow.engine.fsdp.build import hf_name
from hydraflow.engine.fsdp.gather import gathered
from hydraflow.models import loading
from hydraflow.models.heads import PolicyModel, ValueModel


@torch.no_grad()
def stream(module: PolicyModel | ValueModel, *, to: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathering is collective, so every rank must exhaust the iterator. `to`: as in `gathered`."""
    parameters = dict(module.named_parameters())
    layers = lora.adapted(module)
    adapters = dict(
        gathered({name: parameter for name, parameter in parameters.items() if lora.is_adapter(name)})
    )
    for name, full in gathered(
        {name: parameter for name, parameter in parameters.items() if not lora.is_adapter(name)}, to=to
    ):
        plain = name.replace(".base_layer.", ".")
        if plain in layers and not full.is_meta:
            stem = plain.removesuffix("weight")
            a, b = (adapters[f"{stem}lora_{side}.{lora.ADAPTER}.weight"] for side in "AB")
            full = lora.add_product(full, a, b, layers[plain])
        yield hf_name(module, name), full
    here = to in (None, dist.get_rank())
    for name, buffer in loading.persistent_buffers(module):
        yield hf_name(module, name), buffer if here else torch.empty_like(buffer, device="meta")


def full_weights(module: PolicyModel | ValueModel) -> dict[str, torch.Tensor] | None:
    """All of `stream` in rank 0's host memory; None on the other ranks, which must call it too."""
    first = dist.get_rank() == 0
    weights = {}
    for name, tensor in stream(module):
        if first:
            weights[name] = tensor.to("cpu", copy=True)
    return weights if first else None
