"""Opens a Hugging Face directory: configuration, tokenizer, an empty model of its shape, and its weights.

In: a `ModelSourceConfig` and its configuration key. Out: transformers objects, or a ConfigError. Left out on
purpose: sharding and broadcasting (`engine/fsdp/build.py`), saving (`engine/hf_files.py`).
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hydraflow.errors import ConfigError, Problem, first_line
from hydraflow.models.attention import NAME, register_attention
from hydraflow.models.cache import cached_snapshot, from_hub
from hydraflow.models.config import ModelConfig, ModelSourceConfig
from hydraflow.models.config_keys import read
from hydraflow.models.heads import PolicyModel, ValueModel, backbone_of
from hydraflow.models.once import resolving
from hydraflow.models.weight_files import files_to_load, stored_tensor
from hydraflow.system.own_code import import_modules
from hydraflow.system.paths import expanded, is_hub_name, model_problems

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenization_*.py")
SCORE = "score.weight"
"""The value head's name in files."""
PLAIN_ATTENTION = {"full_attention", "sliding_attention"}
"""Types of layers in which nothing but plain attention mixes tokens."""


def load_config(model: ModelSourceConfig, *, field: str = "actor_rollout_ref.model") -> PreTrainedConfig:
    """The model's configuration with the user's overrides, and without dropout: the same row must have the
    same log-probability in every pass. Raises ConfigError for a path without a model and for an override that
    the model does not have."""
    from transformers import AutoConfig

    path = require_path(model, field)
    import_modules(model.external_lib, f"{field}.external_lib")
    try:
        with resolving(path, model):
            config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except _unreadable() as error:
        rule = f"cannot be read as a model: {_reason(error)}"
        raise ConfigError.one(f"{field}.path", path, rule, _hint(error, field, path)) from error
    key, given = f"{field}.override_config", dict(model.override_config)
    if unknown := [name for name in given if not hasattr(config, name)]:
        raise ConfigError.one(key, given, f"config.json of {path} has no {', '.join(unknown)}", "remove it")
    try:
        for name, value in given.items():
            setattr(config, name, value)
    except _unreadable() as error:
        rule = f"{name}={value} is not valid for a {config.model_type} model: {_reason(error)}"
        raise ConfigError.one(key, given, rule, f"leave out {name}, or correct it") from error
    _without_dropout(config)
    return config


def _without_dropout(config: PreTrainedConfig) -> None:
    """Turns off dropout, in nested configurations as well."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _without_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)


def load_tokenizer(
    model: ModelSourceConfig, *, field: str = "actor_rollout_ref.model", chat: bool = True
) -> PreTrainedTokenizerBase:
    """The tokenizer; `chat` demands a chat template. Raises ConfigError when either is missing."""
    from transformers import AutoTokenizer

    key = f"{field}.{'tokenizer_path' if model.tokenizer_path else 'path'}"
    path = os.path.expanduser(model.tokenizer_path) if model.tokenizer_path else require_path(model, field)
    remedy = f"{field}.tokenizer_path=<directory with the tokenizer>"
    if not is_hub_name(path) and not os.path.isdir(path):
        rule = "is a file, not a directory" if os.path.exists(path) else "there is no such directory"
        raise ConfigError.one(key, path, rule, remedy)
    import_modules(model.external_lib, f"{field}.external_lib")
    if is_hub_name(path):
        path = from_hub(path, key)
    found = [file for pattern in _TOKENIZER_FILES for file in Path(path).glob(pattern)]
    if os.path.isdir(path) and not found:
        # without this check transformers silently creates an empty tokenizer of the model's type
        raise ConfigError.one(key, path, "holds no tokenizer: there is no tokenizer.json in it", remedy)
    try:
        with resolving(path, model):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain Exception for a file that it cannot read
        rule = f"holds no tokenizer that can be read: {first_line(error)}"
        raise ConfigError.one(key, path, rule, remedy) from error
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    if chat and not tokenizer.chat_template:
        rule = "its tokenizer has no chat template, which prompts need: text is one message of the user"
        remedy = f"{field}.custom_chat_template=<Jinja template>, or an instruct model"
        raise ConfigError.one(key, path, rule, remedy)
    return tokenizer


def load_generation_config(
    model: ModelSourceConfig, *, field: str = "actor_rollout_ref.model"
) -> GenerationConfig | None:
    """The directory's generation settings, which name the end tokens; None if it has none. Raises ConfigError
    when they cannot be read: without its end tokens a model would never stop."""
    from transformers import GenerationConfig

    path = require_path(model, field)
    try:
        return GenerationConfig.from_pretrained(path)
    except _unreadable() as error:
        if isinstance(error, OSError) and not _may_have(path, GENERATION_CONFIG):
            return None
        rule = f"its {GENERATION_CONFIG} cannot be read: {first_line(error)}"
        remedy = f"correct or remove {GENERATION_CONFIG}"
        raise ConfigError.one(f"{field}.path", path, rule, remedy) from error


def _may_have(path: str, name: str) -> bool:
    """Whether a model has that file, or the hub does not say that it has none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if not is_hub_name(path):
        return (Path(path) / name).exists()
    try:
        hf_hub_download(path, name)
    except RemoteEntryNotFoundError:
        return False
    except OSError:
        return True
    return True


