"""Models whose number of parameters is published."""

from __future__ import annotations

from typing import Any


def config(
    kind: str, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    """The config.json of a model."""
    return dict(
        model_type=kind,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        **others,
    )


EXPERTS = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    # https://huggingface.co/Qwen/Qwen2.5-7B: 7.61B, of which 6.53B are not embeddings
    "Qwen2.5-7B": (7_615_616_512, config("qwen2", 3584, 28, 28, 4, 18944, 152064)),
    # https://huggingface.co/Qwen/Qwen2.5-0.5B: 0.49B, tied
    "Qwen2.5-0.5B": (494_032_768, config("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True)),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B: 8.03B
    "Llama-3-8B": (8_030_261_248, config("llama", 4096, 32, 32, 8, 14336, 128256)),
    "Mistral-7B": (7_241_732_096, config("mistral", 4096, 32, 32, 8, 14336, 32000)),
    "Mixtral-8x7B": (
        46_702_792_704,
        config("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
    ),
    "Qwen3-8B": (8_190_735_360, config("qwen3", 4096, 36, 32, 8, 12288, 151936)),
    "Qwen3-30B-A3B": (30_532_122_624, config("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, **EXPERTS)),
}
"""Parameters, and the config.json."""
