"""Rows for the checks that an engine makes of a model when it is loaded.

In: a vocabulary. Out: short rows of random tokens, the same on every rank. Left out on purpose: the checks
(`fsdp/own_numbers.py`, `megatron/repeated.py`).
"""

from __future__ import annotations

import torch

from hydraflow.protocol import ragged

ROWS = ((5, 6), (5, 11), (2, 3), (9, 7))
"""Tokens of each row's prompt and response; the first two have the same prompt."""


def probe_rows(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and responses of random tokens, ragged."""
    draw = torch.Generator().manual_seed(0)
    tokens = [[torch.randint(vocabulary, (n,), generator=draw) for n in lengths] for lengths in ROWS]
    prompts = [tokens[0][0], tokens[0][0], *(prompt for prompt, _ in tokens[2:])]
    return ragged.from_rows(prompts), ragged.from_rows([response for _, response in tokens])
