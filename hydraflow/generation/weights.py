"""Checks a stream of weights against its model and loads it, with a clear error when they do not fit.

In: (Hugging Face name, full tensor) pairs, or consecutive parts of a tensor. Out: the model's parameters,
changed in place; for engines with their own loader the stream is only checked (`Arrivals`) and parts are
assembled (`Assembly`). Dtypes are converted while copying. Left out on purpose: the source of the stream, and
quantisation.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from hydraflow.weights.buckets import Part, Weight

_SHOWN = 5


class Arrivals:
    """Tracks which weights of a model have arrived, by the names and shapes of the Hugging Face model. Tied
    weights may be sent under one or several of their names."""

    def __init__(self, model: nn.Module):
        self._kind = type(model).__name__
        self.known = held_weights(model)
        self._needed = {id(parameter): name for name, parameter in model.named_parameters()}
        self._arrived: dict[int, str] = {}
        self._partial: dict[str, int] = {}
        """Weight -> how many of its numbers have arrived, if incomplete."""

    def note(self, name: str, sent: Tensor | Part) -> str:
        """Records a weight, or the next part of it, and returns the name under which it first arrived.
        ValueError: an unknown name, a wrong shape, or a missing part."""
        target = self.known.get(name)
        if target is None:
            close = difflib.get_close_matches(name, self.known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{self._kind} has no weight {name}{hint}")
        if target.shape != sent.shape:
            raise ValueError(
                f"weight {name} has shape {tuple(sent.shape)}, but {self._kind} needs {tuple(target.shape)}"
            )
        if isinstance(sent, Part) and not self._completes(name, sent):
            return self._arrived.get(id(target), name)
        return self._arrived.setdefault(id(target), name)

    def first_name(self, name: str) -> str:
        """The first of a tied weight's names; else its own."""
        return self._needed.get(id(self.known[name]), name)

    def forget(self, which: Callable[[str], bool] | None = None) -> None:
        """Resets all weights, or those whose names match."""
        forgotten = {id(tensor) for name, tensor in self.known.items() if which is None or which(name)}
        self._arrived = {key: name for key, name in self._arrived.items() if key not in forgotten}
        self._partial = {
            name: n for name, n in self._partial.items() if id(self.known[name]) not in forgotten
        }

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

    def _completes(self, name: str, part: Part) -> bool:
        if (numbers := self._partial.pop(name, 0)) != part.start:
            raise ValueError(
                f"a part of weight {name} begins at number {part.start}, but {numbers} have arrived so far"
            )
        if not part.is_last:
            self._partial[name] = part.end
        return part.is_last


class Assembly:
    """Assembles weights from their parts, for loaders that take full tensors. It holds one weight at a time:
    the parts of one weight are consecutive."""

    def __init__(self) -> None:
        self._whole: Tensor | None = None

    def add(self, sent: Tensor | Part) -> Tensor | None:
        """Adds a weight or a part. Returns a copy of the complete weight (the stream is borrowed), None
        before. `Arrivals` has checked the parts."""
        if not isinstance(sent, Part):
            return sent.clone(memory_format=torch.contiguous_format)
        if sent.start == 0:
            self._whole = sent.numbers.new_empty(sent.shape)
        assert self._whole is not None, "parts come in order"
        sent.place_in(self._whole).copy_(sent.numbers)
        if not sent.is_last:
            return None
        whole, self._whole = self._whole, None
        return whole


@torch.no_grad()
def load_weights(arrivals: Arrivals, stream: Iterable[Weight]) -> None:
    """Copies weights, or parts of one, into the model. ValueError: an unknown name, a wrong shape, a missing
    part, or two different tensors for tied weights."""
    for name, sent in stream:
        earlier = arrivals.note(name, sent)
        target, source = _pair(arrivals.known[name], sent)
        if earlier == name:
            target.copy_(source)
        elif not torch.equal(target, source.to(target)):
            arrivals.refuse_other(name, earlier)


def held_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones under each of their names."""
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    persistent = model.state_dict(keep_vars=True)
    return held | {
        name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent
    }


@torch.no_grad()
def first_difference(held: Mapping[str, Tensor], stream: Iterable[Weight]) -> str | None:
    """The first name in the stream whose tensor, or part, differs from the held one, after conversion to its
    dtype. The whole stream is read, because producing it may be a collective."""
    found = [name for name, sent in stream if name not in held or _differs(held[name], sent)]
    return found[0] if found else None


def _differs(held: Tensor, sent: Tensor | Part) -> bool:
    if held.shape != sent.shape:
        return True
    mine, theirs = _pair(held.contiguous(), sent)
    theirs = theirs.to(mine)
    return not (torch.equal(mine, theirs) or torch.equal(_bits(mine), _bits(theirs)))


def _bits(tensor: Tensor) -> Tensor:
    """Its bytes, which are equal for the same NaN, too."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _pair(held: Tensor, sent: Tensor | Part) -> tuple[Tensor, Tensor]:
    """The held counterpart of what was sent, as a view, and what was sent."""
    return (sent.place_in(held), sent.numbers) if isinstance(sent, Part) else (held, sent)
