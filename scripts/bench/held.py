"""Models with random weights, for benches of other sizes than the recipe's model.

In: a name. Out: a Hugging Face directory with a character tokenizer that knows the recipe's problems.
"""

from __future__ import annotations

from pathlib import Path

from hydraflow.models.tiny import ALPHABET, make_model

MODELS = {
    "0.85M": (512, dict(hidden=128, layers=4)),
    "31.7M": (12_743, dict(hidden=512, layers=8, heads=8, kv_heads=4)),
}
"""By the number of their parameters: characters of the tokenizer, and sizes of a Qwen3."""


def write_model(name: str, folder: Path) -> Path:
    """Writes the model; characters beyond the recipe's are Chinese."""
    characters, sizes = MODELS[name]
    others = "".join(chr(0x4E00 + number) for number in range(characters - len(ALPHABET)))
    return make_model(folder, alphabet=ALPHABET + others, **sizes)
