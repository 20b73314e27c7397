"""Loads a stream of weights into a model, with a clear error when they do not belong to it.

In: (Hugging Face name, full tensor) pairs. Out: the model's parameters, changed in place.
Left out on purpose: where the stream comes from, and quantisation. Types are converted by copying.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_SHOWN = 5


@torch.no_grad()
def load_weights(model: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every weight. Weights that share memory (tied) may come under one name or several.

    ValueError: an unknown name, a wrong shape, two different tensors for tied weights, or missing
    weights.
    """
    kind = type(model).__name__
    targets: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    needed = {id(p): name for name, p in model.named_parameters()}
    persistent = model.state_dict(keep_vars=True)
    targets |= {name: b for name, b in model.named_buffers(remove_duplicate=False) if name in persistent}
    arrived: dict[int, str] = {}
    for name, tensor in stream:
        target = targets.get(name)
        if target is None:
            raise ValueError(f"{kind} has no weight {name}{_hint(name, targets)}")
        if target.shape != tensor.shape:
            raise ValueError(
                f"weight {name} has shape {tuple(tensor.shape)}, but {kind} needs {tuple(target.shape)}"
            )
        earlier = arrived.setdefault(id(target), name)
        if earlier == name:
            target.copy_(tensor)
        elif not torch.equal(target, tensor.to(target)):
            raise ValueError(
                f"weights {earlier} and {name} are one tensor in {kind} (tied), but came with"
                " different values"
            )
    missing = [name for key, name in needed.items() if key not in arrived]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ValueError(
            f"{len(missing)} of {len(needed)} weights of {kind} did not come:"
            f" {', '.join(missing[:_SHOWN])}{more}"
        )


@torch.no_grad()
def first_difference(model: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first name in the stream whose tensor is not the model's, after conversion to its type. The whole
    stream is read, because its maker may be a collective."""
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | model.state_dict()
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
