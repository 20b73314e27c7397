"""Which models decode rows of several widths together: those whose attention takes from the cache what it
returns, and nothing else. The numbers of such models: test_native.py."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from generation.test_native import CONFIGS, make
from transformers.models.llama.modeling_llama import LlamaAttention

from hydraflow.generation.widths import _DIRECT, takes_joint_cache

CODE = inspect.getsource(LlamaAttention.forward)
INTERFACE = "query_states,\n            key_states,\n            value_states,"


class AsksForTheKeys(LlamaAttention):
    """Looks at what it has appended."""

    def forward(self, hidden: Any, past_key_values: Any = None, **others: Any) -> Any:
        keys, values = past_key_values.update(hidden, hidden, self.layer_idx)
        return keys.sum() + values.sum()


class ReadsNoCache(LlamaAttention):
    def forward(self, hidden: Any, **others: Any) -> Any:
        return hidden


class HasNoFile(LlamaAttention):
    forward = eval("lambda self, hidden, **others: hidden")


def test_attention_to_other_keys_than_the_caches_is_seen() -> None:
    assert INTERFACE in CODE and _DIRECT.search(CODE)
    for other in ("longer_keys,\n            value_states,", "value_states,\n            key_states,"):
        changed = CODE.replace(INTERFACE, f"query_states,\n            {other}")
        assert changed != CODE and not _DIRECT.search(changed)


@pytest.mark.parametrize(
    ("attention", "layers"),
    [(AsksForTheKeys, slice(1)), (ReadsNoCache, slice(None)), (HasNoFile, slice(1))],
)
def test_a_layer_whose_code_is_another_is_enough_for_no(attention: type, layers: slice) -> None:
    model: Any = make(CONFIGS["llama"])
    assert takes_joint_cache(model)
    for layer in model.model.layers[layers]:
        layer.self_attn.__class__ = attention
    assert not takes_joint_cache(model)


def test_values_of_another_width_than_the_keys_are_not_split() -> None:
    model = make(CONFIGS["llama"])
    model.config.v_head_dim = 6
    try:
        assert not takes_joint_cache(model)
    finally:
        del model.config.v_head_dim  # other models may share it
    assert takes_joint_cache(model)
