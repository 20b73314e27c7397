"""Keys of config.json about windows, as a conversion from another type leaves them behind."""

from __future__ import annotations

import pytest
from generation.test_native import SMALL, largest_gap, make, make_request
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    ModernBertDecoderConfig,
    PreTrainedConfig,
)

from hydraflow.generation.base import SamplingParams
from hydraflow.generation.native import NativeEngine


class OwnCodeConfig(LlamaConfig):
    """As code outside transformers has one."""


class FixedConfig(OwnCodeConfig):
    @property
    def sliding_window(self) -> None:
        return None


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, sliding_window=6),
        LlamaConfig(**SMALL, attention_chunk_size=6),
        LlamaConfig(**SMALL, sliding_window=6, layer_types=["sliding_attention"] * 2),
        GPT2Config(**SMALL, sliding_window=6),
        MistralConfig(**SMALL, sliding_window=6, layer_types=["full_attention"] * 2),
        ModernBertDecoderConfig(**SMALL, local_attention=6, cls_token_id=0, sep_token_id=1),
        OwnCodeConfig(**SMALL, sliding_window=6),
        FixedConfig(**SMALL),
        OwnCodeConfig(**SMALL, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    ],
)
def test_only_keys_that_the_type_reads_change_what_attention_sees(config: PreTrainedConfig) -> None:
    kind = LlamaForCausalLM if isinstance(config, OwnCodeConfig) else None
    model = kind(config).eval() if kind else make(config)
    request = make_request([4, 6, 11])
    output = NativeEngine(model).generate(request, SamplingParams(max_tokens=20, ignore_eos=True))
    assert largest_gap(model, request, output, 1.0) < 1e-4
