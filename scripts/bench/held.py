"""Models with random weights, for benchmarks at other sizes than that of the recipe's model.

In: a name. Out: a Hugging Face directory with a character tokenizer that covers the recipe's problems.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hydraflow.models.tiny import ALPHABET, make_model

MODELS = {
    "0.85M": (512, dict(hidden=128, layers=4)),
    "31.7M": (12_743, dict(hidden=512, layers=8, heads=8, kv_heads=4)),
}
"""Number of parameters -> characters of the tokenizer, and sizes of a Qwen3."""
END_EVERY = 512
"""Mean response length when the end token is as probable as any other in the smaller vocabulary."""
CONSTANT = 4.0
"""200 times the standard deviation of the embeddings' other entries."""


def write_model(name: str, folder: Path, *, ends: bool = False) -> Path:
    """Writes the model; tokenizer characters beyond the recipe's are Chinese. `ends`: responses end after
    about `END_EVERY` tokens, whatever the size of the vocabulary."""
    characters, sizes = MODELS[name]
    others = "".join(chr(0x4E00 + number) for number in range(characters - len(ALPHABET)))
    make_model(folder, alphabet=ALPHABET + others, **sizes)
    if ends and characters > END_EVERY:
        _make_end(folder)
    return folder


def _make_end(folder: Path) -> None:
    """Raises the end token's probability to 1 / `END_EVERY` after any prefix. One dimension of the tied
    embeddings is set to a large constant, so it is nearly constant in the last hidden states, too; in that
    dimension a token's output embedding acts as a bias of its logit."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embeddings, end = model.get_input_embeddings().weight, model.config.eos_token_id  # (V, h)
    tokens = torch.randint(2, len(embeddings), (16, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embeddings[:, 0] = CONSTANT
        hidden = model.model(tokens).last_hidden_state
        missing = -math.log(END_EVERY) - model.lm_head(hidden).log_softmax(-1)[..., end].mean()
        embeddings[end, 0] += missing / hidden[..., 0].mean()
    model.save_pretrained(folder)
