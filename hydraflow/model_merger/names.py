"""Maps the trainer's names to those of transformers' modules: strips wrappers, prefixes and adapters.

In: a `Checkpoint`. Out: `Weights`: the model's tensors without adapters, and the adapters by the weight that
they change. Left out on purpose: names in files where those differ from the modules' (`architecture.py`),
merging (`lora.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hydraflow.engine.megatron.saved_names import hugging_face
from hydraflow.engine.stored.checkpoint import Checkpoint
from hydraflow.engine.stored.pieces import StoredTensor
from hydraflow.errors import ConfigError
from hydraflow.model_merger.lora import PEFT, Adapter
from hydraflow.model_merger.sizes import sizes_of

_WRAPPERS = re.compile(r"\b(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_POLICY_PREFIX = "lm."
_ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<name>\w+))?\.weight")
_TRL_HEAD, _TRL_BODY = "v_head.summary.", "pretrained_model."
SCORE = "score."
"""Prefix of a value head's weights."""


@dataclass
class Weights:
    """A model's tensors by the names of transformers' modules."""

    plain: dict[str, StoredTensor]
    """Everything but adapters."""
    adapters: dict[str, Adapter]
    """Adapters by the name of the weight that they change."""
    head: str
    """policy or value."""
    notes: list[str]
    """Notes for the user about what was left out."""


def weights_of(checkpoint: Checkpoint, *, is_value_model: bool = False) -> Weights:
    """The weights of a whole checkpoint. Raises ConfigError when its names cannot be understood."""
    checkpoint.require_whole()
    tensors = checkpoint.tensors
    if checkpoint.layout == "megatron":
        tensors = hugging_face(checkpoint, sizes_of(checkpoint.huggingface))
    prefix = checkpoint.prefix
    if prefix is None:
        prefix = _POLICY_PREFIX if all(name.startswith(_POLICY_PREFIX) for name in tensors) else ""
    plain: dict[str, StoredTensor] = {}
    sides: dict[str, dict[str, StoredTensor]] = {}
    for raw, tensor in tensors.items():
        name = _WRAPPERS.sub("", raw).removeprefix(prefix).removeprefix(PEFT)
        if found := _ADAPTER.fullmatch(name):
            module = sides.setdefault(f"{found['module']}.weight", {})
            _refuse_second(checkpoint, module, found["side"], name)
            module[found["side"]] = tensor
            continue
        if ".lora_" in name:
            rule = f"{name} is a kind of adapter that cannot be merged"
            raise ConfigError.one(str(checkpoint.directory), None, rule)
        name = name.replace(".base_layer.", ".")
        _refuse_second(checkpoint, plain, name, name)
        plain[name] = replace(tensor, name=name)
    plain, notes = _without_trl_names(plain)
    return Weights(plain, _pair(checkpoint, plain, sides), _head(checkpoint, plain, is_value_model), notes)


def _head(checkpoint: Checkpoint, plain: Mapping[str, StoredTensor], is_value_model: bool) -> str:
    found = "value" if f"{SCORE}weight" in plain else "policy"
    head = checkpoint.head or found
    if is_value_model and head != "value":
        rule = f"the checkpoint in {checkpoint.directory} has no value head ({SCORE}weight)"
        raise ConfigError.one("--is-value-model", None, rule, "merge it without --is-value-model")
    return head


def _pair(
    checkpoint: Checkpoint, plain: Mapping[str, StoredTensor], sides: Mapping[str, Mapping[str, StoredTensor]]
) -> dict[str, Adapter]:
    adapters = {}
    for name, pair in sides.items():
        if len(pair) != 2 or name not in plain:
            part = "the weight itself" if len(pair) == 2 else "one of its matrices A and B"
            rule = f"the adapter of {name} lacks {part}"
            raise ConfigError.one(str(checkpoint.directory), None, rule)
        adapters[name] = Adapter(name, pair["A"], pair["B"])
    return adapters


def _without_trl_names(plain: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
    """TRL's value model under transformers' names: its linear head is the score of token classification."""
    if not any(name.startswith(_TRL_HEAD) for name in plain):
        return plain, []
    renamed = {}
    for name, tensor in plain.items():
        if name.startswith(_TRL_HEAD):
            name = SCORE + name.removeprefix(_TRL_HEAD)
        renamed[name.removeprefix(_TRL_BODY)] = tensor
    notes = []
    if renamed.pop("lm_head.weight", None) is not None:
        notes.append("lm_head.weight is left out: a value model does not use it")
    return {name: replace(tensor, name=name) for name, tensor in renamed.items()}, notes


def _refuse_second(checkpoint: Checkpoint, known: Mapping[str, object], key: str, name: str) -> None:
    if key in known:
        rule = f"{name} occurs twice, under different wrappers or adapters"
        raise ConfigError.one(str(checkpoint.directory), None, rule)
