"""Full weights out of a sharded model: as a stream for whoever samples, or as a Hugging Face directory.

In: a sharded model. Out: (Hugging Face name, full tensor) one at a time; adapters are merged in passing, and the weights
in training stay as they are. A tied output matrix is not sent twice.
Left out on purpose: who receives the stream (`generation/`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hydraflow.engine.fsdp import lora
from hydraflow.engine.fsdp.build import hf_name
from hydraflow.engine.fsdp.gather import gathered
from hydraflow.models import loading
from hydraflow.models.config import ModelConfig
from hydraflow.models.heads import PolicyModel, ValueModel


@torch.no_grad()
def stream(module: PolicyModel | ValueModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every rank takes part in gathering the tensors, so all ranks must run through it to the end."""
    parameters = dict(module.named_parameters())
    layers = lora.adapted(module)
    adapters = dict(gathered({name: parameter for name, parameter in parameters.items() if lora.is_adapter(name)}))
    for name, full in gathered({name: parameter for name, parameter in parameters.items() if not lora.is_adapter(name)}):
        plain = name.replace(".base_layer.", ".")
        if plain in layers:
            stem = plain.removesuffix("weight")
            a, b = (adapters[f"{stem}lora_{side}.{lora.ADAPTER}.weight"] for side in "AB")
            full = lora.add_product(full, a, b, layers[plain])
        yield hf_name(module, name), full
    for name, buffer in loading.persistent_buffers(module):
        yield hf_name(module, name), buffer


def full_weights(module: PolicyModel | ValueModel) -> dict[str, torch.Tensor] | None:
    """All of `stream` in rank 0's host memory; None on the other ranks, which take part."""
    first = dist.get_rank() == 0
    weights = {}
    for name, tensor in stream(module):
        if first:
            weights[name] = tensor.to("cpu", copy=True)
    return weights if first else None


def save_hf(module: PolicyModel | ValueModel, model: ModelConfig, directory: Path, *, field: str) -> None:
    """Gathers on rank 0 and writes there, under a temporary name first. All ranks leave together."""
    weights = full_weights(module)
    if weights is not None:
        unfinished = directory.with_name(directory.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_hugging_face(module, model, weights, unfinished, field=field)
        replace_directory(unfinished, directory)
    dist.barrier()


def write_hugging_face(
    module: PolicyModel | ValueModel, model: ModelConfig, weights: dict[str, torch.Tensor] | None, directory: Path, *, field: str
) -> None:
    """Configuration, generation settings, tokenizer and, unless they are None, weights. Of `module` only the configuration is read."""
    directory.mkdir(parents=True)
    if isinstance(module, ValueModel):
        _write_value_model(module.hf.config, weights, directory)
    else:
        _write_policy(module.hf.config, model, weights, directory)
    loading.load_tokenizer(model, field=field, chat=False).save_pretrained(directory)


def replace_directory(finished: Path, target: Path) -> None:
    """Gives a finished directory its name; what stood there before goes."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    finished.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _write_policy(config: Any, model: ModelConfig, weights: dict[str, torch.Tensor] | None, directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    generation = loading.load_generation_config(model)
    if weights is None:
        written = type(config).from_dict(config.to_dict())
        written.architectures = [loading.causal_class(config, model).__name__]
        written.save_pretrained(directory)
        if generation is not None:
            generation.save_pretrained(directory)
        return
    with torch.device("meta"):
        shape: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype, trust_remote_code=model.trust_remote_code)
    if generation is not None:
        shape.generation_config = generation
    shape.save_pretrained(directory, state_dict=weights)


def _write_value_model(config: Any, weights: dict[str, torch.Tensor] | None, directory: Path) -> None:
    """In the form of Hugging Face's token classification with one label, where the architecture has one."""
    from huggingface_hub import save_torch_state_dict
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

    written = type(config).from_dict(config.to_dict())
    written.num_labels, written.token_classification_bias = 1, False
    architecture = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    written.architectures = [architecture] if architecture else None
    written.save_pretrained(directory)
    if weights is not None:
        save_torch_state_dict(weights, directory)
