"""The forward pass with a cache, for models of other signatures."""

from __future__ import annotations

from typing import Any

from generation.test_native import SMALL, make, make_request, rows
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hydraflow.generation.base import SamplingParams
from hydraflow.generation.native import NativeEngine


class AllLogits(LlamaForCausalLM):
    """A model whose forward takes no `logits_to_keep`."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
    ) -> Any:
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)


def test_a_model_that_computes_the_logits_of_all_tokens_samples_from_the_last() -> None:
    model, request = make(LlamaConfig(**SMALL)), make_request([3, 9, 4], samples=2)
    expected = rows(NativeEngine(model).generate(request, SamplingParams(max_tokens=6)))
    model.__class__ = AllLogits
    assert rows(NativeEngine(model).generate(request, SamplingParams(max_tokens=6))) == expected
