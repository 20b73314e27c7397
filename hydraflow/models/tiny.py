"""Creates a small Qwen3-style model and a character tokenizer, for tests and for machines without the hub.

In: a few sizes and a seed. Out: a Hugging Face directory that any Hugging Face program loads.
Left out on purpose: training it; `recipes/` does that with the supervised trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ALPHABET = "0123456789+-*= "
HIDDEN, LAYERS, HEADS, KV_HEADS = 128, 3, 4, 2
"""Sizes of the arithmetic recipe's model."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
)
"""A user's text verbatim, an assistant's text followed by the end token: no tokens are spent on roles."""


def vocabulary(alphabet: str = ALPHABET) -> list[str]:
    """Every token: padding, end, then the characters."""
    return [PAD, END, *dict.fromkeys(alphabet)]


def make_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character of `alphabet`, an end token and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {token: i for i, token in enumerate(vocabulary(alphabet))}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def config_values(
    tokens: int, *, hidden: int = HIDDEN, layers: int = LAYERS, heads: int = HEADS, kv_heads: int = KV_HEADS
) -> dict[str, Any]:
    """config.json values of a model of that size with `tokens` tokens and tied embeddings; plans need them
    without transformers."""
    return {
        "model_type": "qwen3",
        "vocab_size": tokens,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def make_model(directory: str | Path, *, seed: int = 0, alphabet: str = ALPHABET, **sizes: int) -> Path:
    """Writes model, tokenizer and generation settings to `directory`, with random weights from `seed`.
    `sizes`: see `config_values`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(alphabet)
    values = config_values(len(tokenizer), **sizes)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Qwen3Config(**{**values, "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Path(directory)
