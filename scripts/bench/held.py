"""Models with random weights, for benches of other sizes than the recipe's model.

In: a name. Out: a Hugging Face directory with a character tokenizer that knows the recipe's problems.
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
"""By the number of their parameters: characters of the tokenizer, and sizes of a Qwen3."""
CONSTANT = 4.0
"""A hundred times as large as the other numbers of an embedding."""


def write_model(name: str, folder: Path, mean_length: int | None = None) -> Path:
    """Writes the model; characters beyond the recipe's are Chinese. Responses end after about `mean_length`
    tokens; None: as often as any other token is sampled."""
    characters, sizes = MODELS[name]
    others = "".join(chr(0x4E00 + number) for number in range(characters - len(ALPHABET)))
    make_model(folder, alphabet=ALPHABET + others, **sizes)
    if mean_length is not None:
        _make_end(folder, characters / mean_length)
    return folder


def _make_end(folder: Path, factor: float) -> None:
    """Makes the end token about `factor` times as probable, after any tokens. One dimension of all tied
    embeddings is a large constant, so the last hidden states are nearly constant in it, too: there an
    embedding is a bias to the token's logit."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embeddings = model.get_input_embeddings().weight  # (V, h)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, len(embeddings), (4, 64), generator=draw)
    with torch.no_grad():
        embeddings[:, 0] = CONSTANT
        hidden = model.model(tokens).last_hidden_state[..., 0].mean()
        embeddings[model.config.eos_token_id, 0] += math.log(factor) / hidden
    model.save_pretrained(folder)
