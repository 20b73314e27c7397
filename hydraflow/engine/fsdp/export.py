"""Full weights of a sharded model: as a stream for the generation engine, or as a Hugging Face directory.

In: a sharded model. Out: (Hugging Face name, full tensor) one at a time; adapters are merged on the fly;
the weights in training are unchanged. A tied output matrix is sent once. Left out on purpose: the receiver
of the stream (`generation/`).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hydraflow.engine.fsdp import lora
from hydraflow.engine.fsdp.build import hf_name
from hydraflow.engine.fsdp.gather import gathered
from hydraflow.models import loading
from hydraflow.models.config import ModelConfig
from hydraflow.models.heads import PolicyModel, ValueModel
from hydraflow.system.whole_files import replace_folder

if TYPE_CHECKING:
    from transformers import GenerationConfig


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


def save_hf(module: PolicyModel | ValueModel, model: ModelConfig, directory: Path, *, field: str) -> None:
    """Gathers on rank 0 and writes there, under a temporary name first. All ranks return together."""
    weights = full_weights(module)
    if weights is not None:
        unfinished = directory.with_name(directory.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_hugging_face(hf_files_of(module, model, weights=True), weights, unfinished, field=field)
        replace_folder(unfinished, directory)
    dist.barrier()


@dataclass(frozen=True)
class HuggingFaceFiles:
    """What a Hugging Face directory holds besides weights."""

    config: Any
    model: ModelConfig
    shape: Any
    """The model of transformers that the weights fill, without values; None: there is no such class, or
    its name is enough."""
    class_name: str | None
    """Its name in config.json."""
    generation: GenerationConfig | None = None
    """Generation settings of a policy."""


def hf_files_of(module: PolicyModel | ValueModel, model: ModelConfig, *, weights: bool) -> HuggingFaceFiles:
    """Must not run in a thread during training: transformers changes torch's default dtype for the whole
    process while it builds a model.

    weights: whether weights will be written as well.
    """
    if isinstance(module, ValueModel):
        config = type(module.hf.config).from_dict(module.hf.config.to_dict())
        config.num_labels, config.token_classification_bias = 1, False
        shape = _value_shape(config, trust=model.trust_remote_code)
        return HuggingFaceFiles(config, model, shape, None if shape is None else type(shape).__name__)
    config, generation = copy.deepcopy(module.hf.config), loading.load_generation_config(model)
    name = loading.causal_class(config, model).__name__
    return HuggingFaceFiles(
        config, model, _policy_shape(config, model, generation) if weights else None, name, generation
    )


def write_hugging_face(
    hf_files: HuggingFaceFiles, weights: dict[str, torch.Tensor] | None, directory: Path, *, field: str
) -> None:
    """Configuration, generation settings of a policy, tokenizer and, unless they are None, weights. In any
    thread."""
    from huggingface_hub import save_torch_state_dict

    directory.mkdir(parents=True)
    if weights is not None and hf_files.shape is not None:
        hf_files.shape.save_pretrained(directory, state_dict=weights)
    else:
        hf_files.config.architectures = None if hf_files.class_name is None else [hf_files.class_name]
        hf_files.config.save_pretrained(directory)
        if hf_files.generation is not None:
            hf_files.generation.save_pretrained(directory)
        if weights is not None:
            save_torch_state_dict(weights, directory)
    loading.load_tokenizer(hf_files.model, field=field, chat=False).save_pretrained(directory)


def _policy_shape(config: Any, model: ModelConfig, generation: GenerationConfig | None) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shape: Any = AutoModelForCausalLM.from_config(
            config, dtype=config.dtype, trust_remote_code=model.trust_remote_code
        )
    if generation is not None:
        shape.generation_config = generation
    return shape


def _value_shape(config: Any, *, trust: bool) -> Any:
    """A model whose head is `score.weight` alone, without values; None: no such class.

    GPT-2's token classification, for one, calls its head `classifier` and gives it a bias: there it is
    sequence classification.
    """
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    for auto in (AutoModelForTokenClassification, AutoModelForSequenceClassification):
        try:
            with torch.device("meta"):
                found: Any = auto.from_config(config, dtype=config.dtype, trust_remote_code=trust)
        except (ValueError, KeyError, OSError):  # no such class
            continue
        if {name for name in found.state_dict() if not name.startswith(f"{found.base_model_prefix}.")} == {
            "score.weight"
        }:
            return found
    return None
