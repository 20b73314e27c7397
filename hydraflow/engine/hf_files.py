"""Writes a model in training as a Hugging Face directory: configuration, generation settings, tokenizer,
weights.

In: a transformers model, with or without values, and full weights by name or as an engine's stream. Out:
files. Left out on purpose: gathering the weights (`fsdp/export.py`, `megatron/export.py`).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hydraflow.engine.process_group import on_first_rank
from hydraflow.models import loading
from hydraflow.models.config import ModelConfig
from hydraflow.models.heads import PolicyModel, ValueModel
from hydraflow.system.whole_files import replace_folder

if TYPE_CHECKING:
    from transformers import GenerationConfig


def save_whole(
    module: Callable[[], PolicyModel | ValueModel],
    model: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    *,
    field: str,
) -> None:
    """Rank 0 writes, under a temporary name first; it alone calls `module`. `weights`: the engine's stream to
    rank 0. All ranks return together, or raise rank 0's ConfigError."""
    whole = first_rank_copy(weights)

    def write() -> None:
        unfinished = directory.with_name(directory.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_hugging_face(hf_files_of(module(), model, weights=True), whole, unfinished, field=field)
        replace_folder(unfinished, directory)

    on_first_rank(write)


def first_rank_copy(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor] | None:
    """All weights of a stream in rank 0's host memory; None on the others. Every rank exhausts the stream,
    because it may be collective."""
    first = dist.get_rank() == 0
    found = {name: tensor.to("cpu", copy=True) for name, tensor in weights if first}
    return found if first else None


@dataclass(frozen=True)
class HuggingFaceFiles:
    """Contents of a Hugging Face directory besides weights."""

    config: Any
    model: ModelConfig
    shape: Any
    """The transformers model for the weights, on the meta device; None: there is no such class, or no weights
    are written."""
    class_name: str | None
    """Its name in config.json."""
    generation: GenerationConfig | None = None
    """Generation settings of a policy."""


def hf_files_of(module: PolicyModel | ValueModel, model: ModelConfig, *, weights: bool) -> HuggingFaceFiles:
    """Everything for the directory except weights. Must not run in a thread during training: transformers
    changes torch's default dtype for the whole process while it builds a model.

    weights: whether weights will be written as well.
    """
    if isinstance(module, ValueModel):
        config = type(module.hf.config).from_dict(module.hf.config.to_dict())
        config.num_labels, config.token_classification_bias = 1, False
        shape = _value_shape(config, trust=model.trust_remote_code)
        return HuggingFaceFiles(config, model, shape, None if shape is None else type(shape).__name__)
    config, generation = copy.deepcopy(module.hf.config), loading.load_generation_config(model)
    name = loading.causal_class(config, model).__name__
    shape = _policy_shape(config, model, generation) if weights else None
    return HuggingFaceFiles(config, model, shape, name, generation)


def write_hugging_face(
    hf_files: HuggingFaceFiles, weights: dict[str, torch.Tensor] | None, directory: Path, *, field: str
) -> None:
    """Writes configuration, a policy's generation settings, tokenizer, and weights unless they are None. May
    run in any thread."""
    from huggingface_hub import save_torch_state_dict

    directory.mkdir(parents=True)
    if weights is not None and hf_files.shape is not None:
        hf_files.shape.save_pretrained(directory, state_dict=weights)
    else:
        hf_files.config.architectures = None if hf_files.class_name is None else [hf_files.class_name]
        hf_files.config.save_pretrained(directory)
        if weights is not None:
            save_torch_state_dict(weights, directory)
        if hf_files.model.trust_remote_code:
            _copy_code(hf_files.model, directory)
    if hf_files.generation is not None:
        # save_pretrained refuses settings that from_pretrained accepts, such as a top_p without do_sample
        hf_files.generation.to_json_file(directory / loading.GENERATION_CONFIG)
    loading.load_tokenizer(hf_files.model, field=field, chat=False).save_pretrained(directory)


def _copy_code(model: ModelConfig, directory: Path) -> None:
    """Copies the model's own code, which its configuration names. transformers copies it only with the
    weights of a class from that code."""
    folder = loading.local_folder(str(model.path))
    for file in folder.glob("*.py") if folder is not None else ():
        shutil.copyfile(file, directory / file.name)


def _policy_shape(config: Any, model: ModelConfig, generation: GenerationConfig | None) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        shape: Any = AutoModelForCausalLM.from_config(
            config, dtype=config.dtype, trust_remote_code=model.trust_remote_code
        )
    if generation is not None:
        shape.generation_config = GenerationConfig()  # it is written apart
    return shape


def _value_shape(config: Any, *, trust: bool) -> Any:
    """A model on the meta device whose head is just `score.weight`; None: transformers has no such class.

    GPT-2's token classification head, for example, is named `classifier` and has a bias, so its sequence
    classification class is used.
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