def packable(config: PreTrainedConfig, model_class: Any) -> bool:
    """Whether rows of this model may be packed: it uses transformers' attention interface, and only plain
    attention mixes tokens."""
    text = config.get_text_config()
    plain = set(read(text, "layer_types") or ()) <= PLAIN_ATTENTION
    sinks = text.model_type == "gpt_oss"
    return bool(model_class._supports_attention_backend) and plain and not soft_capped(config) and not sinks


def soft_capped(config: PreTrainedConfig) -> bool:
    """Whether attention scores are soft-capped (Gemma 2), which transformers' SDPA silently ignores."""
    return read(config.get_text_config(), "attn_logit_softcapping") is not None


@dataclass(frozen=True)
class Context:
    """Maximum row length of a model."""

    tokens: int
    limit: str
    """The limit in words, for messages: "the model's 2048 positions"."""


def context_of(config: PreTrainedConfig, owner: str = "the model") -> Context | None:
    """The model's maximum row length; None: unknown. With two rotary tables (longrope, as in Phi-3 128k) it
    is that of the short one: a longer row would change all rows computed with it. owner: the model's name in
    messages."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    most: int | None = getattr(text, "max_position_embeddings", None)
    for table in [rope, *rope.values()]:  # some models have one for each type of layer
        if not isinstance(table, Mapping) or table.get("rope_type") != "longrope":
            continue
        if first := table.get("original_max_position_embeddings"):
            return Context(first, f"the {first} positions of {owner}'s short rotary tables (longrope)")
    if most is None or most < 1:  # XLNet has -1: no limit
        return None
    return Context(most, f"{owner}'s {most} positions")


def causal_class(
    config: PreTrainedConfig, model: ModelSourceConfig, *, field: str = "actor_rollout_ref.model"
) -> Any:
    """The class that transformers would build. Raises ConfigError when it is not a causal LM."""
    from transformers import AutoModelForCausalLM

    auto_map = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in auto_map and model.trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        path = require_path(model, field)
        try:
            with resolving(str(model.path), model):
                return get_class_from_dynamic_module(auto_map["AutoModelForCausalLM"], path)
        except (OSError, ImportError, SyntaxError, AttributeError) as error:
            rule = f"its own code cannot be loaded: {first_line(error)}"
            raise ConfigError.one(f"{field}.path", model.path, rule) from error
    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        rule = f"a {config.model_type} model is not a causal language model"
        raise ConfigError.one(f"{field}.path", model.path, rule)
    found = known[type(config)]
    return found[0] if isinstance(found, tuple) else found


def choose_attention(config: PreTrainedConfig, model: ModelConfig, model_class: Any) -> tuple[str, bool]:
    """Name of the attention implementation and whether rows are padded."""
    if model.use_remove_padding and packable(config, model_class):
        register_attention()
        return NAME, False
    if model.use_remove_padding:
        _log.info("%s cannot be packed: rows are padded, as with use_remove_padding=False", config.model_type)
    return own_attention(config, model_class), True


def own_attention(config: PreTrainedConfig, model_class: Any) -> str:
    """transformers' attention implementation for this model, for unpacked rows."""
    return "eager" if soft_capped(config) or not model_class._supports_sdpa else "sdpa"


