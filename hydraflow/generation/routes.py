"""Records the experts of a wave's tokens while it is sampled.

In: a model's routers, and a call after each forward pass. Out: for each row, the experts of its prompt and
its response without the last token, which the model never reads. Left out on purpose: rows (`decode.py`).

Legend: P padded prompt, B rows in the batch now, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydraflow.models.routers import HFRouters
from hydraflow.models.routing import LineRoutes, stored_as


class WaveRoutes:
    """Records one wave, until `rows` is called."""

    def __init__(self, routers: HFRouters):
        self._routers, self._line = routers, LineRoutes()
        self._prompts: list[Tensor] = []
        """(P, L, K) of each prompt; P differs."""
        self._steps: list[tuple[Tensor, Tensor]] = []
        """For each step: the rows' indices in the wave, and their experts (B, L, K)."""
        routers.begin(self._line)

    def note_prompts(self, prompts: int, width: int) -> None:
        """Records a forward pass over prompts padded to that width; only the first `prompts` are kept."""
        self._prompts += self._taken().unflatten(0, (-1, width))[:prompts]

    def note_step(self, slot: Tensor) -> None:
        """Records a forward pass over one token per row. slot: (B,) the rows' indices in the wave."""
        self._steps.append((slot, self._taken()))

    def rows(
        self, prompt_lengths: Sequence[int], owner: Sequence[int], lengths: Sequence[int]
    ) -> list[Tensor]:
        """The experts of all rows, on the host. owner: the prompt of each row; lengths: tokens of each
        response."""
        self._routers.begin(None)
        prompts = zip(self._prompts, prompt_lengths, strict=True)
        own = [experts[-length:].cpu() for experts, length in prompts]  # without padding
        steps = own[0].new_empty(len(self._steps), len(owner), *own[0].shape[1:])
        for step, (slot, experts) in enumerate(self._steps):
            steps[step, slot.cpu()] = experts.cpu()
        return [
            torch.cat([own[prompt], steps[: length - 1, row]])
            for row, (prompt, length) in enumerate(zip(owner, lengths, strict=True))
        ]

    def _taken(self) -> Tensor:
        """(tokens, L, K) of the last pass."""
        chosen = self._line.chosen
        experts = torch.stack([chosen[layer] for layer in sorted(chosen)], 1)
        return experts.to(stored_as(self._routers.experts))
