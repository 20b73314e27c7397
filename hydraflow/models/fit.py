"""Checks, without loading them, that weight files fill the model of config.json: compares shapes in their
headers with those of modules.

In: a model's source and configuration. Out: the model on the meta device, or a ConfigError. transformers
itself matches the names, with its renaming, merging and tying of tensors, so that what it loads is never
refused. Left out on purpose: quantised models, models with remote code, adapters and names on the hub. Those
are checked when they are loaded (`loading.read_weights`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hydraflow.errors import ConfigError, Problem, first_line
from hydraflow.models import loading
from hydraflow.models.config import ModelSourceConfig
from hydraflow.models.heads import PolicyModel, ValueModel, backbone_of
from hydraflow.models.weight_files import SHOWN, empty_tensors, files_to_load, weight_faults

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DOWNLOAD_AGAIN = "download the complete model again"
CONSTRUCTOR_FAULTS: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError)
CONSTRUCTOR_FAULTS += (ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a model's constructor for inconsistent values in config.json."""


def require_model(
    model: ModelSourceConfig, config: PreTrainedConfig, *, head: str, field: str
) -> PolicyModel | ValueModel | None:
    """The model on the meta device; None for one with its own code, or quantised. Raises ConfigError when the
    model of `config` cannot be built, or is no causal language model."""
    if not _is_plain(config, model):
        return None
    loading.causal_class(config, model, field=field)
    with _building(model, config, field=field):
        return loading.empty_model(
            config, model, head=head, dtype=torch.float32, attention="eager", chunk_tokens=1
        )


@contextmanager
def _building(model: ModelSourceConfig, config: PreTrainedConfig, *, field: str) -> Iterator[None]:
    """Raises ConfigError in place of an error while transformers builds a model."""
    try:
        yield
    except CONSTRUCTOR_FAULTS as error:
        why = first_line(error)
        rule = f"no {config.model_type} model can be built from its configuration: {why}"
        remedy = f"correct its config.json or {field}.override_config"
        raise ConfigError.one(f"{field}.path", model.path, rule, remedy) from error


def require_weights(model: ModelSourceConfig, config: PreTrainedConfig, *, head: str, field: str) -> None:
    """ConfigError for a local directory whose weights are missing, broken, or of another model."""
    assert model.path is not None
    directory = Path(os.path.expanduser(model.path))
    if not directory.is_dir():
        return
    if faults := weight_faults(directory):
        raise ConfigError([Problem(f"{field}.path", None, fault, DOWNLOAD_AGAIN) for fault in faults[:SHOWN]])
    if _is_plain(config, model) and not (directory / "adapter_config.json").is_file():
        _require_fit(directory, model, config, head=head, field=field)


def _is_plain(config: PreTrainedConfig, model: ModelSourceConfig) -> bool:
    """Whether names and shapes of the tensors alone determine how the model is loaded."""
    own_code = model.trust_remote_code and bool(getattr(config, "auto_map", None))
    names = ("quantization_config", "transformers_weights")
    special = any(getattr(part, name, None) for part in (config, config.get_text_config()) for name in names)
    return not own_code and not special


def _require_fit(
    directory: Path, model: ModelSourceConfig, config: PreTrainedConfig, *, head: str, field: str
) -> None:
    path = str(model.path)
    with loading.readable_weights(model.path, OSError, ValueError, RuntimeError, field=field):
        files = files_to_load(directory)
        stored = empty_tensors(files)
    if not files:
        known = "model.safetensors, pytorch_model.bin, or the shards of an index"
        rule = f"none of its weight files has a name that transformers loads: {known}"
        raise ConfigError.one(f"{field}.path", model.path, rule, DOWNLOAD_AGAIN)
    if stored is None:
        return
    shape = require_model(model, config, head="policy", field=field)
    assert shape is not None, "the model is plain"
    lm = shape.hf
    # it computes what is not stored, such as the rotary table, from the configuration again
    with loading.quiet_transformers(), _building(model, config, field=field):
        _, report = type(lm).from_pretrained(
            None,
            config=lm.config,
            state_dict=stored,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    loading.require_filled(report, path=path, head=head, prefix=backbone_of(lm)[0], field=field)
    if head == "value" and (score := stored.get(loading.SCORE)) is not None:
        loading.require_one_value(score, config, path=path, field=field)