def empty_model(
    config: PreTrainedConfig,
    model: ModelSourceConfig,
    *,
    head: str,
    dtype: torch.dtype,
    attention: str,
    chunk_tokens: int,
) -> PolicyModel | ValueModel:
    """The model's shape on the meta device: no memory, no values. `head` is policy or value."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        with resolving(str(model.path), model):
            trust = model.trust_remote_code
            lm = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust
            )
        lm.config.dtype = dtype
        widen_buffers(lm)
        if head == "policy":
            return PolicyModel(lm, chunk_tokens=chunk_tokens)
        assert head == "value", head
        name, backbone = backbone_of(lm)
        return ValueModel(backbone, name=name)


def unfilled_model(
    config: PreTrainedConfig, *, device: torch.device | str, dtype: torch.dtype, trust: bool = False
) -> PreTrainedModel:
    """A causal language model whose weights hold arbitrary numbers; tied weights are one tensor. Reads no
    files except, with `trust`, the model's own code; draws no random numbers, and leaves `config` as it
    is."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust
        )
    model.tie_weights()
    return model


def read_weights(
    config: PreTrainedConfig,
    model: ModelSourceConfig,
    *,
    head: str,
    dtype: torch.dtype,
    field: str = "actor_rollout_ref.model",
    tables: bool = False,
) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name, on the CPU in `dtype`; with `tables` also buffers that no file holds
    (rotary tables). Tied weights come under each of their names. A value head that the directory lacks starts
    at zero. Raises ConfigError when other weights are missing."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    path = require_path(model, field)
    readable = readable_weights(path, OSError, SafetensorError, field=field)
    with resolving(path, model), readable, quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=model.trust_remote_code,
            ignore_mismatched_sizes=True,
            weights_only=True,
        )
    lm, report = loaded
    require_filled(report, path=path, head=head, prefix=backbone_of(lm)[0], field=field)
    buffers = lm.named_buffers() if tables else persistent_buffers(lm)
    named = {**dict(lm.named_parameters(remove_duplicate=False)), **dict(buffers)}
    weights = {name: tensor.detach() for name, tensor in named.items()}
    if head == "value":
        folder = local_folder(path)  # a name on the hub has been downloaded
        score = stored_tensor(folder, SCORE) if folder is not None else None
        if score is not None:
            require_one_value(score, config, path=path, field=field)
        hidden = config.get_text_config().hidden_size
        weights[SCORE] = torch.zeros(1, hidden, dtype=dtype) if score is None else score.to(dtype)
    return weights


@contextmanager
def readable_weights(path: str | None, *faults: type[Exception], field: str) -> Iterator[None]:
    """Raises ConfigError when the weights of a model cannot be read, which raises one of `faults`, or when a
    pickle holds more than tensors."""
    try:
        yield
    except ConfigError:
        raise
    except pickle.UnpicklingError as error:
        rule = f"its weights hold more than tensors, which was not executed: {refused_content(error)}"
        raise ConfigError.one(f"{field}.path", path, rule) from error
    except faults as error:
        rule = f"its weights cannot be read: {first_line(error)}"
        raise ConfigError.one(f"{field}.path", path, rule) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' reports and progress bars."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def require_filled(report: Mapping[str, Any], *, path: str, head: str, prefix: str, field: str) -> None:
    """Raises ConfigError when weights that `head` needs are missing, or of another shape. `report`:
    transformers' report of a load. `prefix`: the backbone's; a value model needs nothing else from a causal
    LM."""

    def needed(name: str) -> bool:
        return head == "policy" or name.startswith(f"{prefix}.")

    rules = []
    if misshapen := sorted(entry for entry in report["mismatched_keys"] if needed(entry[0])):
        name, stored, wanted = misshapen[0]
        first = f"the first {name}: {list(stored)}, not {list(wanted)}"
        rules.append(f"{len(misshapen)} of its weights are of another shape, {first}")
    if missing := sorted(filter(needed, report["missing_keys"])):
        rules.append(f"{len(missing)} weights are not in its files, the first {missing[0]}")
    if rules:
        raise ConfigError([Problem(f"{field}.path", path, rule) for rule in rules])


