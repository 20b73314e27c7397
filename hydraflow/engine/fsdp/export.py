"""Full weights of a sharded model, as a stream for the generation engine.

In: a sharded model. Out: (Hugging Face name, full tensor) one at a time; adapters are merged on the fly or
sent separately; the weights in training are unchanged. A tied output matrix is sent once. Left out on
purpose: the receiver of the stream (`generation/`), files (`engine/hf_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from hydraflow.engine.fsdp import lora
from hydraflow.engine.fsdp.build import hf_name
from hydraflow.engine.fsdp.gather import gathered
from hydraflow.models import loading
from hydraflow.models.adapters import SIDES, Form, is_adapter
from hydraflow.models.heads import PolicyModel, ValueModel


@torch.no_grad()
def stream(
    module: PolicyModel | ValueModel, *, to: int | None = None, form: Form = Form.MERGED
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathering is collective, so every rank must exhaust the iterator. `to`: as in `gathered`."""
    if form != Form.ADAPTERS:
        yield from _plain_weights(module, to=to, merged=form == Form.MERGED)
        here = to in (None, dist.get_rank())
        for name, buffer in loading.persistent_buffers(module):
            yield hf_name(module, name), buffer if here else torch.empty_like(buffer, device="meta")
    if form != Form.MERGED:
        layers = lora.adapted(module)
        for name, full in gathered(_parameters(module, adapters=True), to=to):
            sent = full if full.is_meta else lora.scaled(name, full, layers)
            yield hf_name(module, lora.sent_name(name)), sent


def _plain_weights(
    module: PolicyModel | ValueModel, *, to: int | None, merged: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights except adapters; these are added to the weights if `merged`."""
    layers = lora.adapted(module) if merged else {}
    adapters = dict(gathered(_parameters(module, adapters=True))) if merged else {}
    for name, full in gathered(_parameters(module, adapters=False), to=to):
        plain = name.replace(".base_layer.", ".")
        if plain in layers and not full.is_meta:
            stem = plain.removesuffix("weight")
            a, b = (adapters[f"{stem}{side}.{lora.ADAPTER}.weight"] for side in SIDES)
            full = lora.add_product(full, a, b, layers[plain])
        yield hf_name(module, name), full


def _parameters(module: PolicyModel | ValueModel, *, adapters: bool) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in module.named_parameters() if is_adapter(name) == adapters}
