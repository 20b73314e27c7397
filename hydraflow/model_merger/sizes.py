"""The sizes of a model that Megatron-Core trained, from its config.json.

In: a Hugging Face directory. Out: an `Architecture` of the Megatron engine, even of a model that the engine
would compute differently. Left out on purpose: what is done with it (`engine/megatron/saved_names.py`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydraflow.engine.megatron.architecture import FAMILIES, Architecture
from hydraflow.engine.stored.checkpoint import read_json
from hydraflow.errors import ConfigError
from hydraflow.model_merger import architecture, families


def sizes_of(directory: Path) -> Architecture:
    """Sizes of the model that config.json describes. Raises ConfigError for a model whose names in Megatron
    are not known."""
    file = directory / "config.json"
    if not file.is_file():
        rule, remedy = "the model's configuration is missing", "--hf_model_path <Hugging Face directory>"
        raise ConfigError.one(str(file), None, rule, remedy)
    found: Any = read_json(file)
    if families.class_name(found, "value") is not None:  # every size is there
        found = SimpleNamespace(**{"rms_norm_eps": 0.0, **found})
    else:
        found = architecture.read_config(directory, False)
    if found.model_type not in FAMILIES:
        rule = f"Megatron's names are known for {', '.join(FAMILIES)}"
        raise ConfigError.one(f"{file}: model_type", found.model_type, rule)
    shape = Architecture.sizes_of(found)
    for name in ("attention_bias", "mlp_bias"):
        if getattr(found, name, False) and not shape.qkv_bias:
            raise ConfigError.one(f"{file}: {name}", True, "Megatron's names of these biases are not known")
    if shape.latent and not shape.latent.rope_interleave:
        rule = "Megatron-Core rotates columns of latent attention with their neighbours"
        raise ConfigError.one(f"{file}: rope_interleave", False, rule)
    return shape