def require_one_value(score: torch.Tensor, config: PreTrainedConfig, *, path: str, field: str) -> None:
    """Raises ConfigError when a stored value head does not give exactly one value per token."""
    wanted = [1, config.get_text_config().hidden_size]
    if list(score.shape) != wanted:
        rule = f"its value head {SCORE} is {list(score.shape)}, not {wanted}"
        raise ConfigError.one(f"{field}.path", path, rule)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that are saved to files, by name."""
    for prefix, part in module.named_modules():
        for leaf, buffer in part.named_buffers(recurse=False):
            if leaf not in part._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}" if prefix else leaf, buffer


def widen_buffers(lm: Any) -> None:
    """Converts to float32 the buffers that transformers always loads as float32, such as router biases.
    Building a model from its configuration gives them the model's dtype."""
    kept = getattr(lm, "_keep_in_fp32_modules_strict", None) or ()
    for name, buffer in list(persistent_buffers(lm)):
        if buffer.dtype in (torch.bfloat16, torch.float16) and any(part in name for part in kept):
            owner, _, leaf = name.rpartition(".")
            lm.get_submodule(owner).register_buffer(leaf, buffer.float())


def require_path(model: ModelSourceConfig, field: str) -> str:
    """The model's folder with `~` expanded, or for a hub name what `from_hub` returns. ConfigError when there
    is no such model."""
    if not model.path:
        remedy = f"{field}.path=<Hugging Face directory or hub name>"
        raise ConfigError.one(f"{field}.path", None, "no model is named", remedy)
    if problems := model_problems(model.path, f"{field}.path"):
        raise ConfigError(problems)
    if is_hub_name(model.path):
        return from_hub(model.path, f"{field}.path")
    return os.path.expanduser(model.path)


def local_folder(path: str) -> Path | None:
    """The folder of a model's path, or of the hub's cache for a name; None: it was not downloaded."""
    folder = expanded(path)
    return folder if os.path.isdir(folder) else cached_snapshot(path)


def lacks_tensor(path: str, name: str) -> bool:
    """Whether the weights of a model, here or on the hub, certainly have no tensor of that name."""
    from httpx2 import HTTPError  # huggingface_hub lets its errors through
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    folder = local_folder(path)
    try:
        if folder is not None and (files_to_load(folder) or not is_hub_name(path)):
            return stored_tensor(folder, name) is None
        return name not in get_safetensors_metadata(path).weight_map
    except (NotASafetensorsRepoError, SafetensorsParsingError, OSError, HTTPError, pickle.UnpicklingError):
        return False  # loading it says what is wrong


def refused_content(error: pickle.UnpicklingError) -> str:
    """What torch's unpickler refused, without its advice to trust the file.

    >>> why = "WeightsUnpickler error: Unsupported global: GLOBAL os.system was not an allowed global"
    >>> refused_content(pickle.UnpicklingError(f"load it if you trust it. \\n\\t{why}"))
    'Unsupported global: GLOBAL os.system'
    """
    found = re.search(r"WeightsUnpickler error: (.+?)(?: was not an allowed|\. |$)", str(error), re.MULTILINE)
    return found[1] if found else "torch does not say what"


def _unreadable() -> tuple[type[Exception], ...]:
    """Errors of transformers for JSON that is not a configuration or has invalid values."""
    from huggingface_hub.errors import StrictDataclassError

    known = AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError
    return (*known, ArithmeticError, StrictDataclassError)


def _reason(error: BaseException) -> str:
    """transformers' reason, without the name of its check."""
    from huggingface_hub.errors import StrictDataclassError

    cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
    return first_line(cause or error)


def _hint(error: BaseException, field: str, path: str) -> str:
    if "trust_remote_code" in str(error):
        return f"{field}.trust_remote_code=true, if you trust it"
    if is_hub_name(path):
        return f"{field}.path=<folder with the model, or its right name on the hub>"
    return f"correct {Path(path) / 'config.json'}, or download the model again"
