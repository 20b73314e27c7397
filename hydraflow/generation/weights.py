"""Checks a stream of weights against the model that it is for, and loads it, with a clear error when they do
not fit.

In: (Hugging Face name, full tensor) pairs. Out: the model's parameters, changed in place; an engine with a
loader of its own only has the stream checked (`Arrivals`). Left out on purpose: where the stream comes from,
and quantisation. Types are converted by copying.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

_SHOWN = 5


class Arrivals:
    """Which weights of a model have arrived, by the names and shapes of the Hugging Face model. Tied weights
    may be sent under one of their names or under several."""

    def __init__(self, model: nn.Module):
        self._kind = type(model).__name__
        self.known = held_weights(model)
        self._needed = {id(parameter): name for name, parameter in model.named_parameters()}
        self._arrived: dict[int, str] = {}

    def note(self, name: str, shape: torch.Size) -> str:
        """Notes that a weight has arrived, and returns the name under which it first did. ValueError: an
        unknown name or a wrong shape."""
        target = self.known.get(name)
        if target is None:
            raise ValueError(f"{self._kind} has no weight {name}{_hint(name, self.known)}")
        if target.shape != shape:
            raise ValueError(
                f"weight {name} has shape {tuple(shape)}, but {self._kind} needs {tuple(target.shape)}"
            )
        return self._arrived.setdefault(id(target), name)

    def first_name(self, name: str) -> str:
        """The first of a tied weight's names; else its own."""
        return self._needed.get(id(self.known[name]), name)

    def forget(self) -> None:
        """Resets: no weight has been received."""
        self._arrived = {}

    def refuse_other(self, name: str, earlier: str) -> NoReturn:
        """ValueError: two different tensors were sent for tied weights."""
        raise ValueError(
            f"weights {earlier} and {name} are one tensor in {self._kind} (tied), but were sent with"
            " different values"
        )

    def require_all(self) -> None:
        """ValueError names the weights that have not arrived."""
        missing = [name for key, name in self._needed.items() if key not in self._arrived]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ValueError(
                f"{len(missing)} of {len(self._needed)} weights of {self._kind} are missing:"
                f" {', '.join(missing[:_SHOWN])}{more}"
            )


class WeightLoader:
    """Copies a model's weights, in parts."""

    def __init__(self, model: nn.Module):
        self._arrivals = Arrivals(model)
        self.require_all = self._arrivals.require_all

    @torch.no_grad()
    def load(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Copies some of the weights. ValueError: an unknown name, a wrong shape, or two different tensors
        for tied weights."""
        for name, tensor in stream:
            earlier, target = self._arrivals.note(name, tensor.shape), self._arrivals.known[name]
            if earlier == name:
                target.copy_(tensor)
            elif not torch.equal(target, tensor.to(target)):
                self._arrivals.refuse_other(name, earlier)


def held_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones under each of their names."""
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    persistent = model.state_dict(keep_vars=True)
    return held | {
        name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent
    }


@torch.no_grad()
def first_difference(held: Mapping[str, Tensor], stream: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first name in the stream whose tensor is not the one held, after conversion to its type. The whole
    stream is read, because its maker may be a collective."""
    found = [
        name
        for name, tensor in stream
        if name not in held
        or held[name].shape != tensor.shape
        or not torch.equal(held[name], tensor.to(held[name]))
    ]
    return found[0] if found else None


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
