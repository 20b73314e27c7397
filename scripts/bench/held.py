"""Models with random weights, for benchmarks at other sizes than that of the recipe's model.

In: a name. Out: a Hugging Face directory with a character tokenizer that covers the recipe's problems.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hydraflow.models.tiny import ALPHABET, make_model, make_tokenizer

SMALL: dict[str, Any] = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=32)
SMALL |= dict(num_key_value_heads=2, intermediate_size=384, tie_word_embeddings=True)
"""The sizes of 0.85M in other types."""
KINDS = [*["sliding_attention"] * 3, "full_attention"]
EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192)
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "0.85M": (512, dict(hidden=128, layers=4)),
    "31.7M": (12_743, dict(hidden=512, layers=8, heads=8, kv_heads=4)),
    "gpt2": (512, dict(model_type="gpt2", n_embd=128, n_layer=4, n_head=4)),
    "llama": (512, dict(model_type="llama", **SMALL)),
    "gemma3_text": (512, dict(model_type="gemma3_text", layer_types=KINDS, **SMALL)),
    "qwen3_moe": (512, dict(model_type="qwen3_moe", **SMALL, **EXPERTS)),
}
"""Name -> characters of the tokenizer, and sizes of a Qwen3 (named by its number of parameters), or values of
the config of another type. Of these, gpt2 has 0.99 million parameters, qwen3_moe 2.6, of which a token uses
about 0.85."""
CONSTANT = 4.0
"""200 times the standard deviation of the embeddings' other entries."""


def write_model(name: str, folder: Path, *, end_every: int | None = None) -> Path:
    """Writes the model; tokenizer characters beyond the recipe's are Chinese. `end_every`: mean response
    length, had responses no limit; None, or at least the vocabulary: any token is as probable as the end."""
    characters, sizes = MODELS[name]
    others = "".join(chr(0x4E00 + number) for number in range(characters - len(ALPHABET)))
    write = _make_other if "model_type" in sizes else make_model
    write(folder, alphabet=ALPHABET + others, **sizes)
    if end_every is not None and characters > end_every:
        _make_end(folder, end_every)
    return folder


def _make_other(folder: Path, *, alphabet: str, model_type: str, **values: Any) -> None:
    """As `make_model`, of another type."""
    tokenizer = make_tokenizer(alphabet)
    tokens = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **tokens, **values)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_end(folder: Path, every: int) -> None:
    """Raises the end token's probability to 1 / `every` after any prefix. One dimension of the tied
    embeddings is set to a large constant, so it is nearly constant in the last hidden states, too; in that
    dimension a token's output embedding acts as a bias of its logit."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embeddings, end = model.get_input_embeddings().weight, model.config.eos_token_id  # (V, h)
    tokens = torch.randint(2, len(embeddings), (16, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embeddings[:, 0] = CONSTANT
        hidden = model.base_model(tokens).last_hidden_state
        missing = -math.log(every) - model.lm_head(hidden).log_softmax(-1)[..., end].mean()
        embeddings[end, 0] += missing / hidden[..., 0].mean()
    model.save_pretrained(folder)
